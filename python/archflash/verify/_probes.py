"""Kernels of one CTA or a few that try one instruction each, and the bits that they must give.

The bits are those of the simulator (`python -m tests.sim.probes --write`), a hash for each kernel,
and for each compute capability where tensor cores round sums otherwise. An H200 gives all of those
for 9.0 (2026-11-29). Probes speak for no kernel: they say which instruction is to blame where a
kernel is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archflash import _api, _dispatch, sim
from archflash import _archflash as _native
from archflash.sim import _attention
from archflash.verify._setup import Item, NotHereError, Setup, Told, kernels_on
from archflash.verify._wrong import WrongError, where

EXPECTED = Path(__file__).with_name("probes.json")
FOLDER = "probes"
LIMIT_S = 30
IN_COLUMNS, IN_ROWS = 128, 40  # of the tensor that probes read
MAP_OFFSET, PARAMETER_BYTES = 64, 192  # src/probes/probe.cuh
RUNS = 3
LANES = 32  # words in a row of the map of wrong words


@dataclass(frozen=True)
class Box:
    """The box of a copy: its size and place in a tensor, and the swizzle of its map (0 to 3)."""

    columns: int
    rows: int
    column: int = 0
    row: int = 0
    swizzle: int = 0


@dataclass(frozen=True)
class Probe:
    """One program.

    Attributes:
        image: where its kernels are, in src/probes.
        name: what is tried; unique.
        words: of 32 bits that it writes.
        kernels: what is launched; by default one kernel that is called like the probe.
        threads: of a CTA.
        ctas, cluster: of the grid, and of a cluster.
        shared: bytes of dynamic shared memory.
        box: of its copies.
        map_of: the operand that its tensor map is of.
        slabs: the map takes the columns as two dimensions, slabs of half of them.
    """

    image: str
    name: str
    words: int
    kernels: tuple[str, ...] = ()
    threads: int = 32
    ctas: int = 1
    cluster: int = 1
    shared: int = 0
    box: Box | None = None
    map_of: str = "q"
    slabs: bool = False


def _wgmma(name: str, n: int, columns: int) -> Probe:
    shared = 2 * columns * (64 + n)
    return Probe("wgmma", f"wgmma_{name}", 64 * n, threads=128, shared=shared)


def _tcgen05(name: str, n: int, depth: int) -> Probe:
    shared = 2 * depth * (128 + n)
    return Probe("tcgen05", f"tcgen05_{name}", 128 * n, threads=128, shared=shared)


def _pair(n: int) -> Probe:
    shared = 2 * 64 * (128 + n // 2)
    return Probe(
        "tcgen05", f"tcgen05_pair_n{n}", 256 * n, threads=128, ctas=2, cluster=2, shared=shared
    )


def _load(name: str, box: Box) -> Probe:
    return Probe(
        "async", f"tma_load_{name}", box.columns * box.rows // 2, ("probe_tma_load",), 64,
        shared=2 * box.columns * box.rows, box=box,
    )  # fmt: skip


PROBES = (
    Probe("warp", "ldmatrix", 128),
    Probe("warp", "ldmatrix_trans", 128),
    Probe("warp", "functions", 128),
    Probe("mma_sync", "mma_f16", 128),
    Probe("mma_sync", "mma_bf16", 128),
    Probe("mma_sync", "mma_tf32", 128),
    Probe("mma_sync", "mma_f16_sums", 64),
    Probe("mma_sync", "mma_s8", 128),
    Probe("mma_sync", "mma_u8_s8", 128),
    Probe("mma_sync", "mma_rounding", 128),
    Probe("mma_sync", "cp_async", 384),
    Probe("mma_sync", "named_barriers", 256, threads=64),
    Probe("fp8", "mma_e4m3", 128),
    Probe("fp8", "mma_e5m2", 128),
    Probe("fp8", "mma_e4m3_e5m2", 128),
    Probe("fp8", "mma_e4m3_rounding", 128),
    Probe("fp8", "conversions", 64),
    Probe("block_scaled", "mma_mxf8", 128),
    Probe("block_scaled", "mma_nvf4", 128),
    Probe("block_scaled", "mma_mxf8_rounding", 128),
    Probe("block_scaled", "mma_nvf4_rounding", 128),
    Probe("async", "stmatrix", 128),
    Probe("async", "stmatrix_trans", 128),
    Probe("async", "mbarrier", 128, threads=64),
    _load("plain", Box(64, 16)),
    _load("swizzle_32", Box(16, 24, 16, 3, 1)),
    _load("swizzle_64", Box(32, 24, 32, 3, 2)),
    _load("swizzle_128", Box(64, 32, 64, 3, 3)),
    _load("beyond_the_tensor", Box(64, 32, 96, IN_ROWS - 9, 3)),
    Probe("async", "bulk_load", 192, threads=64),
    Probe("async", "cp_async_arrival", 128, threads=64),
    Probe(
        "async",
        "tma_ring",
        4 * 64 * 16 // 2,
        threads=64,
        shared=2 * 2 * 64 * 16,
        box=Box(64, 16, 0, 1, 3),
    ),
    Probe(
        "async",
        "tma_store",
        IN_COLUMNS * IN_ROWS // 2,
        threads=64,
        shared=2 * 64 * 32,
        box=Box(64, 32, 80, 20, 3),
        map_of="out",
    ),
    Probe("async", "bulk_stores", 128, threads=64),
    Probe(
        "async",
        "tma_load_5d",
        64 * 16,
        threads=64,
        shared=2 * 2 * 64 * 16,
        box=Box(64, 16, 0, 5, 3),
        slabs=True,
    ),
    Probe("async", "reductions", 144, threads=256),
    Probe("async", "cluster", 128, ctas=4, cluster=2),
    Probe("async", "cluster_turns", 512, ctas=4, cluster=2),
    Probe("async", "dependent_launch", 256, ("probe_dependent_first", "probe_dependent_second")),
    Probe("roles", "registers", 384, threads=384),
    _wgmma("f16_n64", 64, 64),
    _wgmma("bf16_n80", 80, 128),
    _wgmma("bf16_n96_swizzle_64", 96, 32),
    _wgmma("bf16_n128", 128, 64),
    _wgmma("bf16_n192", 192, 64),
    _wgmma("bf16_n256", 256, 64),
    _wgmma("bf16_n64_mn_major", 64, 64),
    _wgmma("bf16_n128_mn_major", 128, 64),
    _wgmma("bf16_n96_a_registers", 96, 64),
    _wgmma("f16_n128_a_registers", 128, 64),
    _wgmma("bf16_n64_a_registers_k_major", 64, 64),
    _wgmma("e4m3_n64", 64, 64),
    _wgmma("e4m3_n128", 128, 64),
    _wgmma("e4m3_n192_a_registers", 192, 64),
    Probe("tcgen05", "tmem_st8_ld16", 128 * 64, threads=128),
    Probe("tcgen05", "tmem_st16_ld32", 128 * 64, threads=128),
    _tcgen05("f16_n64", 64, 64),
    _tcgen05("bf16_n128", 128, 128),
    _tcgen05("bf16_n256", 256, 64),
    _tcgen05("bf16_n96_swizzle_64", 96, 96),
    _tcgen05("bf16_n64_b_mn_major", 64, 64),
    _tcgen05("bf16_n192_b_mn_major", 192, 64),
    _tcgen05("bf16_n128_a_mn_major", 128, 64),
    _tcgen05("f16_n128_a_in_tmem", 128, 64),
    _tcgen05("bf16_n256_a_in_tmem", 256, 128),
    _tcgen05("e4m3_n64", 64, 64),
    _tcgen05("e4m3_n256", 256, 64),
    _tcgen05("e4m3_n128_a_in_tmem", 128, 64),
    _pair(128),
    _pair(256),
    Probe("tcgen05", "launch_control", 700, ctas=700, shared=200 * 1024),
    Probe("tcgen05", "launch_control_of_pair", 700, ctas=700, cluster=2, shared=200 * 1024),
    Probe(
        "tcgen05",
        "tma_load_of_pair",
        2 * 64 * 16 // 2,
        threads=64,
        ctas=2,
        cluster=2,
        shared=2 * 64 * 16,
        box=Box(64, 16, 64, 2, 3),
    ),
    Probe("tcgen05", "packed_floats", 352),
)


def probe_items(setup: Setup) -> list[Item]:
    """The probes with code for the GPU."""
    return [
        Item(probe.name, functools.partial(check, probe), LIMIT_S)
        for probe in PROBES
        if runs_on(probe, setup.capability)
    ]


def runs_on(probe: Probe, capability: tuple[int, int]) -> bool:
    """Whether this build has code of a probe for GPUs of a compute capability."""
    image = f"{FOLDER}/{probe.image}"
    return image in _native.image_names() and any(
        target.loads_on(capability) for target in _native.targets(image)
    )


def check(probe: Probe, setup: Setup) -> Told:
    """Runs a probe several times and compares its bits with the stored ones."""
    stored = expected(probe, setup.capability)
    if stored is None:
        raise NotHereError("no bits are stored for this compute capability")
    device = (
        _api.find_device(setup.gpu)
        if setup.simulate
        else _dispatch.query_device(torch.device(setup.device).index)
    )
    for _ in range(1 if setup.simulate else RUNS):
        words = run(probe, device, setup.device)
        if digest(words) != stored:
            right = run(probe, device, "cpu")
            wrong = (words.cpu() != right).reshape(-1, LANES if probe.words % LANES == 0 else 1)
            said = f"{int(wrong.sum())} of {probe.words} words are not those of the simulator"
            raise WrongError(said, where(wrong, words.cpu().reshape(wrong.shape).float()))
    return Told()


@cache
def stored_hashes() -> dict[str, str | dict[str, str]]:
    """The file of expected bits."""
    found: dict[str, str | dict[str, str]] = json.loads(EXPECTED.read_text())
    return found


def expected(probe: Probe, capability: tuple[int, int]) -> str | None:
    """The hash of the words that a probe must write; None where it is not known."""
    stored = stored_hashes().get(probe.name)
    if isinstance(stored, dict):
        return stored.get("{}.{}".format(*capability))
    return stored


def digest(words: Tensor) -> str:
    """The hash of the words that a probe wrote."""
    return hashlib.sha256(words.cpu().numpy().tobytes()).hexdigest()[:16]


def run(probe: Probe, device: _native.Device, where_to: str) -> Tensor:
    """Runs a probe.

    Args:
        probe: the program.
        device: the GPU, real or simulated.
        where_to: its torch device, or "cpu" for the simulator.

    Returns:
        The words that it wrote, int32.
    """
    count = torch.arange(IN_COLUMNS * IN_ROWS)
    numbers = (count * 40503 // 16 % 16 - 8).to(torch.bfloat16)
    tensors = {
        "q": numbers.reshape(IN_ROWS, IN_COLUMNS).to(where_to),
        "out": torch.zeros(probe.words, dtype=torch.int32, device=where_to),
    }
    plan = make_plan(probe, device)
    if where_to != "cpu":
        _native.launch(plan, tensors)
        return tensors["out"]
    settings = _attention.Settings(threads=1)
    reports = _attention.simulate(plan, tensors, settings)
    if not all(report.complete for report in reports):
        raise sim.SimulationError(reports[-1])
    return tensors["out"]


def make_plan(probe: Probe, device: _native.Device) -> _native.LaunchPlan:
    """A plan that launches a probe's kernels."""
    box = probe.box or Box(0, 0)
    numbers = struct.pack("<QQ4i", 0, 0, box.columns, box.rows, box.column, box.row)
    launch: dict[str, Any] = {
        "image": f"{FOLDER}/{probe.image}",
        "grid": [probe.ctas, 1, 1],
        "cluster": [probe.cluster, 1, 1],
        "block": [probe.threads, 1, 1],
        "shared_bytes": probe.shared,
        "params": numbers.ljust(PARAMETER_BYTES, b"\0").hex(),
        "pointers": [
            {"operand": name, "offset": 8 * number, "addend": 0}
            for number, name in enumerate(("q", "out"))
        ],
        "tensor_maps": [],
    }
    if probe.box is not None:
        slab, row = IN_COLUMNS // 2, 2 * IN_COLUMNS
        sizes = ([slab, 2], [IN_COLUMNS])[not probe.slabs]
        steps = ([2 * slab, row], [row])[not probe.slabs]
        launch["tensor_maps"] = [
            {
                "operand": probe.map_of, "offset": MAP_OFFSET, "addend": 0, "dtype": "bfloat16",
                "swizzle": box.swizzle, "nan_fill": False,
                "dims": [*sizes, IN_ROWS, 1, 1],
                "strides": [*steps, row * IN_ROWS, row * IN_ROWS],
                "box": [box.columns, *sizes[1:], box.rows, 1, 1],
            }
        ]  # fmt: skip
    kernels, plan = probe.kernels or (f"probe_{probe.name}",), _any_plan(device)
    launch = plan["launches"][0] | launch  # with fields that say nothing of a probe
    launches = [
        launch | {"kernel": kernel, "uses_pdl": number > 0} for number, kernel in enumerate(kernels)
    ]
    return _native.LaunchPlan.unchecked_from_dict(plan | {"launches": launches})


def _any_plan(device: _native.Device) -> dict[str, Any]:
    """The fields of some plan for a GPU, whose launches are replaced."""
    for name in kernels_on(device.capability):
        dtype = getattr(torch, _native.describe(name).dtypes[0])
        x = torch.empty(1, 1, 1, 64, dtype=dtype, device="meta")
        made = _native.plan(name, _api.make_problem(x, x, x).as_if_on_cuda(), device)
        if isinstance(made, _native.LaunchPlan):
            return made.to_dict()
    raise NotHereError(f"no kernel of this build can be planned for {device.name}")
