"""What the tests of plans share: calls as if on a GPU, the devices, who serves where."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests import kernel_files

from archflash import _archflash as native
from archflash import _registry
from archflash._api import find_device, make_problem

KERNELS = _registry.kernel_names()
DEVICES = (
    "A100",
    "RTX 3090",
    "A10G",
    "L4",
    "L40S",
    "RTX 4090",
    "H100",
    "H200",
    "B200",
    "B300",
    "RTX 5060 laptop",
    "RTX 5080",
    "RTX 5090",
    "RTX PRO 6000",
    "GB10",
)
OTHER_DEVICES = ("T4", "Jetson AGX Orin", "Jetson Thor")

# For each kernel on mma.sync for 16-bit inputs the head dimensions (d, dv) that it is for.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
every_head_dim = pytest.mark.parametrize(
    "dims", HEAD_DIMS, ids=lambda dims: f"d{dims[0]}" if dims[0] == dims[1] else "d192-dv128"
)
# The first that is large enough serves.
every_kind_of_head_dims = pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((8, 8), (64, 64)),
        ((64, 8), (64, 64)),
        ((64, 72), (96, 96)),
        ((72, 64), (96, 96)),
        ((96, 104), (128, 128)),
        ((104, 8), (128, 128)),
        ((136, 128), (192, 128)),
        ((192, 64), (192, 128)),
        ((192, 136), (256, 256)),
        ((128, 192), (256, 256)),
        ((200, 8), (256, 256)),
        ((8, 256), (256, 256)),
    ],
    ids=str,
)


def call(
    dtype: str = "float32", *, b: int = 2, hq: int = 4, hkv: int | None = None, nq: int = 128,
    nk: int | None = None, d: int = 64, dv: int | None = None, offsets: bool = False,
    sinks: bool = False, **options: Any,
) -> native.Problem:  # fmt: skip
    """A padded call."""
    kind: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "meta"}
    hkv, nk, dv = hkv or hq, nq if nk is None else nk, dv or d
    if offsets:
        options["q_offset"] = torch.empty(b, dtype=torch.int32, device="meta")
    if sinks:
        options["sinks"] = torch.empty(hq, device="meta")
    return make_problem(
        torch.empty(b, hq, nq, d, **kind),
        torch.empty(b, hkv, nk, d, **kind),
        torch.empty(b, hkv, nk, dv, **kind),
        **options,
    ).as_if_on_cuda()


def large_call(dtype: str, dims: tuple[int, int]) -> native.Problem:
    """A call that fills every GPU."""
    return call(dtype, b=16, hq=32, nq=2048, d=dims[0], dv=dims[1])


def packed_call(
    dtype: str = "float32", *, rows: int = 777, sequences: int = 5, d: int = 64, **options: Any
) -> native.Problem:
    """A call of packed sequences."""
    q = torch.empty(rows, 4, d, dtype=getattr(torch, dtype), device="meta")
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    return make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, **options).as_if_on_cuda()


def dtypes_of(kernel: str) -> tuple[str, ...]:
    return tuple(native.describe(kernel).dtypes)


def home_of(kernel: str) -> str:
    """A GPU that the kernel is made for."""
    return str(native.describe(kernel).home_device)


def serves(kernel: str, device: str) -> bool:
    """Whether the kernel is built for code that the device can run."""
    return bool(native.has_code(kernel, find_device(device).capability))


def plan_of(problem: native.Problem, device: str, kernel: str = "simt") -> native.LaunchPlan:
    answer = native.plan(kernel, problem, find_device(device))
    assert isinstance(answer, native.LaunchPlan), answer
    return answer


def tile_of(plan: native.LaunchPlan) -> native.TileChoice:
    """The tile of a plan that computes something."""
    assert plan.tile is not None
    return plan.tile


def launch_of(plan: native.LaunchPlan) -> dict[str, Any]:
    """The plan's only launch."""
    (launch,) = plan.to_dict()["launches"]
    return dict(launch)


def maps_of(plan: native.LaunchPlan) -> dict[str, dict[str, Any]]:
    """The tensor maps of the only launch, by operand."""
    return {row["operand"]: row for row in launch_of(plan)["tensor_maps"]}


def kernels_built(image: str) -> set[str]:
    """Of "<folder>/<stem>"."""
    file = kernel_files.KERNELS / f"{image}.json"
    return {name for names in json.loads(file.read_text()).values() for name in names}
