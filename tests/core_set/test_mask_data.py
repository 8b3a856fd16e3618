"""Masks as data: attn_mask, key_ranges, alibi_slopes and block_mask, alone and with one another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import masks

from .executors import executor
from .pairs import all_pairs, row_id

on = executor()

# The kernels that take masks, each with the dtypes for which it does.
KERNELS = [
    (kernel, dtype)
    for kernel in on.kernels("attn_mask")
    for dtype in on.dtypes_of(kernel)
    if (dtype == "float32") == (kernel == "simt")
]
each_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS)

FACTORS: dict[str, list[Any]] = {
    "attn_mask": [None, "bool", "own", "float32", "keys", "odd"],
    "ranges": [None, "one", "per-head"],
    "alibi": [None, "heads", "batches"],
    "blocks": [None, "summary", "table"],
    "dims": [(64, 64), (40, 72), (128, 128), (192, 128), (512, 320)],
    "lengths": on.pick(
        simulator=[(9, 140), (70, 101), (33, 66)], gpu=[(9, 799), (113, 203), (300, 290)]
    ),
    "heads": [(2, 2), (3, 1)],
    "position": ["none", "causal", "window", "offset"],
    "more": [None, "softcap", "sinks", "scale"],
    "splits": [None, 2],
}


def attn_mask_of(kind: str, dtype: str, batch: int, heads: int, nq: int, nk: int) -> Tensor:
    """A mask that hides every third score or so, all keys of row 2, and none of row 3."""
    noise = on.rand(batch, heads, nq, nk, seed=5)
    keep = noise > -0.5
    keep[:, :, 2 % nq] = False
    keep[:, :, 3 % nq] = True
    if kind == "bool":
        return keep
    if kind == "keys":  # padding: the same for all heads and rows
        lengths = on.int32(*(nk - 7 * (i + 1) for i in range(batch)))
        return (torch.arange(nk, device=on.device) < lengths[:, None])[:, None, None]
    if kind == "odd":  # rows that lie a stride apart, keys that lie two apart, one head for all
        view = torch.zeros(nq, 2 * nk + 1, device=on.device)[:, 1::2]
        view.copy_(torch.where(keep[0, 0], noise[0, 0], -math.inf))
        return view
    added = torch.where(keep, 2 * noise, -math.inf)
    return added.to(getattr(torch, dtype)) if kind == "own" else added


def ranges_of(kind: str, batch: int, heads: int, nq: int, nk: int) -> Tensor:
    """Ranges in any order, some empty, overlapping or beyond the keys."""
    if kind == "one":
        first = torch.arange(nq) * nk // nq - 20
        return torch.stack([first, first + 45], -1).int()[None, None, :, None].to(on.device)
    shape = (batch, heads, nq, 3, 2)
    generator = torch.Generator().manual_seed(3)
    made = torch.randint(-10, nk + 10, shape, generator=generator, dtype=torch.int32)
    made[:, :, 1] = 0  # a row that sees nothing
    return made.to(on.device)


def masks_of_row(row: dict[str, Any], dtype: str, batch: int) -> dict[str, Any]:
    (nq, nk), (heads, _) = row["lengths"], row["heads"]
    call: dict[str, Any] = {}
    if row["attn_mask"]:
        call["attn_mask"] = attn_mask_of(row["attn_mask"], dtype, batch, heads, nq, nk)
    if row["ranges"]:
        call["key_ranges"] = ranges_of(row["ranges"], batch, heads, nq, nk)
    if row["alibi"]:
        slopes = on.rand(batch, heads, seed=6).abs() / 8
        call["alibi_slopes"] = slopes if row["alibi"] == "batches" else slopes[0]
    rows, keys = -(-nq // 64), -(-nk // 64)
    if row["blocks"] == "table":
        call["block_mask"] = on.rand(1, heads, rows, keys, seed=7) > -0.3
    elif row["blocks"] == "summary" and row["attn_mask"] not in (None, "keys"):
        call["block_mask"] = archflash.summarize_mask(call["attn_mask"])
    return call


def options_of_row(row: dict[str, Any], batch: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": (50, 9)},
        "offset": {"causal": True, "q_offset": on.int32(*(40 - 9 * i for i in range(batch)))},
    }[row["position"]]
    more = {
        None: {},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": on.rand(row["heads"][0], seed=9)},
        "scale": {"scale": -0.2},
    }
    return {**options, **more[row["more"]]}


ROWS = all_pairs(FACTORS)


def dims_of(row: dict[str, Any], kernel: str) -> tuple[int, int]:
    """simt has masks for head dimensions up to 256 only."""
    d, dv = row["dims"]
    return (d, dv) if kernel == "ampere" else (min(d, 256), min(dv, 256))


# The simulator runs each row with one of the kernels.
CASES = [
    (kernel, dtype, row)
    for number, row in enumerate(ROWS)
    for place, (kernel, dtype) in enumerate(KERNELS)
    if on.name == "gpu" or number // 5 % len(KERNELS) == place
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "row"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{row_id(case[2])}") for case in CASES],
)
def test_masks_with_one_another_agree_with_float64(
    kernel: str, dtype: str, row: dict[str, Any]
) -> None:
    batch = 2
    call = masks_of_row(row, dtype, batch) | options_of_row(row, batch)
    if not call.keys() & {"attn_mask", "key_ranges", "alibi_slopes", "block_mask"}:
        pytest.skip("no mask in this row")
    if row["splits"] and kernel != "simt":
        call["num_splits"] = row["splits"]
    dims = dims_of(row, kernel)
    q, k, v = on.qkv(*row["lengths"], *dims, dtype=dtype, batch=batch, heads=row["heads"])
    on.attend_and_check(kernel, q, k, v, schedules=[len(row_id(row)) % 4], **call)


@each_kernel
def test_the_rows_above_run_every_kernel_with_masks(kernel: str, dtype: str) -> None:
    ran = set()
    for _, _, row in [case for case in CASES if case[:2] == (kernel, dtype)]:
        d, dv = dims_of(row, kernel)
        q, k, v = (
            torch.empty(1, 1, 8, dim, dtype=getattr(torch, dtype), device="meta")
            for dim in (d, d, dv)
        )
        ranges = torch.empty(1, 1, 8, 1, 2, dtype=torch.int32, device="meta")
        device = "H200" if kernel == "hopper" else "A100"
        plan = archflash.explain(
            q, k, v, key_ranges=ranges, device=device, implementation=kernel
        ).plan
        assert plan is not None
        assert plan.tile is not None
        ran.add(plan.tile.name)
    wide = {"d512_masked"} if kernel == "ampere" else set()
    assert ran == {"d64_masked", "d128_masked", "d256_masked", *wide}


@each_kernel
@pytest.mark.parametrize("kind", ["mask", "ranges", "blocks"])
def test_head_dims_of_256_with_each_kind_of_mask(kernel: str, dtype: str, kind: str) -> None:
    nq, nk = 20, 70
    call = {
        "mask": {"attn_mask": attn_mask_of("own", dtype, 1, 2, nq, nk)},
        "ranges": {"key_ranges": ranges_of("per-head", 1, 2, nq, nk)},
        "blocks": {"block_mask": on.tensor([[[[1, 0]]]], torch.int8)},
    }[kind]
    on.attend_and_check(kernel, *on.qkv(nq, nk, 256, dtype=dtype), schedules=[1], **call)


@each_kernel
def test_rows_of_minus_infinity_are_zero_and_rows_of_the_lowest_number_are_the_mean(
    kernel: str, dtype: str
) -> None:
    kind = getattr(torch, dtype if dtype != "float16" else "float32")
    mask = torch.zeros(3, 70, dtype=kind, device=on.device)
    mask[0] = -math.inf
    mask[1] = torch.finfo(kind).min
    q, k, v = on.qkv(3, 70, dtype=dtype)
    out, lse = on.attend(kernel, q, k, v, attn_mask=mask)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert bool((lse[:, :, 0] == -math.inf).all())
    torch.testing.assert_close(out[:, :, 1].float(), v.float().mean(2), atol=1e-2, rtol=1e-2)
    assert bool((lse[:, :, 1] < -2e38).all())
    assert bool(lse[:, :, 1:].isfinite().all())
    plain, _ = on.attend(kernel, q[:, :, 2:], k, v)
    torch.testing.assert_close(out[:, :, 2:], plain, atol=1e-2, rtol=1e-2)


@each_kernel
def test_keys_that_are_not_finite_reach_only_the_rows_that_see_them(
    kernel: str, dtype: str
) -> None:
    q, k, v = on.qkv(20, 90, dtype=dtype)
    k[:, :, 5] = math.nan
    ranges = on.int32(6, 80).reshape(1, 1, 1, 1, 2).repeat(1, 1, 20, 1, 1)
    ranges[:, :, 7, :, 0] = 5
    out, _ = on.attend(kernel, q, k, v, key_ranges=ranges)
    touched = out.isnan().any(-1)[0, 0]
    assert touched.tolist() == [row == 7 for row in range(20)]


@each_kernel
def test_alibi_of_packed_sequences_aligns_each_to_its_bottom_right(kernel: str, dtype: str) -> None:
    lengths_q, lengths_k = (30, 0, 5), (60, 7, 40)
    q, k, v = on.qkv(sum(lengths_q), sum(lengths_k), dtype=dtype, heads=(2, 1))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    slopes = on.rand(3, 2, seed=2).abs()
    on.attend_and_check(
        kernel, q, k, v, alibi_slopes=slopes, causal=True, schedules=[0],
        cu_seqlens_q=on.cu_seqlens(lengths_q), cu_seqlens_k=on.cu_seqlens(lengths_k),
    )  # fmt: skip


@each_kernel
def test_packed_heads_have_masks_of_their_own(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(5, 190, dtype=dtype, heads=(3, 1))
    blocks = torch.eye(3, device=on.device, dtype=torch.bool)[None, :, None]
    begin = on.int32(10, 70, 130).reshape(1, 3, 1, 1)
    ranges = torch.stack([begin, begin + 40], -1)
    for call in ({"block_mask": blocks}, {"key_ranges": ranges}):
        on.attend_and_check(kernel, q, k, v, schedules=[3], **call)


@each_kernel
def test_alibi_alone_changes_blocks_that_every_row_sees(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(64, 128, dtype=dtype)
    on.attend_and_check(kernel, q, k, v, alibi_slopes=on.tensor([0.5, 0.1]), schedules=[0])


@pytest.mark.skipif(on.name == "gpu", reason="the simulator counts instructions")
@each_kernel
@pytest.mark.parametrize("kind", ["ranges", "blocks", "both"])
def test_blocks_of_keys_that_no_row_sees_are_not_read(kernel: str, dtype: str, kind: str) -> None:
    from archflash import sim

    nq, nk = 64, 1024
    q, k, v = on.qkv(nq, nk, dtype=dtype, heads=(1, 1))
    # Every fourth block lies in a range, and the table has every second one, but only one of those.
    ranges = on.int32(200, 210, 450, 460, 710, 720, 970, 971).reshape(1, 1, 1, 4, 2)
    blocks = torch.zeros(1, 1, 1, nk // 64, dtype=torch.int8, device=on.device)
    blocks[..., 4::2] = blocks[..., 3] = 2
    call: dict[str, Any] = {}
    if kind != "blocks":
        call["key_ranges"] = ranges
    if kind != "ranges":
        call["block_mask"] = blocks
    sparse = sim.run(
        q, k, v, implementation=kernel, num_splits=1 if kernel != "simt" else None, **call
    )
    most = {"ranges": 4, "blocks": 7, "both": 1}[kind]
    if kernel == "hopper":  # one instruction copies a block of K, a block of V or Q
        opcodes = sparse.report.opcodes.items()
        loads = sum(count for name, count in opcodes if name.startswith("cp.async.bulk.tensor"))
        assert loads == 2 * most + 1
        return
    dense = sim.run(q, k, v, implementation=kernel, num_splits=1 if kernel != "simt" else None)
    copies, of_all = (
        x.report.opcodes["cp.async.cg.shared.global"] for x in (sparse, dense)
    )  # of K and V of each block, and of Q once
    assert copies * (2 * nk // 64 + 1) == of_all * (2 * most + 1)


@each_kernel
def test_documents_in_causal_text_agree_with_separate_calls(kernel: str, dtype: str) -> None:
    lengths = (30, 50, 20)
    q, k, v = on.qkv(100, 100, dtype=dtype)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(on.device)
    out, _ = on.attend_and_check(
        kernel, q, k, v, causal=True, key_ranges=masks.documents(ids), schedules=[2]
    )
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, _ = on.attend(
            kernel, q[:, :, part], k[:, :, part], v[:, :, part], causal=True, schedules=[2]
        )
        torch.testing.assert_close(out[:, :, part], alone, atol=2e-2, rtol=2e-2)
        start += length
