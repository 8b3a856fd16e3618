"""hopper's kernels for a dense attn_mask or key_ranges, which read a summary of it that a launch
before them makes. An added mask of each head has none, nor have calls with few keys. Up to 64
columns added masks have kernels of their own, and up to 96 those of each head and sequence that TMA
cannot read. Ranges of few row tiles go to others (test_mask_data.py), so plans are made for a GPU
with one SM.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from ..replanned import plan_with
from .checks import same_bits
from .executors import executor

on = executor()

NAME = "hopper"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
DIMS = {
    "d64_dense": (64, 64), "d64_dense_short": (64, 64), "d64_added": (64, 64),
    "d64_added_short": (64, 64), "d128_dense": (128, 128),
    "d256_dense": (144, 200), "d64_wide": (64, 64), "d128_wide": (128, 128),
    "d256_wide": (144, 200), "d64_shared": (64, 64), "d64_windows": (64, 64),
    "d96_windows": (80, 72),
}  # fmt: skip
OF_RANGES = ("d64_dense", "d128_dense")
every_tile = pytest.mark.parametrize("tile", ["d64_dense_short", "d128_dense", "d256_dense"])
ADDED = ("d64_added", "d64_added_short")  # for a mask of each head


def plan_on(sms: int, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    facts = {"sm_count": sms}
    return plan_with(facts, q, k, v, device="H200", implementation=NAME, **call)


def tile_for(tile: str, mask: Tensor | None, **call: Any) -> str:
    """The tile with which a call is served whose other masks have `tile`."""
    added = mask is not None and mask.dtype in (torch.float16, torch.bfloat16)
    folds = "softcap" not in call and call.get("scale", 1.0) > 0
    if not added or not folds or tile != "d64_dense_short":
        return tile
    assert mask is not None
    of_heads = mask.ndim == 4 and mask.shape[1] > 1
    return "d64_added" if of_heads else "d64_shared"


def check(
    tile: str, q: Tensor, k: Tensor, v: Tensor, schedules: range, **call: Any
) -> tuple[Tensor, Tensor]:
    plan = plan_on(1, q, k, v, **call)
    first, last = plan.to_dict()["launches"]
    mask = call.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool and mask.shape[1] > 1:
        assert first["kernel"].startswith("hopper_clear_counter_")
    else:
        is_wide = mask is not None and mask.dtype == torch.float32
        names = ["ranges"] if mask is None else ["wide_mask"] if is_wide else ["mask", "low_mask"]
        assert any(f"_summarize_{name}_" in first["kernel"] for name in names)
    assert last["kernel"].endswith(tile_for(tile, mask, **call))
    return on.attend_and_check(NAME, q, k, v, plan=plan, schedules=schedules, **call)


def keep_of(nq: int, nk: int, heads: int = 1) -> Tensor:
    """Noise, blocks that are hidden or seen as a whole, and a row that sees nothing."""
    keep = on.rand(1, heads, nq, nk, seed=5) > -0.5
    keep[:, :, 64:128, 64:128] = True
    keep[:, :, 64:192, :64] = False
    keep[:, :, 192:, 128:] = False
    keep[:, :, 2] = False
    return keep


MASKS = (
    "bool", "odd", "heads", "added", "hidden", "lowest", "added-heads", "hidden-heads",
    "lowest-heads", "nothing", "everything",
)  # fmt: skip


def mask_of(kind: str, dtype: str, nq: int, nk: int) -> Tensor:
    keep = keep_of(nq, nk)
    if kind == "bool":
        return keep
    if kind == "odd":  # keys that lie two bytes apart
        view = torch.zeros(nq, 2 * nk, device=on.device, dtype=torch.bool)[:, ::2]
        view.copy_(keep[0, 0])
        return view
    if kind == "heads":
        return keep_of(nq, nk, heads=2)
    if kind in ("nothing", "everything"):
        return torch.full_like(keep, kind == "everything")
    # Rows of which TMA can take boxes: they are padded to 16 bytes.
    kind_of = getattr(torch, dtype)
    kind, _, of_heads = kind.partition("-")
    heads = 2 if of_heads else 1
    padded = torch.zeros(1, heads, nq, -(-nk // 8) * 8, device=on.device, dtype=kind_of)[..., :nk]
    padded.copy_(2 * on.rand(1, heads, nq, nk, seed=6))
    if of_heads:
        keep = keep_of(nq, nk, heads)
    if kind == "hidden":
        padded.masked_fill_(~keep, -math.inf)
    if kind == "lowest":
        padded.masked_fill_(~keep, max(torch.finfo(kind_of).min, -2e38))
    return padded


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", MASKS)
def test_each_kind_of_mask(kind: str, dtype: str) -> None:
    number = MASKS.index(kind)
    nq, nk = 260, 203
    q, k, v = on.qkv(nq, nk, 128, dtype=dtype, heads=(2, 1))
    mask = mask_of(kind, dtype, nq, nk)
    check("d128_dense", q, k, v, range(number % 4, number % 4 + 1), attn_mask=mask)


@pytest.mark.parametrize("tile", ["d64_wide", "d128_wide", "d256_wide"])
@pytest.mark.parametrize("kind", ["hidden", "lowest", "hidden-heads", "lowest-heads", "row"])
def test_elements_of_32_bits(kind: str, tile: str) -> None:
    nq, nk = 150, 203
    dtype = "float16" if "heads" in kind else "bfloat16"
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype=dtype, batch=2, heads=(2, 1))
    mask = mask_of("lowest" if kind == "row" else kind, "float32", nq, nk)
    if kind == "row":
        mask = mask[:, :, 3:4]
    check(tile, q, k, v, range(2), attn_mask=mask)


def ranges_of(kind: str, nq: int, nk: int) -> Tensor:
    """Documents of 70 keys; ranges in any order, empty, overlapping or beyond the keys, of each
    head; one range for all rows.
    """
    if kind == "documents":
        ids = torch.arange(max(nq, nk), device=on.device) // 70
        return archflash.masks.documents(ids)[:, :, :nq].clamp(max=nk)
    if kind == "one":
        return on.int32(70, nk - 3).reshape(1, 1, 1, 1, 2)
    generator = torch.Generator().manual_seed(3)
    made = torch.randint(-10, nk + 10, (1, 2, nq, 3, 2), generator=generator, dtype=torch.int32)
    made[:, :, 1] = 0  # a row that sees nothing
    made[:, :, 64:128] = torch.tensor([0, 70])  # blocks that all rows see, or none does
    return made.to(on.device)


RANGES = ("documents", "several", "one")


@pytest.mark.parametrize("tile", OF_RANGES)
@pytest.mark.parametrize("position", ["none", "causal"])
@pytest.mark.parametrize("kind", RANGES)
def test_each_kind_of_ranges(kind: str, position: str, tile: str) -> None:
    number = RANGES.index(kind)
    nq, nk = 260, 203
    dtype = ("float16", "bfloat16")[number % 2]
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype=dtype, heads=(2, 1))
    call = {"key_ranges": ranges_of(kind, nq, nk), "causal": position == "causal"}
    check(tile, q, k, v, range(number, number + 1), **call)


MORE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "offsets": {"causal": True, "q_offset": (-70, 10)},
    "softcap": {"softcap": 3.0},
    "negative-scale": {"scale": -0.2},
    "tiny-scale": {"scale": 1e-9},
}


@pytest.mark.parametrize("kind", ["bool", "hidden", "lowest", "hidden-heads", "lowest-heads"])
@pytest.mark.parametrize("more", MORE)
def test_masks_together_with_other_options(more: str, kind: str) -> None:
    nq, nk = 200, 140
    number = list(MORE).index(more)
    dtype = ("float16", "bfloat16")[number % 2]
    q, k, v = on.qkv(nq, nk, 64, dtype=dtype, batch=2, heads=(2, 2))
    mask = mask_of(kind, dtype, nq, nk)
    options = dict(MORE[more])
    if "q_offset" in options:
        options["q_offset"] = on.int32(*options["q_offset"])
    schedule = number % 4
    check("d64_dense_short", q, k, v, range(schedule, schedule + 1), attn_mask=mask, **options)


@every_tile
@pytest.mark.parametrize("kind", ["hidden", "hidden-heads"])
def test_a_cta_goes_from_tile_to_tile_in_every_schedule(kind: str, tile: str) -> None:
    q, k, v = on.qkv(300, 330, *DIMS[tile], dtype="bfloat16", heads=(2, 1))
    mask = mask_of(kind, "bfloat16", 300, 330)
    check(tile, q, k, v, range(4), attn_mask=mask, causal=True)


@every_tile
def test_keys_that_are_not_finite_reach_only_the_rows_that_see_them(tile: str) -> None:
    nq, nk = 200, 150
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype="bfloat16")
    k[:, :, 5] = math.nan
    mask = torch.ones(nq, nk, dtype=torch.bool, device=on.device)
    mask[:, 5] = False
    mask[7, 5] = True
    added = torch.zeros(1, 2, nq, 152, dtype=torch.bfloat16, device=on.device)[..., :nk]
    added.masked_fill_(~mask, -math.inf)
    for each in (mask, added[:, :1], added):
        plan = plan_on(1, q, k, v, attn_mask=each)
        assert plan.tile is not None
        assert plan.tile.name == tile_for(tile, each)
        out, _ = on.attend(NAME, q, k, v, plan=plan, attn_mask=each)
        touched = out.isnan().any(-1)[0, 0]
        assert touched.nonzero().flatten().tolist() == [7]


SLOPES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "offsets": {"q_offset": (-70, 200)},
    "window": {"window": (70, 20)},
    "softcap": {"softcap": 3.0},
    "negative-scale": {"scale": -0.2},
    "tiny-scale": {"scale": 1e-9},
    "huge": {},
}


@pytest.mark.parametrize("more", SLOPES)
def test_slopes_together_with_other_options(more: str) -> None:
    number = list(SLOPES).index(more)
    tile = OF_RANGES[number % 2]
    dtype = ("float16", "bfloat16")[number // 2 % 2]
    q, k, v = on.qkv(260, 330, *DIMS[tile], dtype=dtype, batch=2, heads=(2, 1))
    options = dict(SLOPES[more])
    if "q_offset" in options:
        options["q_offset"] = on.int32(*options["q_offset"])
    slopes = torch.tensor([[0.5, -0.25], [0.01, 1.0]], device=on.device)
    if more == "huge":
        slopes = slopes.abs() * 1e37
    plan = plan_on(1, q, k, v, alibi_slopes=slopes, **options)
    clear, launch = plan.to_dict()["launches"]
    assert clear["kernel"].startswith("hopper_clear_counter_")
    assert launch["kernel"].endswith(tile)
    on.attend_and_check(
        NAME, q, k, v, plan=plan, schedules=range(number % 4, number % 4 + 1),
        alibi_slopes=slopes, **options,
    )  # fmt: skip


def tile_of(mask: Tensor | None, heads: int = 64, nq: int = 1024, **call: Any) -> str:
    q, k, v = (
        torch.empty(2, heads, n, 128, dtype=torch.bfloat16, device="meta") for n in (nq, 96, 96)
    )
    plan = archflash.explain(
        q, k, v, device="H200", implementation=NAME, attn_mask=mask, **call
    ).plan
    assert plan is not None
    assert plan.tile is not None
    return plan.tile.name


def test_which_calls_read_a_summary() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    keep = empty(1024, 96, dtype=torch.bool)
    assert tile_of(keep) == "d128_dense"
    assert tile_of(keep[:100], nq=100, heads=2) == "d128_masked"  # few row tiles
    assert tile_of(empty(1024, 97, dtype=torch.bool)[:, 1:]) == "d128_dense"
    assert tile_of(empty(2, 1, 1, 96, dtype=torch.bool)) == "d128_dense"
    assert tile_of(keep, alibi_slopes=empty(64, dtype=torch.float32)) == "d128_masked"
    assert tile_of(keep, block_mask=empty(1, 1, 16, 2, dtype=torch.int8)) == "d128_masked"
    assert tile_of(empty(1024, 96)) == "d128_dense"
    assert tile_of(empty(1024, 96, dtype=torch.float32)) == "d128_wide"
    assert tile_of(empty(1024, 97, dtype=torch.float32)[:, :96]) == "d128_masked"  # not aligned
    ranges = empty(1, 1, 1024, 2, 2, dtype=torch.int32)
    assert tile_of(None, key_ranges=ranges) == "d128_dense"
    assert tile_of(keep, key_ranges=ranges) == "d128_masked"
    slopes = empty(64, dtype=torch.float32)
    assert tile_of(None, alibi_slopes=slopes) == "d128_dense"
    assert tile_of(empty(2, 1, 1, 96)) == "d128_dense"  # the same for all rows
    # What TMA cannot copy: rows that are not aligned, and keys that lie apart.
    assert tile_of(empty(1024, 97)[:, :96]) == "d128_dense"
    assert tile_of(empty(1024, 192)[:, ::2]) == "d128_dense"


def test_many_tiles_that_pass_many_keys_are_larger() -> None:
    """Those with 64 columns."""
    q, k, v = on.qkv(200, 520, 64, dtype="bfloat16", batch=2, heads=(2, 1))
    mask = mask_of("bool", "bfloat16", 200, 520)
    check("d64_dense", q, k, v, range(2), attn_mask=mask)
    check("d64_dense_short", q[:1], k[:1], v[:1], range(1), attn_mask=mask)


@every_tile
@pytest.mark.parametrize("kind", ["rows", "keys apart", "one row", "one row of each head"])
def test_added_masks_that_lie_as_tma_reads_none(kind: str, tile: str) -> None:
    """Rows that are not aligned, and keys that lie apart, are copied. A row for all queries is
    read by a map that repeats it.
    """
    nq, nk = 150, 72
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype="float16", batch=2, heads=(2, 2))
    shape = {"rows": (2, 1, nq, nk + 1), "keys apart": (1, 2, nk, nq), "one row": (2, 1, 1, nk)}
    mask = 2 * on.rand(*shape.get(kind, (1, 2, 1, nk)), seed=6, dtype="float16")
    mask[..., 10:15] = -math.inf
    if kind == "rows":
        mask = mask[..., 1:]
    if kind == "keys apart":
        mask = mask.transpose(-1, -2)
    plan = plan_on(1, q, k, v, attn_mask=mask)
    assert plan.kernels[-1].endswith(tile_for(tile, mask))
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(2), attn_mask=mask)


@every_tile
def test_blocks_of_lowest_numbers_are_left_out_where_rows_see_others(tile: str) -> None:
    """As transformers makes a causal mask and padding: what lies in such a block does not matter.
    Where a row of the block sees lowest numbers only, the block is computed for all of its rows.
    """
    nq, nk = 330, 520
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype="bfloat16")
    row = torch.arange(nq, device=on.device)[:, None]
    hidden = torch.arange(nk, device=on.device) > row + 40
    mask = torch.zeros(1, 1, nq, nk, dtype=torch.bfloat16, device=on.device)
    lowest_number = -2e38  # whose log-sum-exp is that of the formula
    mask.masked_fill_(hidden, lowest_number)
    mask[..., 3] = -math.inf
    check(tile, q, k, v, range(1), attn_mask=mask)
    lowest = mask.clone()
    lowest[:, :, 300] = lowest_number
    mean, _ = check(tile, q, k, v, range(1), attn_mask=lowest)
    assert (mean[0, 0, 300] - v[0, 0].float().mean(0)).abs().max() < 0.01
    # Blocks of 64 or 128 keys from 384 on are hidden for all rows, those of 64 from 384 on.
    for x in (k, v):
        x[:, :, 384:] = math.nan
    out, _ = on.attend(NAME, q, k, v, plan=plan_on(1, q, k, v, attn_mask=mask), attn_mask=mask)
    assert out.isfinite().all()
    plan = plan_on(1, q, k, v, attn_mask=lowest)
    out, _ = on.attend(NAME, q, k, v, plan=plan, attn_mask=lowest)
    whole = out.isfinite().all(-1)[0, 0]
    assert whole[:256].all()
    assert not whole[300]
    # In a causal call high elements may be hidden by position, so no block is left out.
    call = {"attn_mask": mask, "causal": True, "q_offset": nk}
    out, _ = on.attend(NAME, q, k, v, plan=plan_on(1, q, k, v, **call), **call)
    assert not out.isfinite().any()


@every_tile
def test_a_row_for_all_queries_is_summarized_and_copied_once(tile: str) -> None:
    d, dv = DIMS[tile]
    for nk in (303, 504):  # rows that TMA reads as they lie, and others
        q, k, v = on.qkv(200, nk, d, dv, dtype="bfloat16", batch=2)
        row = torch.zeros(2, 1, 1, nk, dtype=torch.bfloat16, device=on.device)
        row[..., 5] = 3.0
        row[0, ..., 290:] = torch.finfo(torch.bfloat16).min
        row[1, ..., 20:150] = -math.inf
        check(tile, q, k, v, range(1), attn_mask=row)
        plan = plan_on(1, q, k, v, attn_mask=row)
        once = plan.to_dict()["launches"][0]["grid"][0]
        rows = row.expand(2, 1, 200, nk).contiguous()
        all_rows = plan_on(1, q, k, v, attn_mask=rows)
        blocks = all_rows.to_dict()["launches"][0]["grid"][0]
        assert (once, blocks) == (2 * -(-nk // 64), 4 * once)
        assert plan.workspace_bytes < all_rows.workspace_bytes / 3


def test_few_keys_are_not_summarized() -> None:
    """An added mask of all heads, whose blocks every CTA looks at itself: some are hidden."""
    q, k, v = on.qkv(130, 200, 64, dtype="bfloat16", heads=(2, 2))
    for kind in ("hidden", "lowest"):
        mask = mask_of(kind, "bfloat16", 130, 200)
        plan = plan_on(8, q, k, v, attn_mask=mask)
        (launch,) = plan.to_dict()["launches"]
        assert launch["uses_pdl"] is False  # CTAs that do not fill the GPU would lie unevenly
        assert launch["kernel"].endswith("d64_dense_short")
        on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(2), attn_mask=mask)


@pytest.mark.parametrize("tile", ADDED)
@pytest.mark.parametrize("kind", ["noise", "hidden", "lowest", "mixed", "unaligned", "window"])
def test_added_alone(kind: str, tile: str) -> None:
    """Sums that are wrong are mended: of lowest numbers, and of NaN scores that are hidden."""
    nq, nk = 300, 200 + (kind == "unaligned")
    dtype = "float16" if kind in ("noise", "unaligned") else "bfloat16"
    q, k, v = on.qkv(nq, nk, 64, dtype=dtype, batch=2, heads=(2, 1))
    mask = 2 * on.rand(1, 2, nq, nk, seed=6, dtype=dtype)
    keep = keep_of(nq, nk, 2)
    if kind in ("hidden", "unaligned", "window"):
        mask.masked_fill_(~keep, -math.inf)
    if kind in ("lowest", "mixed"):
        mask.masked_fill_(~keep, -2e38)  # whose log-sum-exp is that of the formula
    if kind == "mixed":
        mask[:, :, ::3, 64:].masked_fill_(~keep[:, :, ::3, 64:], -math.inf)
        mask[:, 1, 70:80] += 3e4
        k[:, :, 7] = math.nan
        mask[..., 7] = -math.inf
    options = {"window": (100, 30)} if kind == "window" else {}
    sms = 7 if tile == "d64_added_short" else 1  # 8 tiles of 256 rows fill little of 14 places
    plan = plan_on(sms, q, k, v, attn_mask=mask, **options)
    assert plan.kernels[-1].endswith(tile)
    copies = any("hopper_copy_mask_" in kernel for kernel in plan.kernels)
    assert copies == (kind == "unaligned")
    clean = k.nan_to_num()
    expected = on.attend_and_check(NAME, q, clean, v, plan=plan, attn_mask=mask, **options)
    if kind == "mixed":
        assert same_bits(on.attend(NAME, q, k, v, plan=plan, attn_mask=mask)[0], expected[0])


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        ("hidden", "d64_windows"), ("mixed", "d64_windows"), ("window", "d64_windows"),
        ("shared", "d96_windows"), ("mixed", "d96_windows"),
    ],
)  # fmt: skip
def test_warps_copy_elements_of_each_head_and_sequence(kind: str, tile: str) -> None:
    """Rows of 4 bytes' alignment, up to the last element of the mask. The first tile of a head has
    rows for one warp only. Above 64 columns sequences may share the mask.
    """
    nq, nk = 132, (198 if tile == "d64_windows" else 67)
    dtype = "float16" if kind in ("shared", "window") else "bfloat16"
    q, k, v = on.qkv(nq, nk, *DIMS[tile], dtype=dtype, batch=2, heads=(2, 1))
    mask = (2 * on.rand(2, 2, nq, -(-nk // 2) * 2, seed=6, dtype=dtype))[..., :nk]
    keep = keep_of(nq, nk, 2)
    if kind == "shared":
        mask = mask[:1]
    if kind in ("hidden", "window"):
        mask.masked_fill_(~keep, -math.inf)
    if kind == "mixed":
        mask.masked_fill_(~keep, -2e38)  # whose log-sum-exp is that of the formula
        mask[:, :, ::3, 64:].masked_fill_(~keep[:, :, ::3, 64:], -math.inf)
        mask[:, 1, 70:80] += 3e4
        k[:, :, 7] = math.nan
        mask[..., 7] = -math.inf
    options = {"window": (100, 30)} if kind == "window" else {}
    plan = plan_on(1, q, k, v, attn_mask=mask, **options)
    assert plan.kernels[-1].endswith(tile)
    assert not any("hopper_copy_mask_" in kernel for kernel in plan.kernels)
    clean = k.nan_to_num()
    expected = on.attend_and_check(NAME, q, clean, v, plan=plan, attn_mask=mask, **options)
    if kind == "mixed":
        assert same_bits(on.attend(NAME, q, k, v, plan=plan, attn_mask=mask)[0], expected[0])


def test_which_masks_warps_copy() -> None:
    def kernels(*shape: int, columns: int = 64, rows: int = 196, keys: int = 196) -> list[str]:
        q = torch.empty(3, 4, rows, columns, dtype=torch.bfloat16, device="meta")
        k = torch.empty(3, 4, keys, columns, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(*shape, dtype=torch.bfloat16, device="meta")[..., :keys]
        plan = archflash.explain(q, k, k, device="H200", implementation=NAME, attn_mask=mask).plan
        assert plan is not None
        return list(plan.kernels)

    assert kernels(3, 4, 196, 196)[-1].endswith("d64_windows")
    assert kernels(3, 4, 196, 196, columns=72)[-1].endswith("d96_windows")
    assert kernels(1, 4, 196, 200, columns=80, keys=200)[-1].endswith("d96_windows")
    others = {
        "of each head": kernels(1, 4, 196, 196),
        "of odd rows": kernels(3, 4, 196, 197),
        "of few rows": kernels(3, 4, 40, 196, rows=40),
        "of many keys": kernels(3, 4, 196, 1026, keys=1026),
        "of more columns": kernels(3, 4, 196, 196, columns=104),
        "of more than 512 keys by TMA": kernels(3, 4, 196, 520, columns=80, keys=520),
    }
    assert not any("windows" in name for names in others.values() for name in names), others
    assert kernels(3, 4, 196, 200, keys=200)[-1].endswith("d64_added_short")  # by TMA


def test_a_shared_mask_that_is_added_has_a_summary_for_larger_tiles() -> None:
    """Blocks of lowest elements and hidden ones are left out, and where nothing else is added the
    summary's bits hide keys.
    """
    nq, nk = 300, 400
    q, k, v = on.qkv(nq, nk, 64, dtype="bfloat16", batch=2, heads=(2, 1))
    row = torch.arange(nq, device=on.device)[:, None]
    hidden = torch.arange(nk, device=on.device) > row + 40
    mask = torch.zeros(2, 1, nq, nk, dtype=torch.bfloat16, device=on.device)
    mask[0].masked_fill_(hidden, -math.inf)
    mask[1].masked_fill_(hidden, -2e38)
    mask[:, :, 100:200, 130:140] = 1.5
    mask[0, 0, 2] = -math.inf
    plan = plan_on(1, q, k, v, attn_mask=mask)
    assert plan.kernels[0].startswith("hopper_summarize_low_mask_")
    assert plan.kernels[-1].endswith("d64_shared")
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(1), attn_mask=mask)


def test_bits_of_a_tile_do_not_depend_on_the_one_before() -> None:
    """Where the last block of that one had to be mended."""
    q, k, v = on.qkv(130, 128, 64, dtype="bfloat16", batch=2, heads=(1, 1))
    mask = 2 * on.rand(2, 1, 130, 128, seed=6, dtype="bfloat16")
    mask[0, 0, :, :64] = -2e38
    for order in ((0, 1), (1, 0)):
        call = [x[list(order)] for x in (q, k, v, mask)]
        plan = plan_on(1, *call[:3], attn_mask=call[3])
        assert plan.kernels[-1].endswith("d64_added")
        out, _ = on.attend(NAME, *call[:3], plan=plan, schedules=range(1), attn_mask=call[3])
        for i in range(2):
            one = [x[i : i + 1] for x in call]
            alone = plan_on(1, *one[:3], attn_mask=one[3])
            expected, _ = on.attend(
                NAME, *one[:3], plan=alone, schedules=range(1), attn_mask=one[3]
            )
            assert same_bits(out[i : i + 1], expected)


@pytest.mark.parametrize("tile", ADDED)
def test_rows_of_equal_huge_elements_weigh_their_keys_equally(tile: str) -> None:
    """Though some of their blocks are mended, and elements of others are added late. The scale is
    no power of two.
    """
    nq, nk = 130, 250
    q, k, v = on.qkv(nq, nk, 40, dtype="bfloat16", batch=2, heads=(2, 2))
    mask = torch.zeros(1, 2, nq, 256, dtype=torch.bfloat16, device=on.device)[..., :nk]
    mask[:, :, ::5] = -1e30
    mask[:, :, 1::5, 60:190] = 1e30
    sms = 7 if tile == "d64_added_short" else 1
    plan = plan_on(sms, q, k, v, attn_mask=mask)
    assert plan.kernels[-1].endswith(tile)
    on.attend_and_check(NAME, q, k, v, plan=plan, schedules=range(1), attn_mask=mask)


def test_tiles_of_added_masks_fill_their_rounds() -> None:
    for batch, heads, rows, tile in (
        (2, 16, 1024, "d64_added"),
        (8, 16, 785, "d64_added"),
        (8, 12, 512, "d64_added_short"),
        (1, 16, 1024, "d64_added_short"),
    ):
        q = torch.empty(batch, heads, rows, 64, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(1, heads, rows, rows, dtype=torch.bfloat16, device="meta")
        plan = archflash.explain(q, q, q, device="H200", implementation=NAME, attn_mask=mask).plan
        assert plan is not None
        assert plan.kernels[-1].endswith(f"_{tile}")


@pytest.mark.parametrize("tile", OF_RANGES)
def test_values_outside_all_ranges_do_not_matter(tile: str) -> None:
    d, dv = DIMS[tile]
    nq, nk = 260, 330
    q, k, v = on.qkv(nq, nk, d, dv, dtype="bfloat16", batch=2)
    rows = torch.arange(nq, device=on.device)
    seen = ((37, 201), (150, 330))
    first = torch.stack([37 + rows % 50, 150 + rows % 90])
    last = torch.tensor([[201], [330]], device=on.device).expand(2, nq)
    call = {"key_ranges": torch.stack([first, last], -1).int()[:, None, :, None]}
    clean = on.attend(NAME, q, k, v, plan=plan_on(1, q, k, v, **call), schedules=(0,), **call)
    for x in (k, v):
        for batch, (begin, end) in enumerate(seen):
            x[batch, :, :begin] = x[batch, :, end:] = torch.nan
    plan = plan_on(1, q, k, v, **call)
    assert plan.kernels[-1].endswith(tile)
    spoiled = on.attend(NAME, q, k, v, plan=plan, schedules=(0, 1), **call)
    assert all(same_bits(one, other) for one, other in zip(spoiled, clean, strict=True))
