"""Running a rung: compiling it, its launch, the call on a GPU, and what the simulator counts."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import on_the_spot
from bench.cases import TORCH_DTYPES
from bench.ladder.definitions import Ladder, Rung

if TYPE_CHECKING:
    import torch

KERNEL = "ladder_rung"
OPERANDS = ("q", "k", "v", "out")
MAPS_OFFSET, MAP_BYTES = 64, 128  # the tensor maps in struct RungParams (params.cuh)
SWIZZLES = (0, 32, 64, 128)


def compiled(ladder: Ladder, rung: Rung, nvcc: str, kind: str, architecture: str) -> bytes:
    """The PTX or cubin of a rung; see `on_the_spot.compiled`."""
    return on_the_spot.compiled(ladder.source(rung), nvcc, kind, architecture)


def why_not(
    ladder: Ladder, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> str | None:
    """Why the rungs of a ladder do not serve a call; None if they do."""
    import torch

    dtype, d, multiple = ladder.dtype, ladder.head_dim, ladder.multiple
    if q.dtype != getattr(torch, TORCH_DTYPES[dtype]) or {q.shape[3], v.shape[3]} != {d}:
        return f"the rungs take {dtype} and head dim {d}"
    if q.shape != k.shape or q.shape[2] % multiple:
        return f"the rungs take one length for q and k, a multiple of {multiple}"
    if causal not in ladder.masks:
        return "the rungs are causal" if ladder.masks == (True,) else "the rungs have no mask"
    if not all(x.is_contiguous() for x in (q, k, v)):
        return "the rungs take contiguous tensors"
    return None


def scalars(ladder: Ladder, n: int, causal: bool) -> bytes:
    """The part of struct RungParams between the pointers and the tensor maps."""
    scale = 1.0 / math.sqrt(ladder.head_dim)
    return struct.pack("<iffi", n, math.log2(math.e) * scale, scale, causal)


def launch_plan(ladder: Ladder, rung: Rung, q: torch.Tensor, causal: bool) -> Any:
    """A plan with one launch of a rung, for tensors like q: (batch, heads, n, head dim)."""
    from archflash import _api
    from archflash import _archflash as native

    problem = _api.make_problem(q, q, q).as_if_on_cuda()
    base = native.plan(ladder.ours[0], problem, _api.find_device("H200"))
    if isinstance(base, list):
        raise RuntimeError("; ".join(base))
    made = base.to_dict() | {"workspace_bytes": 0, "zeroed_bytes": 0}
    n, heads, d = q.shape[2], q.shape[0] * q.shape[1], ladder.head_dim
    size, maps = q.element_size(), rung.maps
    params = bytes(8 * len(OPERANDS)) + scalars(ladder, n, causal)
    made["launches"] = [
        made["launches"][0] | {
            "kernel": KERNEL,
            "grid": [-(-n // rung.rows), heads, 1],
            "cluster": [1, 1, 1],
            "block": [rung.threads, 1, 1],
            "shared_bytes": rung.shared_bytes,
            "params": params.ljust(MAPS_OFFSET + 3 * MAP_BYTES, b"\0").hex(),
            "pointers": [
                {"operand": name, "offset": 8 * i, "addend": 0} for i, name in enumerate(OPERANDS)
            ],
            "tensor_maps": []
            if maps is None
            else [
                {
                    "operand": name, "offset": MAPS_OFFSET + MAP_BYTES * i, "addend": 0,
                    "dtype": TORCH_DTYPES[ladder.dtype], "swizzle": SWIZZLES.index(maps.swizzle),
                    "nan_fill": False, "dims": [d, n, heads, 1],
                    "strides": [size * d, size * d * n, 16],
                    "box": [maps.columns, maps.q_rows if name == "q" else maps.k_rows, 1, 1],
                }
                for i, name in enumerate(OPERANDS[:3])
            ],
        }
    ]  # fmt: skip
    return native.LaunchPlan.unchecked_from_dict(made)


class Launcher:
    """Runs a rung on the current GPU, for which it is compiled at the first call.

    Args:
        ladder: that the rung belongs to.
        rung: which.
        nvcc: the compiler.
    """

    def __init__(self, ladder: Ladder, rung: Rung, nvcc: str) -> None:
        self._ladder, self._rung, self._nvcc = ladder, rung, nvcc

    def bind(self, causal: bool) -> Callable[..., torch.Tensor]:
        """A function of q, k and v (batch, heads, n, head dim) that returns the output.

        It raises RuntimeError where the rung does not compile for this GPU or does not serve the
        call.
        """
        import torch

        from archflash import _archflash as native

        plans: dict[torch.Size, Any] = {}

        def make_plan(q: torch.Tensor) -> Any:
            architecture = self._ladder.architecture(*torch.cuda.get_device_capability())
            code = compiled(self._ladder, self._rung, self._nvcc, "cubin", architecture)
            plan = launch_plan(self._ladder, self._rung, q, causal)
            return on_the_spot.with_kernel(plan, KERNEL, code)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if reason := why_not(self._ladder, q, k, v, causal):
                raise RuntimeError(reason)
            if q.shape not in plans:
                plans[q.shape] = make_plan(q)
            out = torch.empty_like(q)
            native.launch(plans[q.shape], {"q": q, "k": k, "v": v, "out": out})
            return out

        return call


@dataclass(frozen=True)
class Counters:
    """What the simulator says about one launch of a rung.

    Attributes:
        instructions: warp-instructions of PTX for 1024 scores (only those that the mask leaves).
        conflicts: wavefronts of shared memory over those that its accesses need at least.
        conflicts_of: the same for the opcode where it is largest, with that opcode in front; ""
            where nothing has conflicts.
        problem: what was wrong; "" for a launch without findings and a right result.
    """

    instructions: float
    conflicts: float
    conflicts_of: str
    problem: str


def simulate(
    ladder: Ladder, rung: Rung, nvcc: str, *, causal: bool | None = None, n: int = 0, seed: int = 0
) -> Counters:
    """Runs a rung on the simulator and compares the result with float64.

    Args:
        ladder: that the rung belongs to.
        rung: which.
        nvcc: the compiler.
        causal: the mask; None for the ladder's first.
        n: rows of q and k; 0 for the ladder's.
        seed: of the inputs and of the order of warps.
    """
    import torch

    from archflash import reference, sim

    causal = ladder.masks[0] if causal is None else causal
    heads, length = ladder.simulated
    n, d = n or length, ladder.head_dim
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, TORCH_DTYPES[ladder.dtype])
    q, k, v = (torch.randn(1, heads, n, d, generator=generator).to(dtype) for _ in range(3))
    if reason := why_not(ladder, q, k, v, causal):
        raise ValueError(reason)
    (launch,) = launch_plan(ladder, rung, q, causal).to_dict()["launches"]
    program = sim.load(compiled(ladder, rung, nvcc, "ptx", ladder.target).decode())
    out = torch.full_like(q, float("nan"))
    boxes = [row["box"] for row in launch["tensor_maps"]] or [(16, 1, 1, 1)] * 3
    swizzle = rung.maps.swizzle if rung.maps else 0
    maps = [
        sim.TensorMap(x, box, swizzle, writable=False)
        for x, box in zip((q, k, v), boxes, strict=True)
    ]
    report = sim.launch(
        program,
        KERNEL,
        [
            *(sim.Buffer(x, writable=False) for x in (q, k, v)),
            sim.Buffer(out, initialised=False),
            scalars(ladder, n, causal),
            *maps,
        ],
        grid=launch["grid"],
        block=launch["block"],
        shared_bytes=launch["shared_bytes"],
        seed=seed,
        check=False,
    )
    mask = {"causal": True} if causal else {}
    expected, _ = reference.attention(q, k, v, **mask)
    result = reference.check(out, expected, reference.baseline(q, k, v, **mask))
    problem = "; ".join(str(finding) for finding in report.findings[:3])
    if not problem and not result.ok:
        problem = f"breaks the error rule: {result}"
    scores = heads * (n * (n + 1) // 2 if causal else n * n)
    taken = sum(taken for taken, _ in report.bank_conflicts.values())
    least = sum(least for _, least in report.bank_conflicts.values())
    factor, worst = max(
        ((taken / least, opcode) for opcode, (taken, least) in report.bank_conflicts.items()),
        default=(1.0, ""),
    )
    return Counters(
        instructions=report.total_instructions * 1024 / scores,
        conflicts=taken / least if least else 1.0,
        conflicts_of=f"{worst} {factor:.1f}" if factor > 1 else "",
        problem=problem,
    )
