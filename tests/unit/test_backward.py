"""archflash.attention_backward where PyTorch serves it, who would serve it, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_cases import kernels_built
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import archflash
from archflash import _api, _gradients, _ops, _options, _strides, reference
from archflash import _archflash as native


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(
    dtype: torch.dtype = torch.float64, nq: int = 5, nk: int = 7, d: int = 8, dv: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, q, k, v with two query heads on each of two heads of keys."""
    return (
        rand(2, 4, nq, dv, seed=4, dtype=dtype),
        rand(2, 4, nq, d, seed=1, dtype=dtype),
        rand(2, 2, nk, d, seed=2, dtype=dtype),
        rand(2, 2, nk, dv, seed=3, dtype=dtype),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window-softcap": {"window": (2, 1), "softcap": 0.7, "scale": 0.9},
    "sinks": {"sinks": rand(4, seed=7), "causal": True, "q_offset": -2},
    "offsets": {"q_offset": torch.tensor([0, 3], dtype=torch.int32), "causal": True},
}
KERNELS = [x.name for x in archflash.implementations() if x.name != "torch"]
every_option = pytest.mark.parametrize("name", OPTIONS)


@every_option
def test_the_reference_has_the_gradients_of_finite_differences(name: str) -> None:
    dout, q, k, v = call()
    options = OPTIONS[name]
    dlse = rand(2, 4, 5, seed=8)

    def loss(q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> float:
        out, lse = reference.attention(q, k, v, **options | more)
        seen = lse.masked_fill(lse.isinf(), 0.0)  # rows that see no key
        return float((out * dout).sum() + (seen * dlse).sum())

    found = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    inputs = {"q": q, "k": k, "v": v}
    if "sinks" in options:
        inputs["sinks"] = options["sinks"]
    for seed, (which, x) in enumerate(inputs.items()):
        step = 1e-5 * rand(*x.shape, seed=20 + seed)
        more, less = (loss(**inputs | {which: x + sign * step}) for sign in (1, -1))
        gradient = getattr(found, f"d{which}")
        assert float((gradient * step).sum()) == pytest.approx((more - less) / 2, rel=1e-5)


@every_option
def test_the_baseline_at_float64_is_the_reference(name: str) -> None:
    dout, q, k, v = call()
    dlse = rand(2, 4, 5, seed=8)
    options = OPTIONS[name]
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    plain = reference.baseline_backward(dout, q, k, v, dlse=dlse, **options)
    for which in ("dq", "dk", "dv", "dsinks"):
        torch.testing.assert_close(getattr(plain, which), getattr(exact, which))


@every_option
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_pytorch_computes_the_gradients_of_the_formula(name: str, layout: str) -> None:
    dout, q, k, v = call()
    options = OPTIONS[name]
    dlse = rand(2, 4, 5, seed=8).float()
    expected = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    out, lse = archflash.attention(q, k, v, return_lse=True, **options)
    tensors = [dout, q, k, v, out]
    if layout == "bnhd":
        tensors = [x.transpose(1, 2) for x in tensors]
    found = archflash.attention_backward(*tensors, lse, dlse=dlse, layout=layout, **options)
    assert len(found) == 3 + ("sinks" in options)
    for x, which in zip(found, ("dq", "dk", "dv", "dsinks"), strict=False):
        x = x.transpose(1, 2) if layout == "bnhd" and x.ndim == 4 else x
        torch.testing.assert_close(x.double(), getattr(expected, which), atol=1e-6, rtol=1e-6)


def test_gradients_are_written_or_added_to_given_tensors() -> None:
    dout, q, k, v = call(torch.float32)
    out, lse = archflash.attention(q, k, v, return_lse=True)
    dq, dk, dv = archflash.attention_backward(dout, q, k, v, out, lse)
    given = [torch.full_like(x, 2.0) for x in (q, k, v)]
    names = dict(zip(("dq", "dk", "dv"), given, strict=True))
    found = archflash.attention_backward(dout, q, k, v, out, lse, accumulate=True, **names)
    for x, target, once in zip(found, given, (dq, dk, dv), strict=True):
        assert x is target
        torch.testing.assert_close(x, once + 2)
    (again, *_) = archflash.attention_backward(dout, q, k, v, out, lse, dq=given[0])
    assert again is given[0]
    torch.testing.assert_close(again, dq)


def test_tensors_without_memory_begin_nowhere() -> None:
    q, k, v, lse = (torch.empty(2, 4, *s, device="meta") for s in ((5, 8), (7, 8), (7, 8), (5,)))
    into = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    found = archflash.attention_backward(q, q, k, v, q, lse, **into)
    assert [x.shape for x in found] == [x.shape for x in into.values()]


def test_no_memory_is_taken_for_gradients_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    dout, q, k, v = call(torch.float32)
    out, lse = archflash.attention(q, k, v, return_lse=True)
    new, made = _strides.new_in_order, []
    monkeypatch.setattr(
        _strides, "new_in_order", lambda x, shape: made.append(tuple(shape)) or new(x, shape)
    )
    into = {"dq": torch.empty_like(q), "dv": torch.empty_like(v)}
    archflash.attention_backward(dout, q, k, v, out, lse, **into)
    assert made == [tuple(k.shape)]


def test_what_gradients_copy_is_explained() -> None:
    q = torch.empty(2, 4, 100, 44, dtype=torch.float16, device="meta")
    plan = archflash.explain(q, q, q, device="A100", backward=True, implementation="ampere").plan
    assert plan is not None
    assert (plan.kernels[0], plan.kernels[-1]) == ("copy_gather", "copy_scatter")
    odd = "(rows of 88 bytes as 96)"
    copied = f"q {odd}, k {odd}, v {odd}, out {odd} and dout {odd} into the workspace, dq {odd}, "
    assert dict(plan.notes)["copies"].startswith(copied + f"dk {odd} and dv {odd} from there: ")


FP16 = torch.float16
FORCED = archflash.ForcedImplementationError
WRONG: dict[str, tuple[type[Exception], str, Callable[..., dict[str, Any]]]] = {
    "dout-shape": (ValueError, "dout has shape", lambda dout, **_: {"dout": dout[:, :, :4]}),
    "dout-dtype": (TypeError, "dout has dtype", lambda dout, **_: {"dout": dout.half()}),
    "lse-shape": (ValueError, "lse has shape", lambda lse, **_: {"lse": lse[..., :3]}),
    "lse-dtype": (TypeError, "lse has dtype", lambda lse, **_: {"lse": lse.double()}),
    "out-shape": (ValueError, "out has shape", lambda out, **_: {"out": out[:, :, :4]}),
    "dq-shape": (ValueError, "dq has shape", lambda q, **_: {"dq": q[:, :, :4].clone()}),
    "dk-dtype": (TypeError, "dk has dtype", lambda k, **_: {"dk": k.half()}),
    "dv-overlaps": (ValueError, "overlap", lambda v, **_: {"dv": v[:, :1].expand(v.shape)}),
    "dq-is-q": (ValueError, "dq begins where q does", lambda q, **_: {"dq": q}),
    "dk-is-k": (ValueError, "dk begins where k does", lambda k, **_: {"dk": k}),
    "accumulate": (ValueError, "accumulate=True", lambda **_: {"accumulate": True}),
    "q-dtype": (TypeError, "same", lambda q, **_: {"q": q.half()}),
    "dlse": (TypeError, "dlse is 1.0", lambda **_: {"dlse": 1.0}),
    "layout": (ValueError, "layout", lambda **_: {"layout": "hbnd"}),
    "forced-unknown": (
        FORCED, "no implementation", lambda **_: {"implementation": "x"},
    ),
    "forced-cpu-dtype": (
        FORCED, "ampere takes", lambda **_: {"implementation": "ampere"},
    ),
    "forced-without": (
        FORCED, "no backward", lambda **_: {"implementation": "ada"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_raise(name: str) -> None:
    error, text, change = WRONG[name]
    dout, q, k, v = call(torch.float32)
    out, lse = archflash.attention(q, k, v, return_lse=True)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    given |= change(**given)
    with pytest.raises(error, match=text):
        archflash.attention_backward(**given)


@pytest.mark.parametrize("device", ["A100", "RTX 4090", "B200", "RTX 5090"])
def test_explain_says_who_computes_gradients(device: str) -> None:
    q = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16, device="meta")
    decision = archflash.explain(q, q[:, :2], q[:, :2], device=device, backward=True, causal=True)
    assert decision.chosen == "ampere"
    assert decision.plan is not None
    assert decision.plan.kernels == [
        "ampere_backward_rows_bf16",
        "ampere_attention_bwd_bf16_d64" + {"B200": "_wide", "A100": "_medium"}.get(device, ""),
        "ampere_backward_shares_bf16",
        "ampere_backward_dq_bf16",
    ]
    rows = 128  # whole blocks of queries, each with 64 sums of dq
    shares = 4 * 4 * 2 * 2 * 100 * (64 + 64)  # of dk and dv, from a CTA for each query head
    assert decision.plan.zeroed_bytes == 0  # the first kernel clears the sums
    # CTAs of tiles that have an SM to themselves take turns: 4 bytes for each block of 64 rows of a
    # head, padded.
    turns = 256 if device in ("A100", "B200") else 0
    assert decision.plan.workspace_bytes == 4 * 2 * 8 * rows * 64 + 8 * 2 * 8 * 100 + shares + turns
    assert "once more" in decision.reasons["torch"][0]
    assert "workspace" in str(decision)
    exact = archflash.explain(*(q.float(),) * 3, device=device, backward=True)
    assert exact.chosen == "simt"


def backward_plan(
    heads: int, rows: int, d: int, device: str, deterministic: bool = False, heads_kv: int = 0
) -> native.LaunchPlan:
    q = torch.empty(1, heads, rows, d, dtype=torch.bfloat16, device="meta")
    k = q[:, : heads_kv or heads]
    torch.use_deterministic_algorithms(deterministic)
    try:
        plan = archflash.explain(
            q, k, k, device=device, backward=True, implementation="ampere"
        ).plan
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan is not None
    return plan


@pytest.mark.parametrize(("device", "block"), [("H200", 64), ("RTX 4090", 32)])
def test_deterministic_gradients_take_turns(device: str, block: int) -> None:
    """A block of sums of dq has a number of turns of 4 bytes."""
    free = backward_plan(16, 2048, 128, device)
    ordered = backward_plan(16, 2048, 128, device, deterministic=True)
    assert ordered.kernels == free.kernels
    assert ordered.workspace_bytes == free.workspace_bytes + 4 * 16 * (2048 // block)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "rows", "device", "turns"),
    [
        (160, 160, 256, "H200", True),  # a head has one CTA at a time
        (16, 16, 2048, "H200", False),  # 9 CTAs of a head at a time, 32 blocks of queries
        (32, 32, 4096, "H200", True),  # 5 and 64
        (32, 8, 8192, "H200", True),  # 17 and 512, those of 4 heads
        (32, 32, 4096, "A100", True),  # 4 and 64
        (32, 32, 4096, "RTX 4090", False),  # a tile that takes none
        (8, 8, 4608, "H200", True),  # 17 and 72
    ],
)
def test_large_calls_take_turns_where_that_is_faster(
    heads: int, heads_kv: int, rows: int, device: str, turns: bool
) -> None:
    plan = backward_plan(heads, rows, 128, device, heads_kv=heads_kv)
    sums_and_terms = heads * rows * (4 * 128 + 8)
    assert (plan.workspace_bytes > sums_and_terms) == turns


@pytest.mark.parametrize(
    ("d", "device", "tiles"),
    [
        (32, "RTX 4090", ["d32"]),
        (40, "H200", ["d64_wide"]),
        (64, "H200", ["d64_wide"]),
        (64, "A100", ["d64_medium"]),
        (80, "A100", ["d96"]),
        (96, "H200", ["d96"]),
        (96, "RTX 4090", ["d128"]),
        (128, "H200", ["d128_wide"]),
        (128, "A100", ["d128_medium"]),
        (128, "RTX 4090", ["d128"]),
        (160, "H200", ["d160"]),
        (160, "B200", ["d160"]),
        (160, "A100", ["d192_medium"]),
        (160, "RTX 4090", ["d160"]),
        (184, "H200", ["d192_wide"]),
        (184, "A100", ["d192_medium"]),
        (184, "RTX 4090", ["d256_values", "d256_keys", "d256_queries"]),
        (256, "H200", ["d256_wide"]),
        (256, "A100", ["d256_medium"]),
        (256, "RTX 4090", ["d256_values", "d256_keys", "d256_queries"]),
    ],
)
def test_tiles_of_the_backward_pass(d: int, device: str, tiles: list[str]) -> None:
    found = backward_plan(64, 1024, d, device).kernels
    name = "ampere_attention_bwd_bf16_"
    named = [kernel.removeprefix(name) for kernel in found if kernel.startswith(name)]
    assert list(dict.fromkeys(named)) == tiles  # a pass may be in parts


@pytest.mark.parametrize(
    ("device", "heads", "tile"),
    [
        ("H200", 64, "d192_128"),
        ("A100", 64, "d192_128_medium"),
        ("A100", 6, "d192_128"),  # 96 tiles of 64 keys on 108 SMs
        ("RTX 4090", 64, "d192_128"),
    ],
)
def test_gradients_of_more_columns_of_k_than_of_v_have_tiles_of_their_own(
    device: str, heads: int, tile: str
) -> None:
    q = torch.empty(1, heads, 1024, 192, dtype=torch.bfloat16, device="meta")
    plan = archflash.explain(
        q, q, q[..., :128], device=device, backward=True, implementation="ampere"
    ).plan
    assert plan is not None
    assert f"ampere_attention_bwd_bf16_{tile}" in plan.kernels


@pytest.mark.parametrize(
    ("shape", "causal", "tile"),
    [
        ((1, 16, 768), False, "d64_medium"),  # 96 tiles, one on each of 108 SMs
        ((4, 8, 1024), False, "d64_medium"),  # three rounds, two of pairs
        ((3, 9, 1024), False, "d64"),  # two full rounds, one of pairs
        ((3, 9, 1024), True, "d64"),
        ((1, 6, 2048), True, "d64_medium"),
    ],
)
def test_pairs_of_small_tiles_share_an_sm_where_their_rounds_are_fewer(
    shape: tuple[int, int, int], causal: bool, tile: str
) -> None:
    q = torch.empty(*shape, 64, dtype=torch.bfloat16, device="meta")
    plan = archflash.explain(
        q, q, q, causal=causal, device="A100", backward=True, implementation="ampere"
    ).plan
    assert plan is not None
    assert f"ampere_attention_bwd_bf16_{tile}" in plan.kernels


def test_hopper_computes_gradients_on_its_gpus_unless_ampere_has_to() -> None:
    def explain(d: int = 64, **options: Any) -> archflash.Decision:
        q = torch.empty(2, 8, 100, d, dtype=torch.bfloat16, device="meta")
        k = torch.empty(2, 4, 200, d, dtype=torch.bfloat16, device="meta")
        return archflash.explain(q, k, k, device="H200", backward=True, **options)

    for d, tile, sums in (
        (64, "d64_exact", 112 * 64),  # rows of 16 in a head's only round
        (128, "d128", 128 * 128),
        (80, "d96", 112 * 80),
        (192, "d256", 128 * 192),
    ):
        decision = explain(d)
        assert decision.chosen == "hopper"
        assert decision.plan is not None
        assert decision.plan.kernels == [
            "hopper_backward_rows_bf16",
            f"hopper_attention_bwd_bf16_{tile}",
            f"hopper_backward_dq_bf16_{tile}",
        ]
        terms = 8 * 2 * 8 * 100
        assert decision.plan.workspace_bytes == -(-terms // 256) * 256 + 4 * 2 * 8 * sums
    capped = explain(softcap=2.0)
    assert capped.chosen == "hopper"
    assert capped.plan is not None
    assert "hopper_attention_bwd_bf16_d64_softcap" in capped.plan.kernels
    decision = explain(264)
    assert decision.chosen != "hopper"
    assert "up to 256" in decision.reasons["hopper"][0]


@pytest.mark.parametrize("name", [*_gradients.FOLDERS])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_without_heads_has_nothing_to_launch(name: str, deterministic: bool) -> None:
    dtype = torch.float32 if name == "simt" else torch.bfloat16
    q = torch.empty(2, 0, 70, 64, dtype=dtype, device="meta")
    lse = torch.empty(2, 0, 70, device="meta")
    call = _options.complete({"causal": True})
    request = _gradients.Request(q, q, q, q, q, lse, None, call)
    into = _gradients.Gradients.like(request)
    device = _api.find_device(native.describe(name).home_device)
    plan = _gradients.decide(request, into, device, name, deterministic=deterministic).plan
    assert plan is not None
    assert plan.kernels == []


@pytest.mark.parametrize("name", KERNELS)
def test_whatever_size_is_zero_a_plan_or_a_reason_comes(name: str) -> None:
    dtype = torch.float32 if name == "simt" else torch.bfloat16
    device = native.describe(name).home_device
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "nq": 70, "nk": 2048}
    for zeros in itertools.chain(*(itertools.combinations(sizes, n) for n in (1, 2))):
        batch, heads_q, heads_kv, nq, nk = (sizes | dict.fromkeys(zeros, 0)).values()
        if heads_kv == 0 < heads_q:
            continue
        q, k = (
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape in ((batch, heads_q, nq, 128), (batch, heads_kv, nk, 128))
        )
        for backward in (False, True):
            chosen = archflash.explain(q, k, k, device=device, backward=backward).chosen
            if heads_q == 0 < heads_kv and backward:
                assert chosen == "torch", zeros
            with contextlib.suppress(archflash.ForcedImplementationError):
                archflash.explain(
                    q, k, k, device=device, backward=backward, implementation=name, causal=True
                )


@pytest.mark.parametrize("name", _gradients.FOLDERS)
def test_keys_of_which_no_query_head_is_have_gradients_of_zero(name: str) -> None:
    dtype = torch.float32 if name == "simt" else torch.bfloat16
    q, k, v = (torch.ones(1, heads, 5, 16, dtype=dtype, requires_grad=True) for heads in (0, 2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match="no query heads over 2"):
        archflash.attention(q, k, v, implementation=name)
    archflash.attention(q, k, v).sum().backward()
    assert k.grad is not None
    assert v.grad is not None
    assert not k.grad.any()
    assert not v.grad.any()


def shared_out(
    shape: tuple[int, int, int, int], keys: tuple[int, int], *, causal: bool
) -> tuple[list[str], tuple[int, int, int]]:
    """The kernels of a call's gradients on an H200, and the CTAs, shares of heads and of rows
    of the main one. keys: heads and rows of k.
    """
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    k = torch.empty(shape[0], *keys, shape[3], dtype=torch.bfloat16, device="meta")
    decision = archflash.explain(q, k, k, causal=causal, device="H200", backward=True)
    assert decision.plan is not None
    main = decision.plan.to_dict()["launches"][1]
    params = bytes.fromhex(main["params"])
    of_heads, of_rows = (struct.unpack_from("<i", params, at)[0] for at in SHARES_OFFSETS)
    return decision.plan.kernels, (main["grid"][0], of_heads, of_rows)


SHARES_OFFSETS = (452, 556)  # of BackwardParams::head_shares, BackwardKernelParams::shares
ROWS_OFFSET = 560  # of BackwardKernelParams::share_rows


@pytest.mark.parametrize(
    ("shape", "keys", "causal", "expected"),
    [
        ((2, 14, 4096, 64), (2, 4096), True, (132, 1, 2)),
        ((2, 16, 2048, 128), (1, 2048), True, (256, 8, 1)),
        ((1, 71, 1024, 64), (1, 1024), True, (132, 24, 1)),  # the last one has two heads, not three
        ((2, 10, 4096, 64), (10, 77), False, (120, 1, 6)),
        ((1, 8, 1024, 128), (1, 1024), False, (128, 1, 16)),
        ((1, 16, 1500, 96), (4, 1500), True, (132, 4, 1)),  # two of heads and of rows: as many CTAs
        ((1, 64, 4096, 128), (8, 4096), True, (256, 1, 1)),  # two rounds of tiles are even
        ((1, 32, 8192, 128), (8, 8192), True, (512, 1, 1)),
        ((1, 4, 1024, 128), (4, 1024), True, (32, 1, 1)),  # memory
    ],
)
def test_query_heads_and_rows_are_shared_out_where_few_tiles_leave_sms_idle(
    shape: tuple[int, int, int, int],
    keys: tuple[int, int],
    causal: bool,
    expected: tuple[int, int, int],
) -> None:
    kernels, found = shared_out(shape, keys, causal=causal)
    assert found == expected
    assert ("hopper_backward_shares_bf16" in kernels) == (expected[1:] != (1, 1))


@pytest.mark.parametrize(
    ("device", "shape", "heads_kv", "ctas", "shares"),
    [
        ("H200", (2, 14, 4096, 64), 2, 896, 7),
        ("RTX 4090", (2, 14, 4096, 64), 2, 896, 7),
        ("A100", (2, 16, 2048, 128), 1, 256, 8),
        ("A100", (1, 32, 4096, 128), 8, 256, 1),  # the tiles of keys fill the GPU
        ("A100", (4, 8, 1024, 64), 8, 256, 1),  # no heads that share one of k
    ],
)
def test_query_heads_are_shared_out_where_few_tiles_leave_sms_idle(
    device: str, shape: tuple[int, int, int, int], heads_kv: int, ctas: int, shares: int
) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    k = q[:, :heads_kv]
    plan = archflash.explain(
        q, k, k, causal=True, device=device, backward=True, implementation="ampere"
    ).plan
    assert plan is not None
    main = [x for x in plan.to_dict()["launches"] if "_attention_bwd_" in x["kernel"]]
    assert sum(math.prod(launch["grid"]) for launch in main) == ctas
    assert ("ampere_backward_shares_bf16" in plan.kernels) == (shares > 1)
    rows = 64 if main[0]["kernel"].endswith("d128") else 128  # keys of a tile
    assert ctas == shares * shape[0] * heads_kv * shape[2] // rows


@pytest.mark.parametrize(("longest", "shared"), [(1024, False), (1873, True), (8192, True)])
def test_the_longest_packed_sequence_decides_whether_heads_are_shared_out(
    longest: int, shared: bool
) -> None:
    """Its first tile takes as long as all others where seven heads share one of k."""
    q = torch.empty(8192, 14, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(9, dtype=torch.int32, device="meta")
    plan = archflash.explain(
        q, q[:, :2], q[:, :2], causal=True, device="H200", backward=True, implementation="ampere",
        cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
    ).plan  # fmt: skip
    assert plan is not None
    assert ("ampere_backward_shares_bf16" in plan.kernels) == shared


@pytest.mark.parametrize(
    ("shape", "keys", "d", "causal", "tile"),
    [
        ((64, 12, 160), 160, 64, False, "d64"),  # 160 rows are five blocks of 32, two of 128
        ((16, 12, 64), 512, 40, False, "d64"),
        ((64, 12, 192), 192, 64, False, "d64"),
        ((16, 12, 256), 256, 64, False, "d64_wide"),
        ((16, 12, 384), 384, 64, False, "d64_wide"),
        ((24, 12, 128), 256, 64, False, "d64"),
        ((8, 12, 100), 600, 64, False, "d64"),  # two full rounds of short tiles
        ((16, 12, 256), 1024, 64, False, "d64"),
        ((32, 12, 300), 300, 64, False, "d64"),
        ((8, 20, 448), 448, 64, False, "d64_wide"),  # the third of three rounds is half empty
        ((8, 20, 448), 448, 64, True, "d64"),
        ((16, 12, 1024), 1024, 64, True, "d64_wide"),
        ((64, 12, 160), 160, 128, False, "d128_wide"),
        ((64, 12, 160), 160, 32, False, "d32"),
    ],
)
def test_rows_that_fill_no_wide_block_have_tiles_of_small_ones(
    shape: tuple[int, int, int], keys: int, d: int, causal: bool, tile: str
) -> None:
    q = torch.empty(*shape, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(*shape[:2], keys, d, dtype=torch.bfloat16, device="meta")
    plan = archflash.explain(
        q, k, k, causal=causal, device="H200", backward=True, implementation="ampere"
    ).plan
    assert plan is not None
    assert plan.kernels[1] == f"ampere_attention_bwd_bf16_{tile}"


@pytest.mark.parametrize(
    ("device", "d", "call", "early"),
    [
        ("H200", 64, {}, [True, True, True]),
        ("H200", 128, {"dropout_p": 0.1}, [False] * 3),
        ("H200", 64, {"alibi_slopes": True}, [True, False, True]),
        ("RTX 5090", 64, {}, [True, True, True]),
        ("RTX 5090", 160, {"causal": True}, [True, True, True]),
        ("A100", 64, {}, [False] * 3),  # which has no such launches
        ("RTX 4090", 128, {}, [False] * 3),
    ],
)
def test_kernels_of_ampere_that_start_early(
    device: str, d: int, call: dict[str, Any], early: list[bool]
) -> None:
    q = torch.empty(2, 8, 150, d, dtype=torch.bfloat16, device="meta")
    if "alibi_slopes" in call:
        call = {"alibi_slopes": torch.empty(8, device="meta")}
    plan = archflash.explain(
        q, q, q, device=device, backward=True, implementation="ampere", **call
    ).plan
    assert plan is not None
    assert [launch["uses_pdl"] for launch in plan.to_dict()["launches"]] == early


# Where BackwardKernelParams::group_heads lies, behind which come upward_heads, tiles_in_a_row,
# packed_rows, packed_tiles and upward_work.
ORDER_OFFSET = 524
TURNS_OFFSET = ORDER_OFFSET - 20


def hopper_plan(
    shape: tuple[int, ...],
    heads_kv: int,
    deterministic: bool,
    causal: bool,
    packed: bool = False,
    keys: int = 0,
    dv: int = 0,
    window: tuple[int, int] | None = None,
) -> native.LaunchPlan:
    """hopper's plan for gradients on an H200. keys: rows of k, if not those of q. dv: columns of v,
    if not those of q.
    """
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    k = q[:, :heads_kv]
    if keys > 0:
        k = torch.empty(shape[0], heads_kv, keys, shape[3], dtype=torch.bfloat16, device="meta")
    out, v = q, k
    if dv > 0:
        out, v = (x.new_empty(*x.shape[:-1], dv) for x in (q, k))
    lse = torch.empty(shape[:3], device="meta")
    options: dict[str, Any] = {"causal": causal, "window": window}
    if packed:
        lse = torch.empty(shape[1], shape[0], device="meta")
        ends = torch.empty(5, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    request = _gradients.Request(out, q, k, v, out, lse, None, _options.complete(options))
    into = _gradients.Gradients.like(request)
    device = _api.find_device("H200")
    plan = _gradients.decide(request, into, device, "hopper", deterministic=deterministic).plan
    assert plan is not None
    return plan


def hopper_params(*given: Any, **options: Any) -> bytes:
    """The parameter block of the main kernel of `hopper_plan`."""
    return bytes.fromhex(hopper_plan(*given, **options).to_dict()["launches"][1]["params"])


@pytest.mark.parametrize(
    ("shape", "heads_kv", "deterministic", "causal", "expected", "upward"),
    [
        ((2, 16, 4096, 256), 16, False, False, 4, 0),
        ((2, 16, 4096, 256), 16, True, False, 8, 0),
        ((2, 16, 4096, 256), 16, False, True, 4, 0),
        ((2, 16, 4096, 256), 16, True, True, 2, 30),  # all groups but the last one
        ((1, 9, 4096, 256), 9, True, True, 2, 8),
        ((2, 16, 4096, 128), 16, False, True, 8, 0),
        ((2, 16, 4096, 128), 16, True, False, 8, 0),  # 32 MB
        ((2, 16, 4096, 128), 16, True, True, 4, 28),
        ((1, 16, 2048, 128), 16, True, True, 8, 8),  # 16 tiles each: about 132
        ((4, 32, 2048, 128), 8, True, True, 32, 0),  # four query heads share one of k
        ((1, 16, 2048, 256), 8, True, True, 4, 4),  # two: all that they add to stays in L2
        ((1, 32, 2048, 256), 8, True, True, 8, 0),
        ((2, 16, 2048, 128), 8, True, True, 8, 8),
        ((1, 16, 2048, 64), 16, True, True, 16, 0),  # one group
        ((2, 16, 4096, 128), 16, False, False, 8, 0),
        ((4, 16, 4096, 64), 16, False, False, 10, 0),
        ((8, 16, 1024, 128), 16, False, False, 19, 0),  # 8 tiles of a head at the same time
        ((25, 16, 196, 80), 16, False, False, 67, 0),  # the tiles of 66 heads fill the GPU
        ((1, 32, 8192, 128), 8, False, True, 2, 0),  # 64 tiles each: about 132, in equal groups
        ((1, 4, 100, 64), 2, False, False, 2, 0),
    ],
)
def test_hopper_goes_over_as_many_heads_together_as_stay_in_l2(
    shape: tuple[int, int, int, int],
    heads_kv: int,
    deterministic: bool,
    causal: bool,
    expected: int,
    upward: int,
) -> None:
    params = hopper_params(shape, heads_kv, deterministic, causal)
    group_heads, upward_heads, in_a_row, *_, upward_work = struct.unpack_from(
        "<6i", params, ORDER_OFFSET
    )
    assert (group_heads, upward_heads) == (expected, upward)
    shares_causal = causal and shape[1] == 4 * heads_kv
    assert in_a_row == (2 if shares_causal and deterministic else 1)
    assert (upward_work > 0) == (deterministic and causal and not shares_causal)


@pytest.mark.parametrize(
    ("rows", "keys", "heads_kv", "deterministic", "causal", "expected"),
    [
        (2048, 8192, 8, True, True, (4, 1)),  # as without a mask
        (2048, 8192, 8, True, False, (4, 1)),
        (2048, 8192, 8, False, True, (4, 1)),
        (4096, 8192, 8, True, True, (8, 2)),  # half of the tiles are shorter than others
    ],
)
def test_keys_far_more_than_rows_are_ordered_as_without_a_mask(
    rows: int,
    keys: int,
    heads_kv: int,
    deterministic: bool,
    causal: bool,
    expected: tuple[int, int],
) -> None:
    params = hopper_params((1, 32, rows, 128), heads_kv, deterministic, causal, keys=keys)
    group_heads, _, in_a_row, *_ = struct.unpack_from("<6i", params, ORDER_OFFSET)
    assert (group_heads, in_a_row) == expected


ALL_ROWS = 2**31 - 1


@pytest.mark.parametrize(
    ("d", "heads_kv", "deterministic", "causal", "expected"),
    [
        # 16 MB of Q, dO and the sums of dQ, or a tile for each SM.
        (128, 16, True, True, (1, 16384, 132, 49)),
        (256, 16, True, True, (1, 8192, 132, 49)),
        (128, 4, True, True, (1, ALL_ROWS, 0, 0)),  # four query heads share one of k
        (256, 4, True, True, (2, 8192, 264, 0)),
        (128, 8, True, True, (1, ALL_ROWS, 0, 0)),
        (128, 1, False, True, (1, ALL_ROWS, 0, 0)),
        (256, 16, True, False, (1, 32768, 264, 0)),
        (256, 16, False, True, (1, 16384, 132, 0)),
        (128, 16, False, False, (1, ALL_ROWS, 0, 0)),
    ],
)
def test_order_of_packed_tiles_of_hopper(
    d: int, heads_kv: int, deterministic: bool, causal: bool, expected: tuple[int, int, int, int]
) -> None:
    """tiles_in_a_row, packed_rows, packed_tiles and upward_work."""
    params = hopper_params((3000, 16, d), heads_kv, deterministic, causal, packed=True)
    group_heads, upward_heads, *order = struct.unpack_from("<6i", params, ORDER_OFFSET)
    (head_shares,) = struct.unpack_from("<i", params, SHARES_OFFSETS[0])
    assert head_shares == {(128, 4): 2, (128, 1): 8}.get((d, heads_kv), 1)
    assert (group_heads, upward_heads) == (heads_kv * head_shares, 0)
    assert tuple(order) == expected


SUMS_OFFSET = 520  # of BackwardKernelParams::sums_of_round


# The calls whose speed in turns is in docs/lab/hopper.md.
@pytest.mark.parametrize(
    ("shape", "heads_kv", "expected"),
    [
        ((1, 16, 1024, 64), 16, 2),
        ((1, 16, 2048, 128), 16, 2),
        ((1, 4, 8192, 128), 4, 2),
        ((2, 16, 4096, 128), 16, 1),
        ((4, 32, 2048, 128), 8, 1),  # the heads that share one of k make a tile's way long
        ((1, 32, 8192, 128), 8, 1),
        ((1, 4, 128, 64), 2, 1),  # one tile
    ],
)
def test_tiles_begin_apart_in_turns_where_they_would_wait_for_long(
    shape: tuple[int, int, int, int], heads_kv: int, expected: int
) -> None:
    for deterministic, sums in ((True, expected), (False, 1)):
        params = hopper_params(shape, heads_kv, deterministic, causal=True)
        assert struct.unpack_from("<i", params, SUMS_OFFSET) == (sums,)


@pytest.mark.parametrize(
    ("shape", "heads_kv", "keys", "expected"),
    [
        ((1, 16, 512, 64), 16, 8192, 8),  # whose sums take 16 MB
        ((1, 16, 512, 128), 16, 8192, 4),
        ((1, 64, 512, 64), 64, 8192, 1),  # three tiles run at the same time
        ((1, 4, 512, 64), 4, 32768, 32),
        ((1, 32, 512, 128), 4, 8192, 2),  # no more memory than dK takes in fp32
        ((1, 32, 512, 128), 8, 8192, 2),
        ((1, 16, 1024, 64), 16, 8192, 4),
        ((1, 16, 1024, 128), 16, 8192, 2),
        ((16, 6, 448, 64), 6, 1500, 1),  # of 132 tiles at the same time 36 wait
        ((4, 12, 499, 64), 12, 499, 1),  # four tiles, as many rounds
        ((2, 12, 499, 64), 12, 499, 2),  # all at the same time
    ],
)
def test_tiles_of_keys_far_more_than_rows_take_turns_in_chains(
    shape: tuple[int, int, int, int], heads_kv: int, keys: int, expected: int
) -> None:
    for deterministic, sums in ((True, expected), (False, 1)):
        params = hopper_params(shape, heads_kv, deterministic, causal=True, keys=keys)
        assert struct.unpack_from("<i", params, SUMS_OFFSET) == (sums,)
        upward_heads = struct.unpack_from("<6i", params, ORDER_OFFSET)[1]
        assert upward_heads == 0 or not deterministic or sums <= 2


# The calls whose speed in turns is in docs/lab/hopper.md: tile, sums of a round, shares of heads
# and of rows.
@pytest.mark.parametrize(
    ("shape", "heads_kv", "keys", "causal", "expected"),
    [
        ((5, 8, 400, 64), 8, 800, False, ("d64_short", 4, 1, 1)),
        ((7, 8, 448, 64), 8, 1024, True, ("d64_short", 3, 1, 1)),
        ((7, 8, 448, 128), 8, 1024, False, ("d128_stays", 1, 1, 1)),
        ((6, 4, 400, 128), 4, 2500, False, ("d128_stays", 4, 1, 1)),
        ((3, 16, 130, 128), 4, 2000, True, ("d128", 3, 1, 1)),
        ((1, 8, 1024, 128), 1, 1024, True, ("d128", 2, 8, 2)),
        ((1, 16, 2048, 192), 16, 2048, False, ("d192", 2, 1, 1)),
        ((1, 16, 900, 64), 16, 900, False, ("d64", 2, 1, 1)),  # as rules say
        ((6, 32, 784, 64), 32, 784, False, ("d64", 1, 1, 1)),
    ],
)
def test_a_model_chooses_the_turns_of_deterministic_calls(
    shape: tuple[int, int, int, int],
    heads_kv: int,
    keys: int,
    causal: bool,
    expected: tuple[str, int, int, int],
) -> None:
    dv = 128 if shape[3] == 192 else 0
    plan = hopper_plan(shape, heads_kv, True, causal, keys=keys, dv=dv)
    (main,) = (x for x in plan.to_dict()["launches"] if "_attention_bwd_" in x["kernel"])
    params = bytes.fromhex(main["params"])
    numbers = (struct.unpack_from("<i", params, at)[0] for at in (SUMS_OFFSET, *SHARES_OFFSETS))
    assert (main["kernel"].partition("_bf16_")[2], *numbers) == expected


TURN_TILES_OFFSET = ORDER_OFFSET + 84  # of BackwardKernelParams::turn_tiles, turn_steps_shift


def test_a_tile_that_starts_apart_waits_for_none_behind_it() -> None:
    """Of the tiles that run together each starts another 2^shift rounds further on, and all of them
    together reach the last round but one: else a tile would wait for its own turn.
    """
    apart = 0
    sizes = itertools.product((130, 300, 512, 1000), (700, 3000, 8000), (2, 9, 32, 64))
    for (rows, keys, heads), (d, group, causal) in itertools.product(
        sizes, ((64, 1, False), (64, 3, True), (128, 1, False), (128, 4, True), (256, 1, False))
    ):
        shape = (1, heads * group, rows, d)
        params = hopper_params(shape, heads, True, causal=causal, keys=keys)
        tiles, shift = struct.unpack_from("<2i", params, TURN_TILES_OFFSET)
        if tiles == 0:
            continue
        of_heads, shares, share_rows = (
            struct.unpack_from("<i", params, at)[0] for at in (*SHARES_OFFSETS, ROWS_OFFSET)
        )
        rounds = -(-(share_rows if shares > 1 else rows) // (128 if d == 64 else 64))
        assert tiles << shift >= rounds * group // of_heads - 1, (shape, keys, causal)
        apart += 1
    assert apart > 20


def test_tiles_in_chains_do_not_go_upwards() -> None:
    """A tile that goes upwards waits for the one behind it, which would add to another chain's sums
    and never hand them on.
    """
    in_chains = 0
    sizes = itertools.product((16, 20, 40, 64), (500, 1000, 3000), (3, 3.9))
    for (heads, rows, ratio), dims in itertools.product(sizes, ((8, 64), (32, 64), (64, 256))):
        shape, keys = (1, heads, rows, dims[0]), int(ratio * rows)
        params = hopper_params(shape, heads, True, causal=True, keys=keys, dv=dims[1])
        (sums,) = struct.unpack_from("<i", params, SUMS_OFFSET)
        upward_heads = struct.unpack_from("<6i", params, ORDER_OFFSET)[1]
        assert sums <= 2 or upward_heads == 0, (shape, keys, dims)
        in_chains += sums > 2
    assert in_chains > 0


@pytest.mark.parametrize(
    ("shape", "keys", "turns"),
    [
        ((10, 16, 300, 128), 300, True),  # 480 tiles, three of a head
        ((5, 16, 300, 128), 300, False),  # too few tiles
        ((10, 16, 200, 128), 300, False),  # few rows
        ((8, 16, 500, 64), 500, False),  # as fast without
        ((9, 16, 500, 64), 500, False),
        ((24, 16, 500, 64), 500, True),  # many waves
        ((24, 16, 500, 72), 500, False),
        ((4, 16, 2048, 96), 256, True),  # many rows of two tiles
        ((4, 16, 1000, 96), 256, False),
        ((1, 12, 800, 96), 192, False),  # few heads
    ],
)
def test_hopper_takes_turns_unasked_where_few_tiles_wait_for_one_another(
    shape: tuple[int, ...], keys: int, turns: bool
) -> None:
    plan = hopper_plan(shape, shape[1], deterministic=False, causal=False, keys=keys)
    offsets = {slot["offset"] for slot in plan.to_dict()["launches"][1]["pointers"]}
    assert (TURNS_OFFSET in offsets) == turns


@pytest.mark.parametrize(
    ("shape", "heads_kv", "causal", "turns"),
    [
        ((8, 28, 512, 128), 4, True, True),  # few keys that heads share
        ((8, 28, 512, 128), 4, False, False),
        ((8, 28, 768, 128), 4, True, False),
        ((8, 28, 512, 64), 4, True, False),
        ((1, 28, 4096, 128), 4, True, True),  # two shares of rows
        ((1, 28, 3000, 128), 4, True, False),  # five
        ((1, 16, 2048, 128), 2, True, False),  # shares of heads
        ((1, 8, 2048, 256), 1, True, False),
        ((1, 8, 2048, 128), 1, True, False),  # of both
        ((1, 40, 32760, 128), 40, False, True),
        ((1, 12, 8190, 128), 12, False, False),  # of few tiles
    ],
)
def test_hopper_takes_turns_unasked_where_ctas_add_to_the_same_rows(
    shape: tuple[int, ...], heads_kv: int, causal: bool, turns: bool
) -> None:
    keys = shape[2] if causal or shape[2] < 1000 else 512
    plan = hopper_plan(shape, heads_kv, deterministic=False, causal=causal, keys=keys)
    offsets = {slot["offset"] for slot in plan.to_dict()["launches"][1]["pointers"]}
    assert (TURNS_OFFSET in offsets) == turns


@pytest.mark.parametrize(
    ("rows", "causal", "turns"),
    [(4 * 128, True, True), (4 * 134, True, False), (4 * 200, False, True)],
)
def test_packed_causal_sequences_of_96_columns_take_turns_where_one_has_a_tile(
    rows: int, causal: bool, turns: bool
) -> None:
    plan = hopper_plan((rows, 16, 96), 16, deterministic=False, causal=causal, packed=True)
    offsets = {slot["offset"] for slot in plan.to_dict()["launches"][1]["pointers"]}
    assert (TURNS_OFFSET in offsets) == turns


@pytest.mark.parametrize(
    ("shape", "keys", "ends"),
    [
        ((8, 17, 500, 64), 256, True),  # few rows of 136 heads
        ((8, 16, 500, 64), 256, False),
        ((4, 16, 1024, 96), 256, True),  # many rows of fewer heads
        ((4, 16, 1000, 96), 256, False),
        ((3, 21, 1024, 96), 256, False),
        ((4, 16, 700, 96), 150, False),
        ((6, 12, 900, 112), 180, False),  # of 132 CTAs 12 would take a second tile
        ((4, 16, 2048, 64), 256, True),
        ((2, 10, 3000, 64), 256, True),  # of rows that CTAs share out
        ((4, 16, 2048, 64), 180, False),  # half of the second tile is left out elsewhere
        ((4, 18, 2048, 64), 256, False),
        ((4, 16, 2048, 96), 257, False),  # three tiles of keys
    ],
)
def test_the_last_of_two_tiles_in_turn_writes_dq_in_hopper(
    shape: tuple[int, ...], keys: int, ends: bool
) -> None:
    plan = hopper_plan(shape, shape[1], deterministic=False, causal=False, keys=keys)
    assert any("_backward_dq_" in kernel for kernel in plan.kernels) != ends


@pytest.mark.parametrize(
    ("shape", "keys", "options", "tile"),
    [
        ((8, 24, 197, 128), 197, {}, "d128_turns"),
        ((8, 20, 129, 104), 256, {}, "d128_turns"),
        ((8, 24, 197, 96), 197, {}, "d96_turns"),
        ((16, 12, 400, 64), 256, {}, "d64_turns"),
        ((16, 12, 400, 64), 256, {"deterministic": True}, "d64_turns"),
        ((12, 16, 256, 128), 256, {"causal": True}, "d128_causal_turns"),
        ((8, 24, 197, 128), 257, {}, "d128"),  # three tiles
        ((8, 24, 197, 128), 128, {}, "d128_one"),
        ((2, 16, 1024, 72), 120, {"deterministic": True}, "d96_one"),
        ((2, 10, 4096, 64), 77, {}, "d64_one"),  # whose rows CTAs share out
        ((64, 12, 50, 64), 50, {}, "d64_short_one"),
        ((1024, 4, 49, 32), 49, {}, "d32_short_one"),
        ((64, 12, 256, 64), 100, {"causal": True}, "d64"),  # some rows see nothing
        ((2, 12, 400, 64), 256, {}, "d64_parts"),  # few heads
        ((8, 24, 600, 128), 256, {}, "d128"),  # many
        ((8, 8, 448, 128), 4096, {}, "d128_stays"),
        ((8, 8, 448, 128), 4096, {"deterministic": True}, "d128_stays"),
        ((8, 8, 448, 128), 4096, {"causal": True}, "d128"),
        ((8, 8, 700, 128), 4096, {}, "d128_stays"),
        ((8, 8, 700, 128), 4096 + 60, {}, "d128"),  # a warpgroup has none of the last keys
        ((8, 8, 800, 128), 4096, {}, "d128"),
        ((2, 16, 448, 64), 1500, {}, "d64_short"),
        ((4, 20, 448, 64), 1500, {}, "d64"),
        ((1, 8, 448, 128), 4096, {}, "d128_stays"),
        ((4, 10, 500, 112), 640, {}, "d128_stays"),  # 1.5 rounds of tiles
        ((4, 8, 500, 128), 640, {}, "d128_parts"),  # 1.2 rounds
        ((1, 4, 448, 128), 4096, {}, "d128"),
        ((8, 8, 448, 96), 4096, {}, "d96"),
        ((1, 8, 1024, 72), 1024, {}, "d128_parts"),  # few tiles, which d96 would compute whole
        ((1, 8, 1024, 72), 1024, {"deterministic": True}, "d96"),
        ((2, 8, 640, 96), 640, {}, "d96"),  # parts would be more than SMs
        ((4, 20, 1500, 64), 1500, {}, "d64_parts"),  # many waves
        ((4, 24, 1178, 64), 1178, {}, "d64"),  # of which short parts gain nothing
        ((24, 20, 300, 32), 300, {}, "d32_short"),  # which a tile of all rows would half fill
        ((4, 20, 384, 32), 384, {}, "d32"),
        ((4, 12, 1024, 64), 1024, {"window": (64, 64)}, "d64_short"),
        ((4, 12, 1024, 64), 1024, {"window": (128, 128)}, "d64"),
        ((4, 12, 1024, 64), 1024, {"window": (127, 0)}, "d64"),
    ],
)
def test_tiles_of_hopper_that_end_in_turns_or_stay(
    shape: tuple[int, ...], keys: int, options: dict[str, Any], tile: str
) -> None:
    given = {"deterministic": False, "causal": False} | options
    plan = hopper_plan(shape, shape[1], keys=keys, **given)
    (main,) = (name for name in plan.kernels if "_attention_bwd_" in name)
    assert main.endswith(f"_{tile}")
    sums = [name for name in plan.kernels if "_dq_" in name]
    assert len(sums) == (not tile.endswith(("_turns", "_one")))


@pytest.mark.parametrize(
    ("shape", "keys", "options", "tile", "works"),
    [
        ((8, 16, 114, 64), 512, {}, "d64_rows", 8 * 16),
        ((8, 16, 114, 64), 512, {"deterministic": True, "causal": True}, "d64_rows", 8 * 16),
        ((4, 12, 128, 40), 2048, {}, "d64_rows", 4 * 12 * 2),
        ((1, 20, 200, 64), 1500, {}, "d64_rows_two", 20 * 6),
        ((12, 8, 384, 64), 384, {}, "d64_rows_three", 12 * 8),
        ((8, 20, 312, 64), 256, {}, "d64_rows_three", 132 + 28 * 4),  # the last heads alone
        ((16, 16, 312, 64), 256, {}, "d64_rows_three", 16 * 16),  # fewer CTAs would be idle
        ((8, 8, 100, 32), 950, {}, "d32_rows", 8 * 8 * 2),
        ((8, 8, 512, 32), 1200, {}, "d32_rows_four", 8 * 8 * 2),
        ((16, 8, 310, 32), 310, {}, "d32_rows_four", 16 * 8),  # all in one round
        ((2, 8, 100, 80), 3000, {}, "d96_rows", 2 * 8 * 8),
        ((2, 8, 128, 104), 4096, {}, "d128_rows", 2 * 8 * 8),
    ],
)
def test_ctas_of_hopper_that_have_all_query_rows_of_a_head(
    shape: tuple[int, ...], keys: int, options: dict[str, Any], tile: str, works: int
) -> None:
    """They make the terms of the rows themselves, and a launch comes behind where several CTAs
    share out the keys of a head.
    """
    given = {"deterministic": False, "causal": False} | options
    plan = hopper_plan(shape, shape[1], keys=keys, **given)
    main, *behind = plan.kernels
    assert main.endswith(f"_{tile}")
    assert len(behind) == (works > shape[0] * shape[1])
    assert plan.to_dict()["tile"]["tiles"] == works


def test_few_rows_with_other_options_have_tiles_of_keys() -> None:
    few = ((8, 16, 114, 64), 16), {"deterministic": False, "causal": False, "keys": 512}
    for shape, heads_kv, options in (
        ((8, 16, 114, 64), 8, {}),  # query heads share a head of k
        ((8, 16, 385, 64), 16, {}),
        ((8, 16, 129, 96), 16, {}),
        ((8, 16, 100, 192), 16, {}),
    ):
        plan = hopper_plan(shape, heads_kv, **few[1] | options)
        assert not any(kernel.endswith("_rows") for kernel in plan.kernels), shape


def test_every_kernel_that_hopper_plans_for_gradients_was_built() -> None:
    """With numbers of rows and keys on each side of those in the rules of tiles and chains."""
    sizes = itertools.product((40, 64, 128, 192, 500), (64, 192, 450, 900, 8192))
    for (rows, keys), d, heads, deterministic in itertools.product(
        sizes, (32, 64, 96, 128, 256), (1, 200), (False, True)
    ):
        plan = hopper_plan((1, heads, rows, d), heads, deterministic, causal=False, keys=keys)
        for launch in plan.to_dict()["launches"]:
            built = kernels_built(launch["image"])
            assert launch["kernel"] in built, (rows, keys, d, heads, deterministic)


def test_explain_says_why_no_kernel_computes_gradients() -> None:
    q = torch.empty(2, 8, 100, 64, dtype=FP16, device="meta")
    wide = torch.empty(2, 8, 100, 264, dtype=FP16, device="meta")
    decision = archflash.explain(wide, wide, wide, device="A100", backward=True)
    assert decision.chosen == "torch"
    assert decision.fallback
    assert "264" in decision.reasons["ampere"][0]
    assert "no backward" in decision.reasons["ada"][0]
    old = archflash.explain(q, q, q, device="T4", backward=True)
    assert "compute capability 7.5" in old.reasons["ampere"][0]


def test_folders_that_say_that_they_have_gradients_have_them() -> None:
    said = [i.name for i in archflash.implementations() if "gradients" in i.features]
    assert said == [*_gradients.FOLDERS, "torch"]
    for name in native.folder_names():
        assert native.has_backward(name) == (name in _gradients.FOLDERS)


# --- which implementation serves a call that autograd will differentiate ---


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(2, 8, 256, 64, dtype=dtype, device="meta", requires_grad=True)
    return q, q, q


def differentiable(dtype: torch.dtype, **options: Any) -> archflash.Decision:
    return archflash.explain(*inputs(dtype), device="A100", **options)


def test_pytorchs_fused_kernels_come_first_where_gradients_are_needed() -> None:
    decision = differentiable(FP16, causal=True)
    assert decision.chosen == "torch"
    assert not decision.fallback
    assert "PyTorch's fused kernels compute the gradients" in decision.reasons["ampere"][0]
    ada = archflash.explain(*inputs(FP16), device="RTX 4090").reasons["ada"]
    assert ada[0].startswith("no backward: ada computes the forward only")


@pytest.mark.parametrize("folder", _gradients.FOLDERS)
def test_a_forced_kernel_that_has_gradients_plans_a_call_that_needs_them(folder: str) -> None:
    dtype = torch.float32 if folder == "simt" else FP16
    device = {"hopper": "H200", "blackwell_dc": "B200"}.get(folder, "A100")
    decision = archflash.explain(*inputs(dtype), device=device, implementation=folder)
    assert decision.chosen == folder
    assert decision.plan is not None


def test_a_backward_pass_that_has_never_run_on_a_gpu_has_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.empty(2, 8, 256, 64, dtype=FP16, device="meta")
    decision = archflash.explain(q, q, q, device="B200", backward=True)
    assert decision.chosen == "ampere"
    assert "backward pass of blackwell_dc has never run" in decision.reasons["blackwell_dc"][0]
    assert decision.unproved == ("blackwell_dc",)
    # A call that PyTorch has no fused kernel for.
    assert archflash.explain(*inputs(FP16), device="B200", softcap=2.0).chosen == "ampere"
    named = {"implementation": "blackwell_dc"}
    forced = archflash.explain(q, q, q, device="B200", backward=True, **named)
    assert forced.plan is not None
    assert "blackwell_dc_attention_bwd_f16_d64" in forced.plan.kernels
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_dc")
    asked = archflash.explain(q, q, q, device="B200", backward=True)
    assert asked.plan is not None
    assert asked.plan.kernels == forced.plan.kernels
    asked = archflash.explain(*inputs(FP16), device="B200", softcap=2.0)
    assert asked.chosen == "blackwell_dc"


def large_inputs(d: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(2, 16, 4096, d, dtype=FP16, device="meta", requires_grad=True)
    return q, q, q


def test_gradients_come_from_the_kernel_that_was_measured_to_be_the_fastest() -> None:
    causal = archflash.explain(*large_inputs(128), device="H200", causal=True)
    assert causal.chosen == "hopper"
    assert "was measured to be faster than PyTorch's cuDNN kernel" in causal.reasons["torch"][0]
    assert archflash.explain(*large_inputs(128), device="H200").chosen == "hopper"
    assert archflash.explain(*large_inputs(256), device="H200", causal=True).chosen == "hopper"
    # What was measured on an H200 says nothing of an A100.
    assert archflash.explain(*large_inputs(128), device="A100", causal=True).chosen == "torch"


@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [64, 2048])
def test_float32_with_gradients_comes_to_simt_where_it_was_measured_to_be_faster(
    rows: int, causal: bool, d: int
) -> None:
    q = torch.empty(2, 16, rows, d, device="meta", requires_grad=True)
    decision = archflash.explain(q, q, q, device="H200", causal=causal)
    assert decision.chosen == "simt"
    assert "faster than PyTorch's memory-efficient kernel" in decision.reasons["torch"][0]
    assert archflash.explain(q, q, q, device="A100", causal=causal).chosen == "torch"


def test_float32_with_gradients_stays_with_pytorch_where_simt_was_not_measured() -> None:
    mask = torch.empty(2048, 2048, dtype=torch.bool, device="meta")
    for d, options in ((264, {}), (64, {"attn_mask": mask})):
        q = torch.empty(2, 16, 2048, d, device="meta", requires_grad=True)
        assert archflash.explain(q, q, q, device="H200", **options).chosen == "torch"


def test_a_kernel_whose_backward_pass_does_not_take_a_call_refuses_it_with_the_reason() -> None:
    decision = archflash.explain(*inputs(FP16), device="T4", softcap=2.0)
    assert decision.chosen == "torch"
    assert decision.fallback
    assert "simt computes gradients of float32 inputs only" in decision.reasons["simt"][0]


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"return_lse": True}], ids=str)
def test_a_kernel_comes_first_where_pytorch_has_no_fused_one(options: dict[str, Any]) -> None:
    decision = differentiable(FP16, **options)
    assert decision.chosen == "ampere"
    assert "it has a backward pass" in decision.why


def test_a_traced_call_that_needs_gradients_has_to_name_its_kernel() -> None:
    q = rand(1, 2, 5, 8, seed=1, dtype=torch.float32).requires_grad_()
    torch._dynamo.reset()
    traced = torch.compile(lambda x: archflash.attention(x, x, x), backend="eager")
    with archflash.force("simt"), pytest.raises(Exception, match="pass implementation='simt'"):
        traced(q)


@pytest.mark.slow
def test_a_compiled_call_gives_the_same_gradients() -> None:
    q, k, v = (rand(1, 2, 5, 16, seed=seed, dtype=torch.float32) for seed in range(3))
    out, lse = archflash.attention(q, k, v, return_lse=True)
    strided = lse.mT.contiguous().mT  # which a kernel cannot read
    given = (torch.ones_like(out), q, k, v, out, strided)
    compiled = torch.compile(archflash.attention_backward, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(*given), archflash.attention_backward(*given), strict=True):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad
    ordered = compiled(*given, deterministic=True)
    for one, other in zip(ordered, archflash.attention_backward(*given), strict=True):
        torch.testing.assert_close(one, other)
    # Dynamo's own exception has the words of the one that is raised while it traces.
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dq is"):
        compiled(*given, dq=torch.empty(q.shape, dtype=torch.float64))


def test_float32_of_heads_that_share_one_of_k_goes_to_our_kernel() -> None:
    q = torch.empty(1, 8, 64, 64, device="meta", requires_grad=True)
    k = torch.empty(1, 2, 64, 64, device="meta")
    assert archflash.explain(q, k, k, device="A100").chosen == "simt"


def test_explain_says_how_many_times_kernels_of_parts_are_launched() -> None:
    q = torch.empty(4096, 8, 1, 64, dtype=torch.bfloat16, device="meta")
    decision = archflash.explain(q, q, q, device="A100", backward=True)
    assert decision.plan is not None
    parts = decision.plan.kernels.count("ampere_backward_dq_bf16")
    assert parts > 4
    lines = [line for line in str(decision).splitlines() if "launch:" in line]
    assert len(lines) <= 6  # of all parts but the last one, and of that one
    assert any(line.endswith((f", {parts} times", f", {parts - 1} times")) for line in lines)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_parts_of_the_keys_add_up_in_plain_operations(
    dtype: torch.dtype, layout: str
) -> None:
    """out and lse are those of all keys, in each call with a part of them."""
    shape = {"bhnd": (1, 2, 6, 8), "bnhd": (1, 6, 2, 8), "packed": (6, 2, 8)}[layout]
    rows = 2 if layout == "bhnd" else len(shape) - 3
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4))
    sinks = torch.randn(2, generator=generator)
    options: dict[str, Any] = {"window": (2, 0), "softcap": 3.0}
    if layout == "packed":
        ends = torch.tensor([0, 6], dtype=torch.int32)
        options |= {"cu_seqlens_q": ends}
    else:
        options |= {"layout": layout}

    def lengths(keys: int) -> dict[str, Any]:
        packed = torch.tensor([0, keys], dtype=torch.int32)
        return {"cu_seqlens_k": packed} if layout == "packed" else {}

    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = archflash.attention(
        *leaves[:3], sinks=leaves[3], return_lse=True, **options, **lengths(6)
    )
    dlse = torch.randn(lse.shape, generator=generator)
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for part in (slice(0, 2), slice(2, 6)):
        of_part = (slice(None),) * rows + (part,)
        *gradients, dsinks = archflash.attention_backward(
            dout, q, k[of_part], v[of_part], out.detach(), lse.detach(), dlse=dlse, sinks=sinks,
            q_offset=-part.start, **options, **lengths(part.stop - part.start),
        )  # fmt: skip
        found[0] += gradients[0]
        for whole, gradient in zip(found[1:], gradients[1:], strict=True):
            whole[of_part] = gradient
    for one, other in zip((*found, dsinks), expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=2e-6, rtol=1e-5)


EMPTY: dict[str, Any] = {
    "sequences": {"shapes": ((10, 4, 64), (10, 4, 64)), "packed": True},
    "rows-dense-mask": {"shapes": ((2, 4, 0, 64), (2, 4, 96, 64)), "mask": (2, 1, 0, 96)},
    "rows-d256": {"shapes": ((2, 4, 0, 256), (2, 4, 300, 256))},
    "rows-d64-causal": {"shapes": ((2, 4, 0, 64), (2, 4, 200, 64)), "causal": True},
    "rows-d192": {"shapes": ((2, 4, 0, 192), (2, 4, 1, 192))},
    "rows-d128-many-keys": {"shapes": ((1, 1, 0, 128), (1, 1, 2000, 128))},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("implementation", [None, "ampere", "hopper"])
@pytest.mark.parametrize("name", EMPTY)
def test_calls_without_rows_or_sequences_are_planned(
    name: str, implementation: str | None, deterministic: bool
) -> None:
    given = dict(EMPTY[name])
    q, k = (torch.empty(x, dtype=torch.float16, device="meta") for x in given.pop("shapes"))
    if given.pop("packed", False):
        ends = torch.empty(1, dtype=torch.int32, device="meta")
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        given |= {"max_seqlen_q": 16, "max_seqlen_k": 16}
    if "mask" in given:
        given["attn_mask"] = torch.empty(given.pop("mask"), dtype=torch.bool, device="meta")
    call = {"device": "H200", "backward": True, "implementation": implementation, **given}
    torch.use_deterministic_algorithms(deterministic)
    try:
        plan = archflash.explain(q, k, k, **call).plan
    except archflash.ForcedImplementationError:
        return
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan is not None
    for launch in plan.to_dict()["launches"]:
        assert min(launch["grid"]) > 0, launch
        assert launch["kernel"] in kernels_built(launch["image"])


def test_a_longest_sequence_beyond_all_rows_is_a_hint() -> None:
    x = torch.empty(32768, 4, 64, dtype=torch.float16, device="meta")
    ends = torch.empty(513, dtype=torch.int32, device="meta")
    call = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "implementation": "ampere"}
    for longest in (2**31, 2**60 - 1):
        call |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        plan = archflash.explain(x, x, x, device="H200", **call).plan
        assert plan is not None
        assert all(0 < n < 2**31 for of in plan.to_dict()["launches"] for n in of["grid"])


def test_calls_of_many_tiles_are_planned_at_once() -> None:
    """Nobody asks how long their tiles take, of which this call has 16 million for each SM."""
    q, k = (
        torch.empty(1000, heads, n, 256, device="meta") for heads, n in ((256, 300), (128, 2**22))
    )
    start = time.perf_counter()
    with pytest.raises(archflash.ForcedImplementationError, match="CTAs"):
        archflash.explain(q, k, k, device="A100", implementation="simt", backward=True)
    assert time.perf_counter() - start < 2


def masked_call() -> tuple[tuple[Tensor, ...], Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 160, dtype=torch.float16) for _ in "qkv")
    return (q, k, v), torch.rand(1, 1, 40, 40) > 0.3


def test_gradients_that_a_chosen_kernel_lacks_come_from_others() -> None:
    """hopper serves a call with a dense mask, and has gradients of it up to head dimension 128.
    Here `torch` is the other one, as the tensors are on the CPU.
    """
    (q, k, v), mask = masked_call()
    out, lse = archflash.attention(q, k, v, attn_mask=mask, return_lse=True)
    values = list(_api.option_values(q, k, {}))
    place = _options.OF_ATTENTION.index("attn_mask")

    def backward(forced: bool) -> object:
        call = (tuple(values), (place,), "hopper", not forced)
        saved, needed = (q, k, v, out, lse, mask), (False, True, True, True)
        return native.recorded_backward(out, None, saved, call, needed, True)

    assert backward(forced=False) is NotImplemented
    with pytest.raises(archflash.ForcedImplementationError, match="head dimension"):
        backward(forced=True)


def test_so_do_those_of_a_call_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, mask = masked_call()
    monkeypatch.setattr(_ops, "_who_differentiates", lambda *_: "hopper")
    torch.use_deterministic_algorithms(True)
    try:
        leaves = [x.requires_grad_() for x in tensors]
        with FlopCounterMode(display=False):
            out = archflash.attention(*leaves, attn_mask=mask)
        found = torch.autograd.grad(out, leaves, out.detach())
        with archflash.force("hopper"), FlopCounterMode(display=False):
            out = archflash.attention(*leaves, attn_mask=mask)
        with pytest.raises(archflash.ForcedImplementationError, match="head dimension"):
            torch.autograd.grad(out, leaves, out.detach())
    finally:
        torch.use_deterministic_algorithms(False)
    exact = reference.attention_backward(out.detach(), *tensors, attn_mask=mask)
    for x, name in zip(found, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(x.double(), getattr(exact, name), atol=5e-3, rtol=5e-3)
