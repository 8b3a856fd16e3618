"""The probes of `archflash verify`: their stored bits are those of the simulator, and of plain sums
where a probe is a matrix product.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from archflash import _archflash as native
from archflash._api import find_device
from archflash.verify import _probes

from . import probes

NAMES = [probe.name for probe in _probes.PROBES]


@pytest.mark.parametrize("probe", _probes.PROBES, ids=NAMES)
def test_the_stored_bits_are_those_of_the_simulator(probe: _probes.Probe) -> None:
    """On each compute capability on which the code or the sums of tensor cores may differ."""
    assert probes.capabilities(probe)
    assert _probes.stored_hashes()[probe.name] == probes.bits(probe), (
        "run: python -m tests.sim.probes --write"
    )


def test_every_probe_is_tried_and_every_kernel_is_of_a_probe() -> None:
    assert list(_probes.stored_hashes()) == NAMES
    launched = {kernel for x in _probes.PROBES for kernel in x.kernels or (f"probe_{x.name}",)}
    compiled = {
        kernel
        for image in {probe.image for probe in _probes.PROBES}
        for kernel in program_of(image).kernels
    }
    assert launched == compiled
    images = {name for name in native.image_names() if name.startswith(f"{_probes.FOLDER}/")}
    assert images == {f"{_probes.FOLDER}/{probe.image}" for probe in _probes.PROBES}


def program_of(image: str) -> _probes.sim.Program:
    (target, *_) = native.targets(f"{_probes.FOLDER}/{image}")
    return _probes._attention.find_program(f"{_probes.FOLDER}/{image}", target.first)


def number(index: Tensor) -> Tensor:
    """`number` of src/probes/probe.cuh."""
    x = (index * 0x9E3779B1) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x85EBCA77) & 0xFFFFFFFF
    return (x >> 28) - 8


def numbers(first: int, rows: int, columns: int) -> Tensor:
    """What `fill` writes into a tile."""
    return number(first + torch.arange(rows * columns)).reshape(rows, columns).double()


PRODUCTS = [name for name in NAMES if re.match("wgmma_|tcgen05_(?!pair)", name)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_probe_of_a_product_computes_it(name: str) -> None:
    """The simulator reads descriptors as the kernels' author did; plain sums do not."""
    probe = _probes.PROBES[NAMES.index(name)]
    device = find_device("H200" if probe.image == "wgmma" else "B200")
    found = _probes.run(probe, device, "cpu").view(torch.float32).double()
    rows = 64 if probe.image == "wgmma" else 128
    n = probe.words // rows
    depth = probe.shared // (2 * (rows + n)) * (2 if "e4m3" in name else 1)
    a = numbers(0, rows, depth)
    if "a_mn_major" in name:
        a = numbers(0, depth, rows).T
    # In these B's rows are what is summed over.
    turned = "mn_major" in name or "a_in_tmem" in name
    turned |= "a_registers" in name and not name.endswith("k_major") and "e4m3" not in name
    b = numbers(100000, depth, n).T if turned else numbers(100000, n, depth)
    expected = a @ b.T
    if probe.image == "wgmma":  # a warp has 16 rows, a lane two of them and pairs of columns
        sums = found.reshape(4, 8, 4, n // 8, 2, 2)  # warp, row, pair of lanes, block, half, column
        found = sums.permute(0, 4, 1, 3, 2, 5)
    assert torch.equal(found.reshape(rows, n), expected)
