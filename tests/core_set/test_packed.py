"""Packed sequences: lengths of every kind, hints, and rows that belong to no sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from .checks import assert_close
from .executors import executor

NAN = math.nan
on = executor()
each_kernel = pytest.mark.parametrize("kernel", on.kernels())
each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())

LAST, LONG, TOKENS, MANY = on.pick(simulator=(130, 100, 20, 60), gpu=(200, 200, 40, 200))
SEQUENCES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": on.pick(simulator=((70,), (139,)), gpu=((113,), (239,))),
    "unequal": ((63, 64, 65, LAST), (129, 1, 65, 40)),
    "single-tokens": ((1,) * TOKENS, (1,) * TOKENS),
    "decode": ((1,) * 5, (1, on.pick(simulator=199, gpu=799), 64, 65, 128)),
    "empty-among-others": ((0, 5, 0, 0, 70, 0), (9, 5, 0, 3, LONG, 0)),
    "queries-without-keys": ((7, 64, 30), (0, 80, 0)),
    "no-query-at-all": ((0, 0), (5, 6)),
    "no-key-at-all": ((5, 6), (0, 0)),
    "many": (tuple(i * 7 % 5 for i in range(MANY)), tuple(i * 5 % 7 for i in range(MANY))),
}


def packed(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], dtype: str, spare: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """(T, H, D) tensors, with rows of NaN after the last sequence, and the cu_seqlens."""
    totals = (sum(q_lengths), sum(k_lengths), sum(k_lengths))
    tensors = []
    for seed, (total, heads) in enumerate(zip(totals, (4, 2, 2), strict=True)):
        rows = on.rand(total, heads, 64, seed=seed, dtype=dtype)
        tensors.append(torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, spare), value=NAN))
    ends = {"cu_seqlens_q": on.cu_seqlens(q_lengths), "cu_seqlens_k": on.cu_seqlens(k_lengths)}
    return tensors, ends


def masks_of(kernel: str, dtype: str, name: str) -> list[bool]:
    """Causal or not: on the simulator the types of a kernel take turns, as they share code."""
    types = [of for of in on.kernels_and_dtypes() if of[0] == kernel]
    if len(types) == 1 or on.pick(simulator=False, gpu=True):
        return [False, True]
    return [(list(SEQUENCES).index(name) + (dtype == "bfloat16")) % 2 == 0]


@pytest.mark.parametrize(
    ("kernel", "dtype", "name", "causal"),
    [
        pytest.param(
            *of, name, causal, id=f"{of[0]}-{of[1]}-{name}-{'causal' if causal else 'full'}"
        )
        for of in on.kernels_and_dtypes()
        for name in SEQUENCES
        for causal in masks_of(*of, name)
    ],
)
def test_packed_sequences(kernel: str, dtype: str, name: str, causal: bool) -> None:
    tensors, ends = packed(*SEQUENCES[name], dtype)
    on.attend_and_check(kernel, *tensors, causal=causal, **ends)


@each_kernel_and_dtype
@pytest.mark.parametrize("hint", ["exact", "large", "small", "zero"])
def test_max_seqlen_is_a_hint_and_never_a_bound_on_memory(
    kernel: str, dtype: str, hint: str
) -> None:
    (q, k, v), ends = packed(*SEQUENCES["unequal"], dtype)
    longest = {"exact": (LAST, 129), "large": (4096, 4096), "small": (1, 1), "zero": (0, 0)}[hint]
    hints = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
    call: dict[str, Any] = {"causal": True, **hints, **ends}
    out, lse = on.survive(kernel, q, k, v, **call)
    if hint in ("exact", "large"):
        assert_close(out, lse, q, k, v, **call)


@each_kernel_and_dtype
def test_nan_in_a_packed_neighbour_never_matters(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype)
    clean, _ = on.attend(kernel, q, k, v, **ends)
    k[63:128] = NAN
    v[63:128] = NAN
    out, lse = on.attend_and_check(kernel, q, k, v, **ends)
    assert torch.equal(out[:63], clean[:63])
    assert torch.equal(out[128:], clean[128:])
    assert bool(out[63:128].isnan().all())
    assert bool(lse[:, 63:128].isnan().all())


@each_kernel
@pytest.mark.parametrize(
    "wrong",
    [(0, 63, 5000, 6000), (-900, -5, 64, 168), (0, 100, 50, 168), (1 << 30, 1 << 30, 3, 1)],
    ids=["beyond", "negative", "decreasing", "huge"],
)
def test_wrong_cu_seqlens_never_leave_the_tensors(kernel: str, wrong: tuple[int, ...]) -> None:
    (q, k, v), ends = packed((63, 65, 40), (63, 65, 40), on.dtypes_of(kernel)[-1])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        # Sequences that overlap may make two CTAs write a row; nothing else may be wrong.
        on.survive(kernel, q, k, v, may_race=True, **{**ends, name: on.int32(*wrong)})
    if on.name == "gpu":  # an access outside would spoil the context
        on.attend_and_check(kernel, q, k, v, **ends)


# --- rows of no sequence ---


@each_kernel_and_dtype
def test_rows_after_the_last_sequence_never_matter(kernel: str, dtype: str) -> None:
    lengths = (63, 65, 40)
    (q, k, v), ends = packed(lengths, lengths, dtype, spare=70)
    total = sum(lengths)
    out, lse = on.survive(kernel, q, k, v, causal=True, **ends)
    assert torch.equal(out[total:], torch.zeros_like(out[total:]))
    rows = [x[:total] for x in (q, k, v)]
    assert_close(out[:total], lse[:, :total], *rows, causal=True, **ends)


@each_kernel_and_dtype
@pytest.mark.parametrize("sinks", [None, "float32"])
def test_rows_of_no_sequence_are_zero_with_lse_of_the_sink(
    kernel: str, dtype: str, sinks: str | None
) -> None:
    """Rows before the first sequence, after the last one, and all where there is none."""
    q, k, v = (on.rand(300, heads, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    call: dict[str, Any] = {"sinks": on.rand(4, seed=1, dtype=sinks)} if sinks else {}
    for ends in ([5, 70, 70, 190], [300, 300], [0, 0]):
        call["cu_seqlens_q"] = on.int32(*ends)
        call["cu_seqlens_k"] = on.int32(*(7 * i for i in range(len(ends))))
        out, lse = on.attend_and_check(kernel, q, k, v, **call)
        outside = torch.ones(300, dtype=torch.bool, device=on.device)
        outside[ends[0] : ends[-1]] = False
        assert torch.equal(out[outside], torch.zeros_like(out[outside]))
        of_no_key = call["sinks"] if sinks else on.tensor([-math.inf] * 4)
        assert torch.equal(lse[:, outside], of_no_key[:, None].expand(4, int(outside.sum())))


@each_kernel
def test_without_any_sequence_every_row_is_zero(kernel: str) -> None:
    dtype = on.dtypes_of(kernel)[0]
    q, k, v = (on.rand(70, heads, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    none = {"cu_seqlens_q": on.int32(0), "cu_seqlens_k": on.int32(0)}
    for sinks in (None, on.rand(4, seed=1)):
        out, lse = on.attend(kernel, q, k, v, sinks=sinks, **none)
        assert torch.equal(out, torch.zeros_like(out))
        of_no_key = on.tensor([-math.inf] * 4) if sinks is None else sinks
        assert torch.equal(lse, of_no_key[:, None].expand(4, 70))
