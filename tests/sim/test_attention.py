"""The kernels of the wheel on the simulator: every feature with every other one, against float64.

Each call runs under several schedules, which must all give the same bits and find nothing wrong.
ARCHFLASH_SIM_SEEDS says how many (4: each mode once).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Iterable
from importlib import resources
from typing import Any

import pytest
import torch
from gpu_cases import DTYPES, all_pairs, same_bits, serves
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import _archflash_sim as _simulator
from archflash import reference, sim
from archflash.sim import _attention

from .explained import unexplained

NAN = math.nan
# FP8: test_ada.py.
KERNELS = {
    i.name: tuple(dtype for dtype in i.dtypes if dtype in DTYPES)
    for i in archflash.implementations()
    if i.name != "torch"
}
MODES = ("lazy", "eager", "random", "priority")
SEEDS = int(os.environ.get("ARCHFLASH_SIM_SEEDS", "4"))
# Its CTAs are 16 warps and 256 rows, however few a call has: each call runs under one of those
# four, by its shape, and where it is not one of the pairs of features, which have both, with one
# type; in the full run under all seeds. test_blackwell_dc.py compares schedules.
IN_FULL = len(MODES) < SEEDS
ONE_OF_FOUR = set() if IN_FULL else {"blackwell_dc"}

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_kernel_and_dtype = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (name, dtype)
        for name, dtypes in KERNELS.items()
        for dtype in (dtypes[-1:] if name in ONE_OF_FOUR else dtypes)
    ],
)


# --- inputs ---


def rand(*shape: int, seed: int, dtype: str = "float32") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def qkv(
    nq: int,
    nk: int,
    d: int = 64,
    dv: int | None = None,
    *,
    dtype: str,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous q, k, v in the layout bhnd; heads are those of q and of k."""
    return (
        rand(batch, heads[0], nq, d, seed=0, dtype=dtype),
        rand(batch, heads[1], nk, d, seed=1, dtype=dtype),
        rand(batch, heads[1], nk, dv or d, seed=2, dtype=dtype),
    )


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cu_seqlens(lengths: tuple[int, ...]) -> Tensor:
    return int32([0, *itertools.accumulate(lengths)])


def lay_out(x: Tensor, memory: str, heads_dim: int) -> Tensor:
    """The same values, or fewer of them seen more often, in another place of memory."""
    if memory == "transposed":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if memory == "inside_nan":
        around = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 16), NAN).to(x.dtype)
        return around[..., 1:-2, 8:-8].copy_(x)
    if memory == "expanded":
        return x.narrow(heads_dim, 0, 1).expand_as(x)
    return x


# --- the check of a call ---


def attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, the same under every schedule; nothing was found wrong."""
    first: sim.Run | None = None
    numbers: Iterable[int] = range(SEEDS)
    if kernel in ONE_OF_FOUR:
        numbers = [(q.shape[-2] + k.shape[-2] + v.shape[-1] // 8 + len(call)) % len(MODES)]
    for number in numbers:
        mode = MODES[number % len(MODES)]
        run = sim.run(
            q, k, v, implementation=kernel, mode=mode, seed=number, return_lse=True, **call
        )
        assert not unexplained(kernel, run.report), f"{mode}, seed {number}: {run.report}"
        assert run.lse is not None
        if first is None:
            first = sim.Run(run.out.clone(), run.lse, run.reports, run.plan)
            continue
        assert first.lse is not None
        assert same_bits(run.out, first.out), f"other bits in mode {mode}, seed {number}"
        assert same_bits(run.lse, first.lse), f"other log-sum-exp in mode {mode}, seed {number}"
    assert first is not None
    assert first.lse is not None
    assert first.lse.dtype == torch.float32
    assert first.lse.is_contiguous()
    return first.out, first.lse


def assert_close(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    """Output and log-sum-exp agree with float64 by the error rule."""
    expected, expected_lse = reference.attention(q, k, v, **call)
    report = reference.check(out, expected, reference.baseline(q, k, v, **call))
    assert report.ok, report
    lse_report = reference.check_lse(lse, expected_lse)
    assert lse_report.ok, f"log-sum-exp {lse_report}"


def assert_rows_close(
    rows: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> None:
    """The chosen rows of an output, `rows` (B, H, N) bool, agree with float64."""
    expected, _ = reference.attention(q, k, v, **call)
    baseline = reference.baseline(q, k, v, **call)
    report = reference.check(out[rows], expected[rows], baseline[rows])
    assert report.ok, report


def attend_and_check(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    out, lse = attend(kernel, q, k, v, **call)
    call.pop("out", None)
    assert_close(out, lse, q, k, v, **call)
    return out, lse


# --- every pair of features ---

FACTORS: dict[str, list[Any]] = {
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": [(33, 70), (70, 33), (9, 140), (64, 64)],
    "dims": [(64, 64), (128, 128), (32, 32), (40, 72), (192, 128), (256, 256)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 50, 1 << 40, "tensor"],
    "softcap": [None, 5.0],
    "sinks": [None, "float32", "float16", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0],
    "memory": ["dense", "transposed", "inside_nan", "expanded"],
    "out_pad": [0, 24],
}  # fmt: skip
# Those of blackwell_dc for more than 128 rows are other kernels than those for fewer.
LENGTHS_OF = {"blackwell_dc": [(33, 70), (170, 33), (9, 140), (140, 150)]}
ROWS = {
    name: all_pairs(
        {"dtype": list(dtypes), **FACTORS, "lengths": LENGTHS_OF.get(name, FACTORS["lengths"])}
    )
    for name, dtypes in KERNELS.items()
}
# Of three packed sequences: the lengths of the row, no query, no key.
MORE_Q, MORE_K = (0, 1), (9, 0)


def row_id(row: dict[str, Any]) -> str:
    parts = [f"{name}{value}" for name, value in row.items() if value not in (None, False)]
    return "-".join(parts).translate(str.maketrans("", "", " '()")).replace(",", "_")


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        pytest.param(name, row, id=f"{name}-{row_id(row)}")
        for name, rows in ROWS.items()
        for row in rows
    ],
)
def test_every_pair_of_features_agrees_with_float64(kernel: str, row: dict[str, Any]) -> None:
    (nq, nk), (d, dv), dtype = row["lengths"], row["dims"], row["dtype"]
    call: dict[str, Any] = {
        name: row[name] for name in ("causal", "window", "softcap", "scale", "q_offset")
    }
    heads_dim, batch = 1, 2
    if row["layout"] == "packed":
        lengths_q, lengths_k = (nq, *MORE_Q), (nk, *MORE_K)
        batch = len(lengths_q)
        call["cu_seqlens_q"], call["cu_seqlens_k"] = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
        q, k, v = qkv(sum(lengths_q), sum(lengths_k), d, dv, dtype=dtype, heads=row["heads"])
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    else:
        call["layout"] = row["layout"]
        q, k, v = qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=row["heads"])
        if row["layout"] == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            heads_dim = 2
    q, k, v = (lay_out(x, row["memory"], heads_dim) for x in (q, k, v))
    if call["q_offset"] == "tensor":
        call["q_offset"] = int32([3 * b - 2 for b in range(batch)])
    if row["sinks"] is not None:
        call["sinks"] = rand(row["heads"][0], seed=4, dtype=row["sinks"])
    room = torch.full((*q.shape[:-1], dv + row["out_pad"]), NAN, dtype=q.dtype)
    attend_and_check(kernel, q, k, v, out=room[..., :dv], **call)
    assert room[..., dv:].isnan().all()


# --- lengths ---


@pytest.mark.parametrize("lengths", [(5, 0), (1, 1), (1, 300), (300, 1), (129, 257)], ids=str)
@each_kernel_and_dtype
def test_lengths_of_any_kind(kernel: str, dtype: str, lengths: tuple[int, int]) -> None:
    attend_and_check(kernel, *qkv(*lengths, dtype=dtype), causal=lengths[0] > 100)


@each_kernel
@pytest.mark.parametrize(("nq", "batch", "heads"), [(0, 2, 2), (5, 0, 2), (5, 2, 0)])
def test_no_row_to_write_needs_no_kernel(kernel: str, nq: int, batch: int, heads: int) -> None:
    q, k, v = qkv(nq, 5, dtype=KERNELS[kernel][0], batch=batch, heads=(heads, heads))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]


# --- rows that see nothing, sinks, large scores ---


@each_kernel_and_dtype
@pytest.mark.parametrize("sinks", [None, "float32"])
@pytest.mark.parametrize(
    "blind",
    [
        {"nk": 0},
        {"causal": True, "q_offset": -(1 << 33)},
        {"window": (3, None), "q_offset": 5000},
        {"window": (3, 3), "q_offset": -200},
    ],
    ids=["no-keys", "causal-far-left", "window-far-right", "window-far-left"],
)
def test_rows_that_see_no_key_are_zero_with_lse_of_the_sink(
    kernel: str, dtype: str, blind: dict[str, Any], sinks: str | None
) -> None:
    call = dict(blind)
    q, k, v = qkv(35, call.pop("nk", 65), dtype=dtype, heads=(4, 2))
    if sinks:
        call["sinks"] = rand(4, seed=1, dtype=sinks)
    out, lse = attend_and_check(kernel, q, k, v, **call)
    assert torch.equal(out, torch.zeros_like(out))
    if sinks is None:  # with one, the rule has compared the log-sum-exp with the sink
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@each_kernel_and_dtype
def test_only_the_rows_that_see_no_key_are_zero(kernel: str, dtype: str) -> None:
    out, lse = attend_and_check(kernel, *qkv(150, 70, dtype=dtype), causal=True)
    assert torch.equal(out[:, :, :80], torch.zeros_like(out[:, :, :80]))
    assert bool((lse[:, :, :80] == -math.inf).all())
    assert bool(lse[:, :, 80:].isfinite().all())


@each_kernel_and_dtype
def test_sinks_far_above_and_far_below_the_scores(kernel: str, dtype: str) -> None:
    q, k, v = qkv(40, 129, dtype=dtype, heads=(4, 2))
    out, _ = attend_and_check(kernel, q, k, v, sinks=torch.tensor([60.0, -60.0, 0.0, -math.inf]))
    plain, _ = attend(kernel, q, k, v)
    assert torch.equal(out[:, 3], plain[:, 3])  # a sink of -inf is none


@each_kernel_and_dtype
def test_an_infinite_sink_takes_the_whole_weight(kernel: str, dtype: str) -> None:
    q, k, v = qkv(40, 129, dtype=dtype, heads=(4, 2))
    out, lse = attend_and_check(kernel, q, k, v, sinks=torch.tensor([math.inf, 0.0, math.inf, 1.0]))
    assert torch.equal(out[:, ::2], torch.zeros_like(out[:, ::2]))
    assert bool((lse[:, ::2] == math.inf).all())


@each_kernel_and_dtype
@pytest.mark.parametrize("softcap", [1e3, 1e9])
def test_a_large_softcap_changes_nothing(kernel: str, dtype: str, softcap: float) -> None:
    attend_and_check(kernel, *qkv(40, 129, dtype=dtype), softcap=softcap, causal=True)


@each_kernel_and_dtype
@pytest.mark.parametrize("window", [(3, None), (None, 3), (None, None)], ids=str)
def test_the_farthest_offsets_hide_no_key_of_an_unbounded_side(
    kernel: str, dtype: str, window: tuple[int | None, int | None]
) -> None:
    q, k, v = qkv(35, 65, dtype=dtype)
    far = 2**60 - 1
    for q_offset in (far,) if window[0] is None else (-far,):
        out, _ = attend_and_check(kernel, q, k, v, window=window, q_offset=q_offset)
        assert out.abs().amax() > 0


@each_kernel_and_dtype
def test_huge_finite_scores_give_finite_outputs(kernel: str, dtype: str) -> None:
    size = 5e3 if dtype == "float16" else 1e5
    q, k, v = qkv(40, 129, dtype=dtype)
    out, lse = attend(kernel, q * size, k * size, v, causal=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert out.abs().max() <= v.abs().max() * 1.001


# --- memory ---


@each_kernel_and_dtype
def test_views_of_one_packed_qkv_buffer(kernel: str, dtype: str) -> None:
    q, k, v = rand(2, 70, 3, 4, 64, seed=0, dtype=dtype).unbind(2)  # of (B, N, 3, H, D)
    attend_and_check(kernel, q, k, v, causal=True, layout="bnhd")
    attend_and_check(kernel, *(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    ends = cu_seqlens((63, 0, 7))
    attend_and_check(kernel, q[0], k[0], v[0], causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)


@each_kernel_and_dtype
@pytest.mark.parametrize("steps", [1, 5])
def test_kv_cache_tail_never_matters(kernel: str, dtype: str, steps: int) -> None:
    q, k, v = qkv(steps, 113, dtype=dtype, heads=(4, 2))
    cache_k, cache_v = (torch.full((1, 2, 160, 64), NAN, dtype=k.dtype) for _ in range(2))
    cache_k[:, :, :113], cache_v[:, :, :113] = k, v
    for length in (113, 64, 1):
        attend_and_check(kernel, q, cache_k[:, :, :length], cache_v[:, :, :length], causal=True)


@each_kernel_and_dtype
def test_rows_of_a_cache_beyond_q_offset_never_matter(kernel: str, dtype: str) -> None:
    # The whole cache is an argument here: causal and q_offset alone hide its tail. As in PyTorch,
    # values that nobody may see are finite where a tile is partly masked.
    q, k, v = qkv(3, 160, dtype=dtype)
    clean, clean_lse = attend_and_check(kernel, q, k, v, causal=True, q_offset=int32([40]))
    k[:, :, 43:] = NAN
    out, lse = attend(kernel, q, k, v, causal=True, q_offset=int32([40]))
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


# --- NaN and infinity ---


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_non_finite_query_spoils_its_own_row_only(kernel: str, dtype: str, value: float) -> None:
    q, k, v = qkv(70, 129, dtype=dtype)
    spoiled = q.clone()
    spoiled[0, 1, 40, 3] = value
    out, lse = attend(kernel, spoiled, k, v)
    others = torch.ones(1, 2, 70, dtype=torch.bool)
    others[0, 1, 40] = False
    assert_rows_close(others, out, q, k, v)
    assert bool(out[0, 1, 40].isnan().all())
    assert not lse[0, 1, 40].isfinite()


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_non_finite_key_spoils_only_rows_that_see_it(
    kernel: str, dtype: str, value: float
) -> None:
    q, k, v = qkv(130, 130, dtype=dtype)
    spoiled = k.clone()
    spoiled[0, 0, 70] = value
    out, _ = attend(kernel, q, spoiled, v, causal=True)
    blind = torch.ones(1, 2, 130, dtype=torch.bool)
    blind[0, 0, 70:] = False
    assert_rows_close(blind, out, q, k, v, causal=True)
    assert bool(out[0, 0, 70:].isnan().all())


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_non_finite_value_spoils_what_sees_it_only(kernel: str, dtype: str, value: float) -> None:
    q, k, v = qkv(40, 200, dtype=dtype)
    spoiled = v.clone()
    spoiled[0, 0, 150, 5] = value
    out, _ = attend(kernel, q, k, spoiled)
    clean, _ = attend(kernel, q, k, v)
    assert not out[0, 0, :, 5].isfinite().any()
    out[0, 0, :, 5] = clean[0, 0, :, 5]
    assert torch.equal(out, clean)
    # No query sees keys 40 to 199.
    attend_and_check(kernel, q, k, spoiled, window=(None, 0), q_offset=0)


@each_kernel_and_dtype
def test_a_window_hides_a_nan_key(kernel: str, dtype: str) -> None:
    q, k, v = qkv(130, 130, dtype=dtype)
    k[0, 0, 70] = NAN
    attend_and_check(kernel, q, k, v, window=(9, 4))


# --- the host's instruction sets ---


@each_kernel_and_dtype
def test_code_for_any_x86_gives_the_bits_of_avx2(kernel: str, dtype: str) -> None:
    q, k, v = qkv(70, 150, dtype=dtype)
    call: dict[str, Any] = {"causal": True, "softcap": 5.0, "sinks": rand(2, seed=4)}
    out, lse = attend_and_check(kernel, q, k, v, **call)
    if not _simulator.uses_avx2():
        pytest.skip("this machine has no AVX2")
    _attention.find_program.cache_clear()  # handlers are chosen when PTX is loaded
    _simulator.set_avx2(False)
    try:
        assert not _simulator.uses_avx2()
        plain, plain_lse = attend(kernel, q, k, v, **call)
    finally:
        _simulator.set_avx2(True)
        _attention.find_program.cache_clear()
    assert torch.equal(plain, out)
    assert torch.equal(plain_lse, lse)


# --- packed sequences ---

SEQUENCES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((70,), (139,)),
    "unequal": ((63, 64, 65, 130), (129, 1, 65, 40)),
    "single-tokens": ((1,) * 20, (1,) * 20),
    "decode": ((1,) * 4, (1, 199, 64, 65)),
    "empty-among-others": ((0, 5, 0, 0, 70, 0), (9, 5, 0, 3, 100, 0)),
    "queries-without-keys": ((7, 64, 30), (0, 80, 0)),
    "no-query-at-all": ((0, 0), (5, 6)),
    "no-key-at-all": ((5, 6), (0, 0)),
    "many": (tuple(i * 7 % 5 for i in range(60)), tuple(i * 5 % 7 for i in range(60))),
}


def packed(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], dtype: str, spare: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """(T, H, D) tensors, with rows of NaN after the last sequence, and the cu_seqlens."""
    totals = (sum(q_lengths), sum(k_lengths), sum(k_lengths))
    tensors = []
    for seed, (total, heads) in enumerate(zip(totals, (4, 2, 2), strict=True)):
        rows = rand(total, heads, 64, seed=seed, dtype=dtype)
        tensors.append(torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, spare), value=NAN))
    ends = {"cu_seqlens_q": cu_seqlens(q_lengths), "cu_seqlens_k": cu_seqlens(k_lengths)}
    return tensors, ends


@each_kernel_and_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences(kernel: str, dtype: str, name: str, causal: bool) -> None:
    tensors, ends = packed(*SEQUENCES[name], dtype)
    if tensors[0].numel() == 0:
        out = archflash.attention(*tensors, implementation=kernel, causal=causal, **ends)
        assert out.shape == tensors[0].shape
        return
    attend_and_check(kernel, *tensors, causal=causal, **ends)


@each_kernel_and_dtype
@pytest.mark.parametrize("sinks", [None, "float32"])
def test_rows_of_no_sequence_are_zero_with_lse_of_the_sink(
    kernel: str, dtype: str, sinks: str | None
) -> None:
    """Rows before the first sequence, after the last one, and all where there is none."""
    q, k, v = (rand(300, heads, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    call: dict[str, Any] = {"sinks": rand(4, seed=1, dtype=sinks)} if sinks else {}
    for ends in ([5, 70, 70, 190], [300, 300], [0, 0]):
        call["cu_seqlens_q"] = int32(ends)
        call["cu_seqlens_k"] = int32([7 * i for i in range(len(ends))])
        out, lse = attend_and_check(kernel, q, k, v, out=torch.full_like(q, NAN), **call)
        outside = torch.ones(300, dtype=torch.bool)
        outside[ends[0] : ends[-1]] = False
        assert torch.equal(out[outside], torch.zeros_like(out[outside]))
        expected = call["sinks"][:, None] if sinks else torch.full((4, 1), -math.inf)
        assert torch.equal(lse[:, outside], expected.expand(4, int(outside.sum())))


@each_kernel
def test_without_any_sequence_every_row_is_zero(kernel: str) -> None:
    q, k, v = (rand(70, heads, 64, seed=heads, dtype=KERNELS[kernel][0]) for heads in (4, 2, 2))
    none = int32([0])
    for sinks in (None, rand(4, seed=1)):
        out, lse = archflash.attention(
            q, k, v, implementation=kernel, out=torch.full_like(q, NAN), sinks=sinks,
            cu_seqlens_q=none, cu_seqlens_k=none, return_lse=True,
        )  # fmt: skip
        assert torch.equal(out, torch.zeros_like(out))
        expected = torch.full((4, 1), -math.inf) if sinks is None else sinks[:, None]
        assert torch.equal(lse, expected.expand(4, 70))


def test_rows_of_no_sequence_are_zero_where_keys_are_split() -> None:
    q, k, v = (rand(20, heads, 64, seed=heads, dtype="bfloat16") for heads in (4, 2, 2))
    k, v = (x.repeat(20, 1, 1) for x in (k, v))
    call = {"cu_seqlens_q": int32([3, 9, 11]), "cu_seqlens_k": int32([0, 300, 400])}
    out, lse = attend("blackwell_dc", q, k, v, out=torch.full_like(q, NAN), num_splits=2, **call)
    assert_close(out, lse, q, k, v, **call)
    assert torch.equal(out[11:], torch.zeros_like(out[11:]))
    assert bool((lse[:, :3] == -math.inf).all())


@each_kernel_and_dtype
@pytest.mark.parametrize(
    "hint", [(130, 129), (4096, 4096), (1, 1), (0, 0)], ids=["exact", "large", "small", "zero"]
)
def test_max_seqlen_is_a_hint_and_never_a_bound_on_memory(
    kernel: str, dtype: str, hint: tuple[int, int]
) -> None:
    (q, k, v), ends = packed(*SEQUENCES["unequal"], dtype)
    call: dict[str, Any] = {"causal": True, **ends}
    out = torch.full_like(q, NAN)
    # Reads and writes that leave the tensors, and rows that two CTAs write, would be found.
    for number, mode in enumerate(MODES[: 1 if kernel in ONE_OF_FOUR else None]):
        run = sim.run(
            q, k, v, implementation=kernel, mode=mode, seed=number, return_lse=True, out=out,
            max_seqlen_q=hint[0], max_seqlen_k=hint[1], **call,
        )  # fmt: skip
        assert not unexplained(kernel, run.report), run.report
    if hint[0] >= 130 and hint[1] >= 129:
        assert run.lse is not None
        assert_close(out, run.lse, q, k, v, **call)


@each_kernel_and_dtype
def test_nan_in_a_packed_neighbour_never_matters(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype)
    clean, _ = attend(kernel, q, k, v, **ends)
    k[63:128] = NAN
    v[63:128] = NAN
    out, lse = attend_and_check(kernel, q, k, v, **ends)
    assert torch.equal(out[:63], clean[:63])
    assert torch.equal(out[128:], clean[128:])
    assert bool(out[63:128].isnan().all())
    assert bool(lse[:, 63:128].isnan().all())


@each_kernel_and_dtype
def test_rows_after_the_last_sequence_never_matter(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype, spare=70)
    total = sum(lengths)
    out = torch.full_like(q, NAN)
    run = sim.run(q, k, v, implementation=kernel, causal=True, out=out, return_lse=True, **ends)
    assert not unexplained(kernel, run.report), run.report
    assert torch.equal(out[total:], torch.zeros_like(out[total:]))
    assert run.lse is not None
    lse = run.lse[:, :total]
    assert_close(out[:total], lse, q[:total], k[:total], v[:total], causal=True, **ends)


@each_kernel
@pytest.mark.parametrize(
    "wrong",
    [(0, 63, 5000, 6000), (-900, -5, 64, 168), (0, 100, 50, 168), (1 << 30, 1 << 30, 3, 1)],
    ids=["beyond", "negative", "decreasing", "huge"],
)
def test_wrong_cu_seqlens_never_leave_the_tensors(kernel: str, wrong: tuple[int, ...]) -> None:
    (q, k, v), ends = packed((63, 65, 40), (63, 65, 40), KERNELS[kernel][-1])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        call = {**ends, name: int32(list(wrong))}
        run = sim.run(q, k, v, implementation=kernel, check=False, **call)
        # Overlapping sequences may make two CTAs write a row; nothing else may be wrong.
        wrong_ones = unexplained(kernel, run.report)
        assert all(f.kind == "race" and "CTA" in f.message for f in wrong_ones), run.report


# --- every compiled kernel, and the tiles that GPUs with more or less shared memory get ---

GPUS = {"A100": 163, "RTX 4090": 99, "H200": 227, "RTX 5090": 99}  # KB of shared memory for a CTA
ONLY_ON = {"blackwell_dc": {"B200": 227}}
# Batch, queries, keys, causal.
SHAPES = {
    "few": (1, 33, 65, True),
    "some": (2, 100, 150, True),
    "many": (1, 137, 150, True),
    "most": (2, 137, 150, True),
    "unmasked": (1, 137, 150, False),
    "rounds": (2, 300, 290, True),
}
SHAPES_OF = {
    "ada": ("few", "many", "unmasked"),  # one tile is for unmasked calls only
    "blackwell_consumer": ("few", "some", "most"),  # larger tiles, and some in between
    "blackwell_dc": ("few", "rounds"),  # one CTA goes from tile to tile
}
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


def capability_of(gpu: str) -> tuple[int, int]:
    known = _native.find_known_device(gpu)
    assert known is not None
    return known.device.capability


def inputs_of(shape: str, dims: tuple[int, int], dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, nq, nk, _ = SHAPES[shape]
    return qkv(nq, nk, *dims, dtype=dtype, batch=batch)


def variant_plan(
    kernel: str, gpu: str, dtype: str, dims: tuple[int, int], shape: str
) -> _native.LaunchPlan:
    """The plan for a call that fills the GPU, or does not: all but "few" see one with one SM."""
    q, k, v = inputs_of(shape, dims, dtype)
    plan = archflash.explain(
        q, k, v, device=gpu, implementation=kernel, causal=SHAPES[shape][-1], return_lse=True
    ).plan
    assert plan is not None
    fields = plan.device.to_dict() | ({"sm_count": 1} if shape != "few" else {})
    made = _native.plan(kernel, plan.problem, _native.Device.from_dict(fields))
    assert isinstance(made, _native.LaunchPlan)
    return made


# One tile of ada is for calls of many rows only.
TALL = [("ada", "RTX 4090", dtype, (128, 128), "rounds") for dtype in ("float16", "bfloat16")]
VARIANTS = [
    pytest.param(
        kernel, gpu, dtype, dims, shape, id=f"{kernel}-{gpu}-{dtype}-d{dims[0]}-{dims[1]}-{shape}"
    )
    for kernel, gpu, dtype, dims, shape in [
        (kernel, gpu, dtype, dims, shape)
        for kernel, dtypes in KERNELS.items()
        for gpu in ONLY_ON.get(kernel, GPUS)
        if serves(kernel, capability_of(gpu))
        for dtype in dtypes
        for dims in HEAD_DIMS
        for shape in SHAPES_OF.get(kernel, ("few", "many"))
    ]
    + TALL
]


@pytest.mark.parametrize(("kernel", "gpu", "dtype", "dims", "shape"), VARIANTS)
def test_the_tiles_for_every_gpu_agree_with_float64(
    kernel: str, gpu: str, dtype: str, dims: tuple[int, int], shape: str
) -> None:
    plan = variant_plan(kernel, gpu, dtype, dims, shape)
    assert plan.to_dict()["launches"][0]["shared_bytes"] <= ONLY_ON.get(kernel, GPUS)[gpu] * 1024
    q, k, v = inputs_of(shape, dims, dtype)
    mode = MODES[(HEAD_DIMS.index(dims) + len(shape)) % len(MODES)]
    call: dict[str, Any] = {"causal": SHAPES[shape][-1]}
    run = sim.run(
        q, k, v, implementation=kernel, mode=mode, seed=1, plan=plan, return_lse=True, **call
    )
    assert not unexplained(kernel, run.report), run.report
    assert run.lse is not None
    assert_close(run.out, run.lse, q, k, v, **call)


@each_kernel
def test_the_tiles_above_are_every_compiled_kernel(kernel: str) -> None:
    ran = set()
    for case in VARIANTS:
        if case.values[0] == kernel:
            plan = variant_plan(*case.values)  # type: ignore[arg-type]
            ran |= {launch["kernel"] for launch in plan.to_dict()["launches"]}
    compiled: set[str] = set()
    for file in (resources.files("archflash") / "_kernels" / kernel).iterdir():
        if file.name.endswith(".json"):
            for entries in json.loads(file.read_text()).values():
                compiled |= set(entries)
    # FP8: test_ada.py, test_fp8_by_tma.py; int8: test_ada_int8.py; pairs: test_blackwell_dc.py.
    here = re.compile(r"(?!blackwell_dc_.*_pair$).*_attention_fwd_(f32|f16|bf16)_(?!int8)")
    assert ran == {name for name in compiled if here.match(name)}


# --- the public way in ---


def test_attention_runs_forced_kernels_on_the_simulator_and_says_so_once() -> None:
    _attention._announced.clear()
    q, k, v = (rand(1, 2, n, 32, seed=n) for n in (20, 30, 30))
    with pytest.warns(UserWarning, match="PTX simulator, as on A100"):
        out = archflash.attention(q, k, v, implementation="simt", causal=True)
    expected, _ = reference.attention(q, k, v, causal=True)
    assert reference.check(out, expected, reference.baseline(q, k, v, causal=True)).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, lse = archflash.attention(
            q, k, v, implementation="simt", causal=True, return_lse=True
        )
        with archflash.force("simt"):
            assert torch.equal(archflash.attention(q, k, v, causal=True), out)
    assert torch.equal(again, out)
    assert lse.shape == (1, 2, 20)
    decision = archflash.explain(q, k, v, implementation="simt")
    assert "simulator" in decision.why
    assert decision.device is not None
    assert decision.device.name == "A100"
    assert archflash.explain(q, k, v).chosen == "torch"


def test_the_simulated_gpu_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(33, 65, 256, dtype="bfloat16")
    for name, kilobytes in GPUS.items():
        monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", name)
        run = sim.run(q, k, v, implementation="ampere", return_lse=True)
        assert run.plan.device.name == name
        assert run.plan.device.shared_per_block == kilobytes * 1024
        assert run.lse is not None
        assert_close(run.out, run.lse, q, k, v)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "Riva 128")
    with pytest.raises(archflash.ForcedImplementationError, match="Riva 128"):
        archflash.attention(q, k, v, implementation="ampere")


def test_too_much_work_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    q = rand(1, 4, 4096, 64, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", "1")
    with pytest.raises(archflash.LaunchError, match=r"more than the limit of 1 s.*SIM_LIMIT"):
        archflash.attention(q, q, q, implementation="simt")


@pytest.mark.parametrize("given", ["soon", "nan", "-NaN", "-1", "-inf", "60 s", " "])
def test_a_limit_that_is_no_number_of_seconds_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = rand(1, 1, 8, 16, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", given)
    with pytest.raises(ValueError, match=f"ARCHFLASH_SIM_LIMIT={given} is no number of seconds"):
        archflash.attention(q, q, q, implementation="simt")


@pytest.mark.parametrize("given", ["inf", "1e400", "", "0.5"])
def test_a_limit_may_be_any_number_of_seconds_or_none(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = rand(1, 1, 8, 16, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", given)
    assert archflash.attention(q, q, q, implementation="simt").isfinite().all()
    assert _attention.limit_seconds() == {"": 60.0, "0.5": 0.5}.get(given, math.inf)


def test_reports_count_instructions_transactions_conflicts_and_waits() -> None:
    q = rand(1, 1, 64, 64, seed=0, dtype="bfloat16")
    report = sim.run(q, q, q, implementation="ampere").report
    assert report.ctas == 1
    assert report.instructions["matrix"] > 0
    assert report.total_instructions == sum(report.instructions.values())
    assert report.transactions["global"] >= 4 * 64 * 64 * 2 / 32
    assert report.transactions["shared"] > 0
    loads = {name: counts for name, counts in report.bank_conflicts.items() if "ldmatrix" in name}
    assert loads
    # The swizzle is there for this.
    assert all(wavefronts == ideal for wavefronts, ideal in loads.values())
    assert report.barrier_waits > 0
    assert "ldmatrix" in str(report.opcodes)


@pytest.mark.parametrize(
    ("implementation", "device"),
    [("ampere", "A100"), ("ada", "H100"), ("blackwell_consumer", "RTX 5090")],
)
@pytest.mark.parametrize(("rows", "keys", "options"), [(5, 7, {}), (70, 9, {"q_offset": -40})])
def test_rows_that_pass_through_q_wait_for_all_that_read_it(
    implementation: str, device: str, rows: int, keys: int, options: dict[str, int]
) -> None:
    q, k = torch.randn(1, 2, rows, 64).half(), torch.randn(1, 1, keys, 64).half()
    run = sim.run(q, k, k, implementation=implementation, device=device, causal=True, **options)
    assert not run.report.findings, run.report
