"""The rungs of the ladder: compiling them, their launches, and the call that runs one on a GPU."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import on_the_spot

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent / "blackwell_consumer"
KERNEL = "ladder_rung"
HEAD_DIM = 64
BLOCK = 64  # query rows of a CTA, and keys of a block
MAPS_OFFSET, MAP_BYTES = 64, 128  # the tensor maps in struct Params (rung.cuh)


@dataclass(frozen=True)
class Rung:
    """One kernel.

    Attributes:
        name: name of its file, without the ending.
        idea: what it adds to the previous rung.
        threads: threads of a CTA.
        swizzle: bytes of its tensor maps' swizzle; None if it has no tensor maps.
    """

    name: str
    idea: str
    threads: int
    swizzle: int | None = None


RUNGS = (
    Rung("1_tiled", "tiles in shared memory, CUDA cores", 256),
    Rung("2_vectorised", "16 bytes at a time, padded rows", 256),
    Rung("3_mma_sync", "mma.sync, all operands but K and V in registers", 128),
    Rung("4_tma", "TMA loads, rows without padding", 128, 0),
    Rung("5_swizzle", "128-byte swizzle", 128, 128),
    Rung("6_double_buffer", "two buffers of K and V", 128, 128),
    Rung("7_warp_specialised", "a producer warp, full and empty barriers", 160, 128),
)


def compiled(rung: Rung, nvcc: str, kind: str, architecture: str) -> bytes:
    """The PTX or cubin of a rung; see `on_the_spot.compiled`."""
    return on_the_spot.compiled(FOLDER / f"{rung.name}.cu", nvcc, kind, architecture)


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    """Why the rungs do not serve a call; None if they do."""
    import torch

    if q.dtype != torch.bfloat16 or q.shape[3] != HEAD_DIM or v.shape[3] != HEAD_DIM:
        return "the rungs take bf16 and head dim 64"
    if q.shape != k.shape or q.shape[2] % BLOCK or causal:
        return "the rungs take one length for q and k, a multiple of 64, and no mask"
    if not all(x.is_contiguous() for x in (q, k, v)):
        return "the rungs take contiguous tensors"
    return None


def scalars(n: int) -> bytes:
    """The part of struct Params between the pointers and the tensor maps."""
    return struct.pack("<if", n, math.log2(math.e) / math.sqrt(HEAD_DIM))


def launch_plan(rung: Rung, q: torch.Tensor) -> Any:
    """A plan with one launch of a rung, for tensors like q: (batch, heads, n, 64)."""
    from archflash import _api
    from archflash import _archflash as native

    problem = _api.make_problem(q, q, q).as_if_on_cuda()
    base = native.plan("blackwell_consumer", problem, _api.find_device("H200"))
    if isinstance(base, list):
        raise RuntimeError("; ".join(base))
    made = base.to_dict()
    (launch,) = made["launches"]
    n, heads = q.shape[2], q.shape[0] * q.shape[1]
    operands = ("q", "k", "v", "out")
    launch |= {
        "kernel": KERNEL,
        "grid": [n // BLOCK, heads, 1],
        "block": [rung.threads, 1, 1],
        "shared_bytes": 0,
        "params": (bytes(8 * len(operands)) + scalars(n))
        .ljust(MAPS_OFFSET + 3 * MAP_BYTES, b"\0")
        .hex(),
        "pointers": [
            {"operand": name, "offset": 8 * i, "addend": 0} for i, name in enumerate(operands)
        ],
        "tensor_maps": []
        if rung.swizzle is None
        else [
            {
                "operand": name, "offset": MAPS_OFFSET + MAP_BYTES * i, "addend": 0,
                "dtype": "bfloat16", "swizzle": (0, 32, 64, 128).index(rung.swizzle),
                "nan_fill": False, "dims": [HEAD_DIM, n, heads, 1],
                "strides": [2 * HEAD_DIM, 2 * HEAD_DIM * n, 16], "box": [HEAD_DIM, BLOCK, 1, 1],
            }
            for i, name in enumerate(operands[:3])
        ],
    }  # fmt: skip
    return native.LaunchPlan.unchecked_from_dict(made)


class Launcher:
    """Runs a rung on the current GPU.

    Raises:
        RuntimeError: it does not compile for this GPU.
    """

    def __init__(self, rung: Rung, nvcc: str) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        self._rung = rung
        self._code = compiled(rung, nvcc, "cubin", f"sm_{major}{minor}")

    def bind(self, causal: bool) -> Callable[..., torch.Tensor]:
        """A function of q, k and v (batch, heads, n, 64) that returns the output."""
        import torch

        from archflash import _archflash as native

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if reason := why_not(q, k, v, causal):
                raise RuntimeError(reason)
            out = torch.empty_like(q)
            tensors = {"q": q, "k": k, "v": v, "out": out}
            plan = on_the_spot.with_kernel(launch_plan(self._rung, q), KERNEL, self._code)
            native.launch(plan, tensors)
            return out

        return call
