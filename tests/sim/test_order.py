"""The order of row tiles: what kernels compute of it on the simulator, beside the host's model."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native
from archflash import sim
from archflash._api import find_device, make_problem

# Where TileOrder lies in a parameter block (src/common/attention_params.h), and in that of
# blackwell_consumer the divisors that belong to it (src/common/device/equal_tiles.cuh).
ORDER_OFFSET = 260
DIVISORS_OFFSET = 856
KERNELS = {
    "simt": ("A100", torch.float32),
    "ampere": ("A100", torch.bfloat16),
    "ada": ("RTX 4090", torch.float8_e4m3fn),
    "hopper": ("H200", torch.bfloat16),
    "blackwell_consumer": ("RTX 5090", torch.bfloat16),
    "blackwell_dc": ("B200", torch.bfloat16),
}


def inputs(
    dtype: torch.dtype, rows: int, heads: tuple[int, int] = (4, 2), d: int = 64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, rows, d, generator=generator).to(dtype)
        for count in (heads[0], heads[1], heads[1])
    ]


def plan_for(kernel: str, qkv: list[Tensor], sms: int, **options: Any) -> native.LaunchPlan:
    device = find_device(KERNELS[kernel][0])
    device = native.Device.from_dict(device.to_dict() | {"sm_count": sms})
    plan = native.plan(kernel, make_problem(*qkv, **options), device)
    assert isinstance(plan, native.LaunchPlan)
    return plan


def divisors(heads: int, tiles: int, group: int) -> list[int]:
    """(multiplier, shift) of each divisor (src/common/device/divisor.h) of an order."""
    numbers = []
    for by in (tiles // heads * group, group, heads % group or group):
        shift = 31 + (by - 1).bit_length()
        numbers += [-(-(1 << shift) // by), shift]
    return numbers


def in_order(plan: native.LaunchPlan, order: tuple[int, int, int]) -> native.LaunchPlan:
    """The plan with another (heads_per_group, turned_begin, turned_end)."""
    fields = plan.to_dict()
    for launch in fields["launches"]:
        params = bytearray.fromhex(launch["params"])
        told = struct.unpack_from("<3i", params, ORDER_OFFSET)
        tile = fields["tile"]
        assert told[1:] == (tile["turned_begin"], tile["turned_end"])
        struct.pack_into("<3i", params, ORDER_OFFSET, *order)
        if plan.implementation == "blackwell_consumer" and not plan.problem.varlen:
            heads = plan.problem.batch * plan.problem.heads_q
            told_divisors = struct.unpack_from("<6I", params, DIVISORS_OFFSET)
            assert list(told_divisors) == divisors(heads, tile["tiles"], told[0])
            struct.pack_into(
                "<6I", params, DIVISORS_OFFSET, *divisors(heads, tile["tiles"], order[0])
            )
        launch["params"] = params.hex()
    fields["tile"] |= dict(
        zip(("heads_per_group", "turned_begin", "turned_end"), order, strict=True)
    )
    return native.LaunchPlan.unchecked_from_dict(fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_order_computes_every_row_once(kernel: str) -> None:
    """The same bits in all orders; the output is full of NaN before."""
    rows = {"simt": 300, "ampere": 600, "ada": 600}.get(kernel, 1100)
    qkv = inputs(KERNELS[kernel][1], rows)
    plan = plan_for(kernel, qkv, 3, causal=True)
    tile = plan.tile
    assert tile is not None
    rows = tile.tiles // 4
    assert rows >= 4

    def out(order: tuple[int, int, int]) -> Tensor:
        given = torch.full_like(qkv[0], torch.nan, dtype=torch.float32)
        given = given.to(torch.bfloat16 if kernel == "ada" else qkv[0].dtype)
        return sim.run(
            *qkv, implementation=kernel, plan=in_order(plan, order), causal=True, out=given
        ).out

    expected = out((4, 0, 0))
    assert not expected.isnan().any()
    for order in ((2, 0, rows), (4, 1, 3), (3, 0, 2)):
        assert torch.equal(out(order), expected), order


@pytest.mark.parametrize(
    ("dtype", "d", "rows", "part_rows", "sms"),  # the last have the same tile, not in parts
    [
        (torch.bfloat16, 64, 660, 64, 8),
        (torch.bfloat16, 64, 700, 128, 2),
        (torch.float8_e4m3fn, 128, 450, 128, 2),
    ],
    ids=["parts without rows", "a short part", "8 bits"],
)
def test_parts_of_row_tiles_compute_every_row_once(
    dtype: torch.dtype, d: int, rows: int, part_rows: int, sms: int
) -> None:
    """The tiles that are left for the last round of five CTAs are cut into parts; two CTAs have
    none left. The output is full of NaN before.
    """
    qkv = inputs(dtype, rows, d=d)

    def out(sms: int, part_rows: int) -> tuple[str, Tensor]:
        plan = plan_for("hopper", qkv, sms)
        tile = plan.tile
        assert tile is not None
        assert (tile.ctas, tile.part_rows) == (sms, part_rows)
        if part_rows > 0:
            parts = -(-tile.block_q // part_rows) * (tile.tiles - tile.whole_tiles)
            assert len(native.tile_times(plan)) == tile.whole_tiles + parts
        given = torch.full_like(qkv[0], torch.nan, dtype=torch.bfloat16)
        run = sim.run(*qkv, implementation="hopper", plan=plan, out=given)
        return tile.name, run.out

    name, expected = out(sms, 0)
    assert not expected.isnan().any()
    same_name, cut = out(5, part_rows)
    assert same_name == name
    assert torch.equal(cut, expected)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"causal": True}, (4, 0, 0)),
        ({"causal": True}, (2, 0, 0)),
        ({"causal": True}, (4, 1, 4)),
        ({"causal": True}, (2, 0, 3)),
        ({"window": (150, 40)}, (4, 0, 0)),
        ({"causal": True, "q_offset": -100}, (4, 0, 0)),
        ({"causal": True, "packed": (70, 200, 1, 0, 129)}, (4, 0, 0)),
    ],
    ids=str,
)
def test_the_model_counts_the_blocks_that_ctas_load(
    options: dict[str, Any], order: tuple[int, int, int]
) -> None:
    """CTA i of a grid with a CTA for each tile copies Q, and K and V of as many blocks as
    tile_times() says of tile i.
    """
    kernel = "blackwell_consumer"
    lengths = options.pop("packed", None)
    if lengths:
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        qkv = [x[0].transpose(0, 1).contiguous() for x in inputs(torch.bfloat16, sum(lengths))]
        options = options | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    else:
        qkv = inputs(torch.bfloat16, 400)
    plan = in_order(plan_for(kernel, qkv, 170, **options), order)
    tile = plan.tile
    assert tile is not None
    assert tile.ctas == tile.tiles
    report = sim.run(
        *qkv, implementation=kernel, plan=plan, traced_ctas=tile.ctas, **options
    ).report
    copied = {
        number: sum(event.bytes for event in trace.events if event.kind == "async")
        for number, trace in report.traces.items()
    }
    q_lengths = list(lengths or ())
    times = native.tile_times(plan, q_lengths, q_lengths)
    assert sum(time > 0 for _, time in times) > 8
    row_bytes = 64 * 2
    for number, (_, time) in enumerate(times):
        keys = time - native.TILE_KEYS if time else 0
        rows = 2 * keys + tile.block_q * tile.packed_heads if keys else 0
        assert copied[number] == rows * row_bytes, (number, time)
