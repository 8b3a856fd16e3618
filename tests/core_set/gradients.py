"""Gradients of calls on an executor, and what must hold of them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _compute_gradients, _dispatch, _gradients, _options, reference
from archflash.sim import _attention as simulator

from ..sim.explained import unexplained
from ..sim.schedules import IN_FULL, MODES, looks_for_races, some_of
from .checks import Guarded, dense_strides, same_bits
from .executors import Executor, number_of, schedules_of

NAMES = ("dq", "dk", "dv")
# Options of `differentiate` that are none of the call.
_HOW = (
    "gradient_dtype", "pad", "schedules", "deterministic", "planned_for", "sms", "mask_gradient",
)  # fmt: skip


def kernels_with_gradients(on: Executor) -> list[str]:
    """Those that give the same bits each time; test_rounds_gradients.py has the others."""
    others = ("hopper", "blackwell_dc")
    return [name for name in on.kernels() if name in _gradients.FOLDERS and name not in others]


def dtypes_with_gradients(on: Executor, kernel: str) -> list[str]:
    """The dtypes that the backward pass of a kernel takes."""

    def takes(dtype: str) -> bool:
        q = torch.empty(1, 1, 8, 64, dtype=getattr(torch, dtype), device="meta")
        home = native.describe(kernel).home_device
        try:
            archflash.explain(q, q, q, device=home, implementation=kernel, backward=True)
        except archflash.ForcedImplementationError:
            return False
        return True

    return [dtype for dtype in on.dtypes_of(kernel) if takes(dtype)]


def inputs(
    on: Executor, nq: int, nk: int, d: int, dv: int, dtype: str, *, batch: int = 1,
    heads: tuple[int, int] = (2, 1), seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """dout, q, k, v in the layout bhnd."""
    q, k, v = on.qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=heads, seed=seed)
    return [on.rand(batch, heads[0], nq, dv, seed=seed + 90, dtype=dtype), q, k, v]


# A launch that meets several features at once: (nq, nk, d, dv, batch, heads), options in words.
FeatureCase = tuple[tuple[Any, ...], dict[str, Any]]


def feature_call(
    on: Executor, case: FeatureCase, dtype: str, seed: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors and options of a case. sinks and dlse say whether there are such tensors."""
    (nq, nk, d, dv, batch, heads), words = case
    options = dict(words)
    tensors = inputs(on, nq, nk, d, dv, dtype, batch=batch, heads=heads, seed=seed)
    if options.get("layout") == "bnhd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    if options.pop("sinks", False):
        options["sinks"] = on.rand(heads[0], seed=5)
    if options.pop("dlse", False):
        options["dlse"] = on.rand(batch, heads[0], nq, seed=6)
    if "q_offset" in options:
        options["q_offset"] = on.int32(*options["q_offset"])
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    return tensors, options


def assert_every_kernel_is_planned(
    on: Executor, kernel: str, dtype: str, head_dims: Sequence[tuple[int, int]],
    devices: Sequence[native.Device | None], deterministic: Sequence[bool] = (False,),
    with_softcap: Sequence[tuple[int, int]] = (), heads: Sequence[tuple[int, int]] = ((2, 1),),
    chains: bool = False, keys: Sequence[int] = (4,),
) -> None:  # fmt: skip
    """Calls with these head dimensions, planned for these GPUs (None: the one that is simulated),
    take every kernel that was compiled for gradients of a dtype, and no other. deterministic:
    whether the calls ask for deterministic gradients, each of these. with_softcap: head dimensions
    of further calls, which have a softcap. heads: of q and k. chains: further calls are
    deterministic and have many keys, whose tiles have sums of their own. keys: of the others.
    """
    planned: set[str] = set()
    images: set[str] = set()
    all_dims = [(dims, 0.0) for dims in head_dims] + [(dims, 1.0) for dims in with_softcap]
    shapes = list(itertools.product(keys, deterministic, heads))
    if chains:
        shapes += [(nk, True, (1, 1)) for nk in (900, 300)]  # tiles of 128 keys, and of 64
    cases = itertools.product(all_dims, devices, shapes)
    for (dims, softcap), device, (nk, same_bits_asked, of_call) in cases:
        dout, q, k, v = inputs(on, 128, nk, *dims, dtype, heads=of_call)
        given = {"sinks": on.tensor([0.0] * of_call[0]), "softcap": softcap}
        if chains and same_bits_asked:
            given["window"] = (nk // 2, nk // 2)  # few rows that see all keys have other kernels
        call = _options.complete(given)
        unread = torch.empty_like(dout), q.new_empty(q.shape[:3], dtype=torch.float32)
        request = _gradients.Request(dout, q, k, v, *unread, None, call)
        into = _gradients.Gradients.like(request)
        asked = _gradients.decide(request, into, device, kernel, deterministic=same_bits_asked)
        plan = asked.plan
        assert plan is not None
        images |= {launch["image"] for launch in plan.to_dict()["launches"]}
        planned |= set(plan.kernels)
    built = {
        entry
        for image in images
        for entries in json.loads(
            files("archflash").joinpath(f"_kernels/{image}.json").read_text()
        ).values()
        for entry in entries
    }
    # Kernels of dropout, of calls with many heads, of parts of tiles and the like have their own.
    elsewhere = ("_dropout", "_turns", "_stays", "_parts")
    elsewhere += (
        "_rows_two",
        "_rows_three",
        "_rows_four",
        "_rows_masked",
        "_rows_two_masked",
        "_short_masked",
    )
    here = {entry for entry in built if not entry.endswith(elsewhere)}
    assert here <= planned <= built, planned ^ here


def forward(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a perfect kernel leaves for the backward pass: the output, rounded, and the LSE."""
    out, lse = reference.attention(q, k, v, **_semantics(call))
    return out.to(q.dtype), lse.float().contiguous()


def _semantics(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in _options.ADVICE}


def assert_keys_behind_the_end_do_not_matter(on: Executor, kernel: str, d: int) -> None:
    """Gradients in fp16 of a few keys, where sum(dout * out) is larger than fp16 can say and the
    LSE is negative. A key behind the end has a score of 0, so that its weight were 1 and its dS
    infinite, if it counted. All keys and all queries are the same, so dq and dk are 0.
    """
    nq, nk, size = 9, 20, 45.0
    dout, q, k, v = inputs(on, nq, nk, d, d, "float16", heads=(1, 1))
    dout, v = dout.fill_(size), v.fill_(size)
    q, k = q.fill_(0.5), k.fill_(-4.0)
    _, lse = forward(q, k, v, {})
    assert d * size * size > torch.finfo(torch.float16).max
    assert lse.max() < 0
    found = differentiate(on, kernel, dout, q, k, v, deterministic=False, schedules=(0,))
    for name, expected in zip(NAMES, (0.0, 0.0, size * nq / nk), strict=True):
        x = getattr(found, name)
        torch.testing.assert_close(x, torch.full_like(x, expected), rtol=1e-3, atol=1e-3)


def differentiate(
    on: Executor, kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *,
    dlse: Tensor | None = None, gradient_dtype: torch.dtype | None = None,
    add_to: float | None = None, pad: int = 0, schedules: Sequence[int] | None = None,
    deterministic: bool = True, planned_for: str | None = None, sms: int | None = None,
    mask_gradient: bool = False, **call: Any,
) -> reference.Gradients:  # fmt: skip
    """The gradients of a call, computed more than once with the same bits each time if they are
    deterministic; nothing is written outside of them, and all of them is written.

    Args:
        on: the executor.
        kernel: the implementation.
        dout, q, k, v, dlse, **call: as for `archflash.attention_backward`.
        gradient_dtype: that of dq, dk and dv; default that of q.
        add_to: the number that dq, dk and dv are full of, to which gradients are added.
        pad: elements between the rows of dq, dk and dv.
        schedules: numbers of the simulator's schedules; None: as many as the call is worth, and one
            where bits may differ, as they are not compared.
        deterministic: as for `archflash.attention_backward`.
        planned_for: a known GPU whose plan is run; None: that of the executor.
        sms: the SMs of the GPU that is planned for, few of which let a small call have parts.
        mask_gradient: whether the gradient of attn_mask is wanted, too.
    """
    out, lse = forward(q, k, v, call)
    options = _options.complete(call)
    request = _gradients.Request(dout, q, k, v, out, lse, dlse, options, mask_gradient)
    if schedules is None:
        schedules = (0, 1)
        if on.name != "gpu":
            schedules = schedules_of(kernel, q, k, v, call, compared=deterministic)
            if not deterministic and not IN_FULL:
                schedules = schedules[:1]
    elif on.name != "gpu":
        named = len(schedules)
        schedules = some_of(schedules, number_of(q, k, v, call), compared=deterministic)
        assert not deterministic or len(schedules) > 1 or named == 1, "nothing to compare"
    first: list[Tensor] = []
    for number in schedules:
        guarded = [
            Guarded(x.shape, dense_strides(x.shape, pad), gradient_dtype or x.dtype, on.device)
            for x in (q, k, v)
        ]
        if add_to is not None:
            for one in guarded:
                one.view.fill_(add_to)
        sinks = call.get("sinks")
        dsinks = None if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
        dmask = _gradients.Gradients.like(request).dmask
        into = _gradients.Gradients(*(x.view for x in guarded), dsinks, add_to is not None, dmask)
        if on.name == "gpu" and planned_for is None and sms is None:
            _compute_gradients.compute(request, into, kernel, deterministic)
        else:
            plan = _plan(request, into, kernel, deterministic, planned_for, sms)
            if deterministic and dmask is not None and not plan.orders_mask_sums:
                into = into.with_dmask_of_all_scores(request)
                plan = _plan(request, into, kernel, deterministic, planned_for, sms)
            races = looks_for_races(number, schedules)
            _run(on, plan, _gradients.operands(request, into, plan), kernel, number, races)
        found = [x.view for x in guarded]
        found += [x for x in (dsinks, into.dmask) if x is not None]
        first = first or found
        for x, other, one in zip(found, first, guarded, strict=False):
            assert not deterministic or same_bits(x, other), f"other bits in schedule {number}"
            one.assert_untouched_outside()
    dmask = None
    if mask_gradient:
        dmask = first.pop().sum_to_size(call["attn_mask"].shape)
    return reference.Gradients(*first[:3], first[3] if len(first) > 3 else None, dmask)


def _plan(
    request: _gradients.Request,
    into: _gradients.Gradients,
    kernel: str,
    deterministic: bool,
    planned_for: str | None,
    sms: int | None,
) -> native.LaunchPlan:
    device = None
    if planned_for is not None:
        known = native.find_known_device(planned_for)
        assert known is not None
        device = known.device
    if sms is not None:
        if device is None:
            own = request.q.is_cuda
            device = _dispatch.query_device(0) if own else _dispatch.simulated_device(kernel)
        device = native.Device.from_dict(device.to_dict() | {"sm_count": sms})
    decision = _gradients.decide(request, into, device, kernel, deterministic=deterministic)
    assert decision.plan is not None
    return decision.plan


def note_plans(monkeypatch: pytest.MonkeyPatch) -> list[native.LaunchPlan]:
    """A list to which each plan of `differentiate` is appended."""
    plans: list[native.LaunchPlan] = []
    plan_of = _plan

    def noted(*args: Any) -> native.LaunchPlan:
        plans.append(plan_of(*args))
        return plans[-1]

    monkeypatch.setattr(sys.modules[__name__], "_plan", noted)
    return plans


def _run(
    on: Executor,
    plan: native.LaunchPlan,
    tensors: dict[str, Tensor],
    kernel: str,
    number: int,
    races: bool,
) -> None:
    if on.name == "gpu":
        native.launch(plan, tensors)
        return
    mode = MODES[number % len(MODES)]
    settings = simulator.Settings(mode=mode, seed=number, race_check=races)
    for report in simulator.simulate(plan, tensors, settings):
        assert not unexplained(kernel, report), report


def differentiate_and_check(
    on: Executor, kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *,
    dlse: Tensor | None = None, add_to: float | None = None, **call: Any,
) -> reference.Gradients:  # fmt: skip
    """`differentiate`, and the gradients agree with float64 by the error rule."""
    found = differentiate(on, kernel, dout, q, k, v, dlse=dlse, add_to=add_to, **call)
    semantics = {name: value for name, value in _semantics(call).items() if name not in _HOW}
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **semantics)
    rounded = reference.baseline_backward(dout, q, k, v, dlse=dlse, **semantics)
    for name in (*NAMES, "dsinks", "dmask"):
        x, expected, base = (getattr(of, name) for of in (found, exact, rounded))
        if x is None:
            assert expected is None or name == "dmask"
            continue
        more = add_to or 0.0 if name in NAMES else 0.0
        allowed = exact.sinks_rounding if name == "dsinks" else 0.0
        report = reference.check(x, expected + more, base.double() + more, allowed)
        assert report.ok, f"{name}: {report}"
    return found
