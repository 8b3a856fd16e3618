"""The plan of pair_of_roles.cu, and what the kernel computes."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from bench import on_the_spot
from torch import Tensor

from archflash import _archflash as native
from archflash._api import find_device, make_problem

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "pair_of_roles"
CTAS, ROWS, COLUMNS, STAGES = 2, 256, 64, 7
STAGE_BYTES = 2 * ROWS * COLUMNS
SHARED_BYTES = STAGES * STAGE_BYTES + 4 * ROWS + 8 * (2 * STAGES + 2)
MAP_OFFSET, MAP_BYTES = 64, 128


def compiled(nvcc: str, kind: str, capability: tuple[int, int] = (9, 0)) -> bytes:
    """The "ptx" or "cubin" of the kernel for GPUs of one capability; see `on_the_spot.compiled`."""
    major, minor = capability
    prefix = "compute_" if kind == "ptx" else "sm_"
    return on_the_spot.compiled(SOURCE, nvcc, kind, f"{prefix}{major}{minor}a")


def plan(tiles: int, clusters: int) -> native.LaunchPlan:
    """A plan with one launch of the kernel.

    Args:
        tiles: of 2 x 256 rows.
        clusters: of two CTAs, which share them.
    """
    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    made = native.plan("ampere", make_problem(x, x, x).as_if_on_cuda(), find_device("H200"))
    assert isinstance(made, native.LaunchPlan)
    fields = made.to_dict()
    rows = tiles * CTAS * ROWS
    launch = fields["launches"][0] | {
        "kernel": NAME,
        "grid": [clusters * CTAS, 1, 1],
        "cluster": [CTAS, 1, 1],
        "block": [512, 1, 1],
        "uses_pdl": False,
        "shared_bytes": SHARED_BYTES,
        "params": struct.pack("<Qi", 0, tiles).ljust(MAP_OFFSET + MAP_BYTES, b"\0").hex(),
        "pointers": [{"operand": "out", "offset": 0, "addend": 0}],
        "tensor_maps": [
            {
                "operand": "q", "offset": MAP_OFFSET, "addend": 0, "dtype": "bfloat16",
                "swizzle": 0, "nan_fill": False, "dims": [COLUMNS, rows, 1, 1],
                "strides": [2 * COLUMNS, 2 * COLUMNS * rows, 16], "box": [COLUMNS, ROWS, 1, 1],
            }
        ],
    }  # fmt: skip
    return native.LaunchPlan.unchecked_from_dict(fields | {"launches": [launch]})


def tensors(tiles: int, device: str) -> dict[str, Tensor]:
    """Small integers, whose sums are exact, and an output of NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-4, 5, (tiles * CTAS * ROWS, COLUMNS), generator=generator)
    out = torch.full((tiles, CTAS, ROWS), float("nan"))
    return {"q": x.bfloat16().to(device), "out": out.to(device)}


def expected(x: Tensor) -> Tensor:
    """What the kernel writes: the sums of CTA 0's rows, which CTA 1 writes, with a minus."""
    weights = torch.arange(1.0, COLUMNS + 1, device=x.device)
    sums = (x.float() * weights).sum(1).view(-1, CTAS, ROWS)
    return sums * torch.tensor([-1.0, 1.0], device=x.device)[:, None]
