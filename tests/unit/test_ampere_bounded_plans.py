"""Which of its kernels ampere plans for calls whose rows see all keys up to one: CTAs share out the
keys of few row tiles, and the grid names the tiles of packed sequences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_cases import call, plan_of, tile_of

from archflash import _archflash as native
from archflash._api import find_device, make_problem

DEVICES = [row.device for row in native.known_devices()]
GPUS = [gpu.name for gpu in DEVICES if 80 <= gpu.major * 10 + gpu.minor < 100]
every_gpu = pytest.mark.parametrize("gpu", GPUS)
FEW = [  # (heads, rows, head dim) of causal calls
    (1, 2048, 64), (4, 2048, 64), (12, 1024, 64), (2, 4096, 96), (2, 3000, 128), (4, 4096, 128),
    (1, 8192, 128), (4, 1024, 160), (4, 2048, 256), (8, 1024, 32),
]  # fmt: skip


def ampere(problem: native.Problem, device: str = "H200") -> native.LaunchPlan:
    return plan_of(problem, device, "ampere")


def causal(hq: int, n: int, d: int, **options: Any) -> native.Problem:
    return call("bfloat16", **{"b": 1, "hq": hq, "nq": n, "d": d, "causal": True} | options)


@pytest.mark.parametrize(("heads", "rows", "d"), FEW)
@every_gpu
def test_ctas_that_share_out_keys_end_together(gpu: str, heads: int, rows: int, d: int) -> None:
    """On every GPU, by the model of the walk."""
    plan = ampere(causal(heads, rows, d), gpu)
    model = native.makespan(plan)
    assert model.share > 0.6
    # Without shares the longest tile takes as long as all keys.
    sinks = ampere(causal(heads, rows, d, sinks=True), gpu)
    few = heads * -(-rows // 64) <= find_device(gpu).sm_count
    assert (
        not few
        or model.time < max(time for _, time in native.tile_times(sinks)) + 1e-9
        or (tile_of(sinks).splits > 1)
    )


@pytest.mark.parametrize(
    ("shape", "d", "name", "splits"),
    [
        ((2, 3000), 128, "d128_shares", 5),
        ((2, 4096), 128, "d128_shares_groups", 2),
        ((8, 128), 128, "d128_shares_groups", 1),
        ((4, 2048), 256, "d256_shares", 3),
        ((1, 2048), 64, "d64_shares_three", 6),
        ((4, 2048), 64, "d64_shares_three", 6),
        ((128, 1024), 64, "d64_causal", 1),
        ((128, 1024), 96, "d96_causal", 1),
        ((128, 1024), 128, "d128_causal", 1),
        ((8, 1024), 32, "d32_shares", 4),
    ],
)
def test_shares_are_those_that_were_fastest_on_an_h200(
    shape: tuple[int, int], d: int, name: str, splits: int
) -> None:
    """Or nearly so (docs/lab/ampere.md)."""
    tile = tile_of(ampere(causal(*shape, d)))
    assert (tile.name, tile.splits) == (name, splits)


@every_gpu
@pytest.mark.parametrize("rows", [1000, 4096])
def test_the_grid_has_a_cta_for_each_tile_and_share(gpu: str, rows: int) -> None:
    plan = ampere(causal(2, rows, 128), gpu)
    tile = tile_of(plan)
    first, *second = plan.to_dict()["launches"]
    heads, ctas, groups = first["grid"]
    assert heads * ctas * groups == tile.ctas == len(native.tile_times(plan))
    if tile.share_keys == 0:
        assert second == []
        return
    # All rows behind the last tile of one share.
    alone = tile.share_keys // tile.block_q * tile.block_q
    (combine,) = second
    assert combine["kernel"] == "ampere_combine_shares_bf16"
    assert combine["grid"] == [-(-(rows - alone) // 4), 2, 1]
    assert tile.splits == -(-rows // tile.share_keys)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True},
        {"softcap": 3.0},
        {"num_splits": 2},
        {"batch_invariant": True},
        {"out_dtype": torch.float32},
        {"window": (100, 0), "causal": False},
        {"offsets": True},
        {"q_offset": -5},  # rows that see no key
        {"scale": -1.0},
        {"d": 192, "dv": 128},  # which have kernels of their own
        {"hq": 8, "hkv": 2, "nq": 20, "nk": 2000},  # heads are packed
    ],
)
def test_other_calls_have_other_kernels(options: dict[str, Any]) -> None:
    given = {"hq": 2, "n": 2000, "d": 64}
    assert "shares" in tile_of(ampere(causal(**given))).name
    given["n"] = options.pop("nq", 2000)
    given |= options
    assert "shares" not in tile_of(ampere(causal(**given))).name


def test_gpus_without_machine_code_for_them_have_other_kernels() -> None:
    for gpu in ("B200", "RTX 5090"):
        assert "shares" not in tile_of(ampere(causal(2, 2000, 64), gpu)).name


def packed(
    lengths: int, total: int, d: int, *, heads: int = 12, longest: int | None = 0, **options: Any
) -> native.Problem:
    q = torch.empty(total, heads, d, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(total // lengths + 1, dtype=torch.int32, device="meta")
    most = lengths if longest == 0 else longest
    given = {"max_seqlen_q": most, "max_seqlen_k": most} | options
    return make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, **given).as_if_on_cuda()


@pytest.mark.parametrize(
    ("rows", "d", "few", "many"),
    [
        (100, 32, "d32_packed", "d32_packed_large"),
        (100, 64, "d64_packed", "d64_packed_large"),
        (100, 80, "d80_packed", "d80_packed_large"),
        (100, 96, "d96_packed", "d96_packed_large"),
        (64, 128, "d128_packed", "d128_packed_large"),
    ],
)
def test_packed_sequences_have_tiles_by_their_length(
    rows: int, d: int, few: str, many: str
) -> None:
    assert tile_of(ampere(packed(rows, 8000, d))).name == few
    plan = ampere(packed(500, 8000, d))
    assert tile_of(plan).name == many
    assert plan.to_dict()["launches"][0]["grid"] == [4, 12, 16]
    assert tile_of(ampere(packed(300, 9000, 64, causal=True))).name == "d64_packed"


@pytest.mark.parametrize(
    ("rows", "d", "options", "name"),
    [
        (64, 80, {}, "d80_packed"),
        (64, 96, {"causal": True}, "d96_packed"),
        (100, 96, {}, "d96_medium"),
        (300, 96, {"causal": True}, "d96_medium"),
        (100, 64, {}, "d64_packed"),
        (500, 64, {}, "d64_medium"),
        (500, 128, {}, "d128_small"),
    ],
)
def test_packed_sequences_have_two_ctas_on_an_sm_in_99_kb(
    rows: int, d: int, options: dict[str, Any], name: str
) -> None:
    """But those of at most 64 rows, which leave half of a larger tile empty."""
    assert tile_of(ampere(packed(rows, 8000, d, **options), "RTX 3090")).name == name


def test_packed_sequences_of_other_calls_have_other_kernels() -> None:
    def name(**options: Any) -> str:
        return str(tile_of(ampere(packed(100, 8000, 64, **options))).name)

    assert name() == name(longest=300) == "d64_packed"
    # A CTA for each tile of the longest sequence would have nothing to do in most others.
    assert "packed" not in name(longest=1000)
    assert "packed" not in name(longest=None)
    assert "packed" not in name(sinks=torch.empty(12, device="meta"))
    assert "packed" not in name(q_offset=3, causal=True)
