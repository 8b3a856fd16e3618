"""The quantiser's last CTAs, for a tensor that no test could hold."""

from __future__ import annotations

import pytest
import torch

from archflash import _archflash
from archflash._api import find_device
from archflash.sim import _attention, _launch


@pytest.mark.parametrize("per", ["tensor", "block"])
def test_the_quantiser_finds_tiles_beyond_31_bits(per: str) -> None:
    """The last launch of a plan with more tiles than a grid can have: its two CTAs alone.

    Only the last 65 rows are in memory; the addresses are those of tensors that start far before.
    """
    d, tiles, held = 8, 2**31 + 1, 65
    rows = 64 * tiles - 63  # one row in the last tile
    whole = torch.empty(1, 1, rows, d, dtype=torch.float16, device="meta")
    stored = torch.empty_like(whole, dtype=torch.uint8)
    home = find_device("RTX 4090")
    number = ["tensor", "head", "block"].index(per)
    plan = _archflash.plan_quantize("float8_e4m3fn", number, whole, stored, home)
    x = torch.randn(held, d, generator=torch.Generator().manual_seed(4)).half()
    of_tiles = torch.tensor([x[:64].abs().max(), x[64:].abs().max()]).float()
    held_tensors = {
        "q": (x, rows - held),  # and the first of their rows or numbers that is held
        "out": (torch.zeros(held, d, dtype=torch.uint8), rows - held),
        "descale": (torch.ones(1 if per == "tensor" else 2), 0 if per == "tensor" else tiles - 2),
        "workspace": (torch.zeros(2), tiles - 2),
    }
    memory = _launch._native.Memory()
    buffers = [_launch.Buffer(tensor, name=name) for name, (tensor, _) in held_tensors.items()]
    at = _launch.Bindings(memory, buffers).addresses
    addresses = [
        (name, (address - first * tensor[0].nbytes) % 2**64)
        for address, (name, (tensor, first)) in zip(at, held_tensors.items(), strict=True)
    ]
    ran = []
    for index, row in enumerate(plan.to_dict()["launches"]):
        if row["grid"][0] != 2:
            continue
        parameters = _attention.bound_parameters(plan, index, row, addresses)
        program = _attention.find_program(row["image"], home.capability)
        report = _launch.run_kernel(
            program, row["kernel"], parameters, memory, grid=row["grid"], block=row["block"],
            shared_bytes=0, mode="random", seed=0, race_check=True, threads=0,
        )  # fmt: skip
        assert not report.errors, report
        ran.append(row["kernel"])
    steps = ["largest_f16", "values_f16"] if per == "tensor" else ["at_once_f16"]
    assert ran == [f"quantize_{step}" for step in steps]
    descale = held_tensors["descale"][0]
    if per == "tensor":
        assert torch.equal(held_tensors["workspace"][0], of_tiles)
        assert descale.tolist() == [1.0]
    else:
        assert torch.equal(descale, of_tiles / 448)
    factor = (1 / descale).repeat_interleave(64)[:held, None] if per == "block" else 1.0
    expected = (x.float() * factor).to(torch.float8_e4m3fn)
    assert torch.equal(held_tensors["out"][0], expected.view(torch.uint8))
