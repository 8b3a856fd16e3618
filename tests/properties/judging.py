"""Runs random problems, and judges each answer by the error rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _options, reference
from archflash.reference import ErrorReport
from archflash.reference.rule import report_of
from tests import kvcache_cases
from tests.core_set.checks import assert_close, guarded_output, is_fp8, same_bits
from tests.properties.drawing import Problem
from tests.properties.making import Maker, block_options_of, cache_call_of, call_of, mask_of
from tests.properties.mask_rules import check_mask
from tests.properties.rounding import of_gradients

RIGHT, REFUSED = "right", "refused"
SLACK = 4
# What an implementation may say of a call that another one serves.
REFUSALS = (archflash.ForcedImplementationError, archflash.UnsupportedError)

Run = Callable[[str | None], None]


def attempt(
    problem: Problem, implementations: Sequence[str | None] = ("torch",), device: str = "cpu"
) -> dict[str, str]:
    """Says of each implementation (None: the one that is chosen) "right", "refused" or what is
    wrong. Tensors are made and float64 is computed once.
    """
    run = _RUNS[problem.entry](problem, device)
    verdicts = {}
    for name in implementations:
        try:
            run(name)
            verdict = RIGHT
        except REFUSALS as error:
            verdict = REFUSED
            # `torch` serves whatever is legal, but makes no promise about bits.
            if name in (None, "torch") and "batch_invariant" not in str(error):
                verdict = f"{type(error).__name__}: {error}"
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"
        verdicts[name or "chosen"] = verdict
    return verdicts


def _agree(what: str, report: ErrorReport) -> None:
    """The error rule with some slack: of a few numbers the baseline may happen to have all nearly
    right, and show too small an error.
    """
    near = report.max_error <= SLACK * report.bound
    assert report.ok or near, f"{what} {report}"


def _on_cpu(values: Any) -> Any:
    """Tensors, and those of a dict or a sequence, where float64 is computed: a GPU takes longer for
    so small ones, above all when it has many processes.
    """
    if isinstance(values, dict):
        return {name: _on_cpu(x) for name, x in values.items()}
    if isinstance(values, tuple | list) and any(isinstance(x, Tensor) for x in values):
        return [_on_cpu(x) for x in values]
    return values.detach().cpu() if isinstance(values, Tensor) else values


def _exact(qkv: Sequence[Tensor], asked: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the log-sum-exp in float64, and what plain operations give."""
    qkv, asked = _on_cpu(list(qkv)), _on_cpu(asked)
    out, lse = reference.attention(*qkv, **asked)
    return out, lse, reference.baseline(*qkv, **asked)


def _semantics(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in _options.ADVICE}


def _capability(kernel: str, device: str) -> tuple[int, int]:
    """That of the GPU that a kernel runs on, or that is simulated."""
    if device == "cuda":
        return torch.cuda.get_device_capability()
    known = native.find_known_device(native.describe(kernel).home_device)
    assert known is not None
    return known.device.capability


def _attention(problem: Problem, device: str) -> Run:
    (q, k, v), call = call_of(problem, device)

    @functools.cache
    def expected() -> tuple[Tensor, Tensor, Tensor]:
        return _exact((q, k, v), _semantics(call))

    def run(name: str | None) -> None:
        guarded = guarded_output(q, v, problem.given["pad"], call)
        out, lse = archflash.attention(
            q, k, v, implementation=name, out=guarded.view, return_lse=True, **call
        )
        guarded.assert_untouched_outside()
        again = archflash.attention(q, k, v, implementation=name, **call)
        assert again.dtype == out.dtype
        if name not in (None, "torch"):  # which may leave calls without log-sum-exp to PyTorch
            assert same_bits(again, out), "other bits without out and log-sum-exp"
        served = name or archflash.explain(q, k, v, return_lse=True, **call).chosen
        exact = served == "torch" or (
            # Its kernels take no packed sequences: there is nothing to compute.
            "packed" in problem.given and call.get("approximate") in ("int8_qk", "nvfp4")
        )
        asked = {x: y for x, y in call.items() if x != "approximate" or not exact}
        if is_fp8(q) or asked.get("approximate") is not None:
            ran_on = (served, _capability(served, device)) if served != "torch" else None
            assert_close(out, lse, q, k, v, ran_on, **asked)
            return
        of_out, of_lse, base = expected()
        _agree("output", reference.check(out.cpu(), of_out, base))
        _agree("output without log-sum-exp", reference.check(again.cpu(), of_out, base))
        _agree("log-sum-exp", reference.check_lse(lse.cpu(), of_lse))

    return run


def _gradients(
    problem: Problem, device: str, seen: Tensor | None = None
) -> tuple[list[Tensor], dict[str, Any], Tensor | None, Callable[..., None]]:
    """The tensors dout, q, k, v, the options, dlse, and what compares gradients with float64.
    seen: the attn_mask of float64, where options that are added stand for it.
    """
    (q, k, v), call = call_of(problem, device)
    make = Maker(problem.seed + 1, device)
    dout = make.rand(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = None
    if problem.given["dlse"]:
        heads_first = call.get("layout") != "bnhd" and "cu_seqlens_q" not in call
        rows = q if heads_first else q.transpose(-2, -3)
        dlse = make.rand(*rows.shape[:-1])

    def as_asked() -> tuple[list[Tensor], dict[str, Any]]:
        asked = _on_cpu(_semantics(call) | ({} if seen is None else {"attn_mask": seen}))
        return _on_cpu([dout, q, k, v]), asked | {"dlse": _on_cpu(dlse)}

    @functools.cache
    def expected() -> tuple[reference.Gradients, reference.Gradients]:
        tensors, asked = as_asked()
        exact = reference.attention_backward(*tensors, **asked)
        if "sinks" in asked:  # plain operations give NaN where a sink is infinite
            asked["sinks"] = asked["sinks"].clamp(-6e4, 6e4)
        return exact, reference.baseline_backward(*tensors, **asked)

    def compare(added: float = 0.0, **found: Tensor | None) -> None:
        exact, base = expected()
        for name, x in found.items():
            of_x, of_base = getattr(exact, name), getattr(base, name)
            assert x is not None, f"there is no {name}"
            x = x.cpu()
            assert bool(x.isfinite().all()), f"{name} is not finite"
            more = added if name in ("dq", "dk", "dv") else 0.0
            # dsinks and dmask are float32 also of float64, and dq may be of 16 bits.
            narrower = min(x.dtype, q.dtype, key=lambda dtype: dtype.itemsize)
            base_of_it = of_base.to(narrower).double()
            x = x.to(narrower)
            report = reference.check(x, of_x + more, base_of_it + more)
            if not report.ok:  # the baseline may happen to be nearly exact
                bound = SLACK * report.bound + getattr(rounding(), name)
                near = report_of(x, of_x + more, bound, math.inf)
                assert near.ok, f"{name} {near}"

    @functools.cache
    def rounding() -> reference.Gradients:
        tensors, asked = as_asked()
        return of_gradients(*tensors, **asked)

    return [dout, q, k, v], call, dlse, compare


def _backward(problem: Problem, device: str) -> Run:
    (dout, q, k, v), call, dlse, compare = _gradients(problem, device)
    given = problem.given
    of_out, of_lse = reference.attention(*_on_cpu([q, k, v]), **_on_cpu(_semantics(call)))
    out, lse = of_out.to(device, q.dtype), of_lse.to(device).float().contiguous()

    def run(name: str | None) -> None:
        into: dict[str, Any] = {}
        start = given.get("accumulate")
        dtype = torch.float32 if given.get("gradient_dtype") else q.dtype
        if start is not None or given.get("gradient_dtype"):
            filled = math.nan if start is None else start
            into = {
                f"d{of}": torch.full(x.shape, filled, dtype=dtype, device=device)
                for of, x in (("q", q), ("k", k), ("v", v))
            }
        results = archflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, accumulate=start is not None,
            deterministic=given.get("deterministic"), mask_gradient=given["mask_gradient"],
            implementation=name, **into, **call,
        )  # fmt: skip
        names = ["dq", "dk", "dv"] + ["dsinks"] * ("sinks" in call)
        names += ["dmask"] * given["mask_gradient"]
        compare(start or 0.0, **dict(zip(names, results, strict=True)))

    return run


def _autograd(
    problem: Problem, device: str, added: dict[str, Any] | None = None, seen: Tensor | None = None
) -> Run:
    (dout, q, k, v), call, dlse, compare = _gradients(problem, device, seen)

    def run(name: str | None) -> None:
        leaves = {"dq": q, "dk": k, "dv": v}
        if "sinks" in call:
            leaves["dsinks"] = call["sinks"]
        if problem.given["mask_gradient"]:
            leaves["dmask"] = call["attn_mask"]
        leaves = {of: x.detach().requires_grad_() for of, x in leaves.items()}
        asked = {**call, **(added or {})}
        for of, option in (("dsinks", "sinks"), ("dmask", "attn_mask")):
            if of in leaves:
                asked[option] = leaves[of]
        out, lse = archflash.attention(
            leaves["dq"], leaves["dk"], leaves["dv"], implementation=name, return_lse=True, **asked
        )
        ends = [(out, dout)] + ([] if dlse is None else [(lse, dlse)])
        found = torch.autograd.grad(
            [x for x, _ in ends], list(leaves.values()), [of_x for _, of_x in ends]
        )
        for x, leaf in zip(found, leaves.values(), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, leaf.dtype)
        compare(**dict(zip(leaves, found, strict=True)))

    return run


def _cache(problem: Problem, device: str) -> Run:
    call = cache_call_of(problem, device)
    on_cpu = kvcache_cases.CacheCall(*_on_cpu([call.q, call.k_cache, call.v_cache, call.options]))
    words = problem.given["options"].get("key_indices", {})

    @functools.cache
    def exact() -> kvcache_cases.Exact:
        return kvcache_cases.Exact.of(on_cpu)

    def run(name: str | None) -> None:
        def serve(judged: kvcache_cases.CacheCall) -> tuple[Tensor, Tensor]:
            mine = call.copied()
            tensors, options = kvcache_cases.as_given(mine)
            out, lse = archflash.attention_with_kvcache(
                *tensors, implementation=name, return_lse=True, check=not words.get("twice"),
                **options,
            )  # fmt: skip
            judged.k_cache.copy_(mine.k_cache)
            judged.v_cache.copy_(mine.v_cache)
            return out.cpu(), lse.cpu()

        kvcache_cases.check(on_cpu, serve, SLACK, exact)

    return run


def _key_lists(problem: Problem, device: str) -> Run:
    of_kind = {"attention": _attention, "autograd": _autograd}
    return of_kind.get(problem.given["kind"], _cache)(problem, device)


def _block_lists(problem: Problem, device: str) -> Run:
    """The options that are made of a list of blocks give what the mask gives that it stands for."""
    given = problem.given
    (q, k, v), call = call_of(problem, device)
    seen, blocks = block_options_of(given, Maker(problem.seed + 2, device))
    asked = {**_semantics(call), "attn_mask": seen}

    @functools.cache
    def expected() -> tuple[Tensor, Tensor, Tensor]:
        return _exact((q, k, v), asked)

    def forward(name: str | None) -> None:
        out, lse = archflash.attention(
            q, k, v, implementation=name, return_lse=True, **call, **blocks
        )
        of_out, of_lse, base = expected()
        _agree("output", reference.check(out.cpu(), of_out, base))
        _agree("log-sum-exp", reference.check_lse(lse.cpu(), of_lse))

    return _autograd(problem, device, blocks, seen) if given["backward"] else forward


def _merge(problem: Problem, device: str) -> Run:
    given, make = problem.given, Maker(problem.seed, device)
    dtype, shape = getattr(torch, given["dtype"]), given["shape"]
    if given["packed"]:
        shape = (1, *shape[1:])
    outs = [make.strided(given["strides"], shape, dtype) for _ in range(given["parts"])]
    lses = [3 * make.rand(*shape[:3]) for _ in outs]
    for lse in lses:
        lse[make.uniform(*lse.shape) < given["unseen"]] = -math.inf
    expected, expected_lse = reference.merge_attention(_on_cpu(outs), _on_cpu(lses))
    rows_first = given["packed"] or given["layout"] == "bnhd"
    of_call = [x.transpose(1, 2) if rows_first else x for x in outs]
    of_lses = lses
    if given["packed"]:
        of_call, of_lses = [x[0] for x in of_call], [x[0] for x in lses]

    def run(name: str | None) -> None:
        parts: Any = torch.stack(of_call) if given["stacked"] else of_call
        out, lse = archflash.merge_attention(
            parts, torch.stack(of_lses) if given["stacked"] else of_lses,
            layout=given["layout"], implementation=name,
        )  # fmt: skip
        if given["packed"]:
            out, lse = out[None], lse[None]
        out = out.transpose(1, 2) if rows_first else out
        # One rounding of what float32 gives.
        _agree("output", reference.check(out.cpu(), expected, expected.to(dtype)))
        _agree("log-sum-exp", reference.check_lse(lse.cpu(), expected_lse))

    return run


def _quantise(problem: Problem, device: str) -> Run:
    given, make = problem.given, Maker(problem.seed, device)
    shape = (1, *given["shape"][1:]) if given["packed"] else given["shape"]
    x = make.strided(given["strides"], shape, torch.float32) * given["size"]
    x = x.to(getattr(torch, given["dtype"]))
    if given["odd"] is not None and x.numel():
        x[0, 0, -1, -1] = float(given["odd"])
    kind = getattr(torch, given["fp8"])
    most = torch.finfo(kind).max
    finite = torch.where(x.isfinite(), x, 0).double().abs()
    rows = torch.nn.functional.pad(finite, (0, 0, 0, -x.shape[2] % 64))
    blocks = rows.unflatten(2, (-1, 64)) if x.shape[2] else rows[:, :, :, None]
    largest = finite.new_zeros(*x.shape[:2], blocks.shape[2])
    if x.numel():
        largest = blocks.amax((-1, -2))
        if given["per"] != "block":
            largest = largest.amax(2, keepdim=True).expand_as(largest)
        if given["per"] == "tensor":
            largest = largest.amax().expand_as(largest)
    descales = torch.where(largest == 0, 1.0, largest / most)
    by_row = descales.repeat_interleave(64, 2)[:, :, : x.shape[2], None]
    rows_first = given["packed"] or given["layout"] == "bnhd"
    of_call = x.transpose(1, 2) if rows_first else x
    of_call = of_call[0] if given["packed"] else of_call

    def run(name: str | None) -> None:
        values, descale = archflash.quantize_fp8(
            of_call, per=given["per"], dtype=kind, layout=given["layout"], implementation=name
        )
        assert values.shape == of_call.shape
        shapes = {"tensor": (1,), "head": x.shape[:2], "block": (*x.shape[:2], blocks.shape[2])}
        wanted = shapes[given["per"]]
        assert descale.shape == (wanted[1:] if given["packed"] and len(wanted) > 1 else wanted)
        if not x.numel():
            return
        told = descale.reshape(1, 1, 1) if given["per"] == "tensor" else descale
        told = told.reshape(*x.shape[:2], -1) if given["per"] != "tensor" else told
        error = (told.double() - descales).abs()
        assert bool((error <= 2**-22 * descales + 2**-149).all()), f"descale {told}"
        found = values[None] if given["packed"] else values
        found = (found.transpose(1, 2) if rows_first else found).double()
        exact = x.double().clamp(-math.inf, math.inf) / by_row
        exact = exact.clamp(-most, most)
        assert same_bits(found.isnan(), exact.isnan())
        # Half a step of the type: 2^-4 or 2^-3 of a number, and its smallest number.
        info = torch.finfo(kind)
        bound = exact.abs() * (info.eps / 2 + 2**-20) + info.smallest_normal * info.eps / 2 * 1.01
        off = torch.where(exact.isnan(), 0.0, (found - exact).abs())
        assert bool((off <= torch.where(exact.isnan(), 0.0, bound)).all()), "not rounded to nearest"

    return run


def _masks(problem: Problem, device: str) -> Run:
    return lambda name: check_mask(problem.given, Maker(problem.seed, device))


def _sdpa(problem: Problem, device: str) -> Run:
    given, make = problem.given, Maker(problem.seed, device)
    dtype, (d, dv), (heads_q, heads_kv) = (
        getattr(torch, given["dtype"]),
        given["dims"],
        given["heads"],
    )
    nq, nk, batch = given["nq"], given["nk"], given["batch"]
    shapes = ((batch, heads_q, nq, d), (batch, heads_kv, nk, d), (batch, heads_kv, nk, dv))
    q, k, v = (make.strided(n, s, dtype) for n, s in zip(given["strides"], shapes, strict=True))
    call = {**given["options"], "enable_gqa": heads_q != heads_kv}
    asked = {"scale": call.get("scale")}
    if "attn_mask" in call:
        call["attn_mask"] = mask_of(make, call["attn_mask"], (batch, heads_q, nq, nk), dtype)
        asked["attn_mask"] = call["attn_mask"]
    if call.get("is_causal"):
        asked |= {"causal": True, "q_offset": 0}
    expected, _, base = _exact((q, k, v), asked)

    def run(name: str | None) -> None:
        if name is None:
            out = archflash.scaled_dot_product_attention(q, k, v, **call)
        else:
            with archflash.force(name):
                out = archflash.scaled_dot_product_attention(q, k, v, **call)
        _agree("output", reference.check(out.cpu(), expected, base))

    return run


_RUNS: dict[str, Callable[[Problem, str], Run]] = {
    "attention": _attention,
    "attention_backward": _backward,
    "autograd": _autograd,
    "attention_with_kvcache": _cache,
    "key_lists": _key_lists,
    "block_lists": _block_lists,
    "merge_attention": _merge,
    "quantize_fp8": _quantise,
    "masks": _masks,
    "scaled_dot_product_attention": _sdpa,
}
