"""The memory that a forward and a backward pass need together beyond their inputs, from plans:
at most 1.2 times that of the best of PyTorch's fused kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

import archflash
from archflash import _api, _gradients, _options
from archflash import _archflash as native

MIB = 1 << 20
MOST = 1.2  # times what PyTorch needs
# What few rows of a call may need beyond that, for each head of q on a head of k: a part of a call
# is not smaller than what keeps a GPU busy. Sums of hopper have the rows and columns of dq alone.
SLACK = dict.fromkeys(("ampere", "blackwell_dc", "simt"), 96 * MIB) | {"hopper": 48 * MIB}
# Each folder with a backward pass, on GPUs for which it has different tiles.
FOLDERS = [
    ("hopper", "H200"), ("ampere", "H200"), ("ampere", "A100"), ("ampere", "RTX 4090"),
    ("blackwell_dc", "B200"), ("simt", "A100"),
]  # fmt: skip
each_folder = pytest.mark.parametrize(("kernel", "device"), FOLDERS)


class Shape(NamedTuple):
    batch: int
    heads: int
    heads_kv: int
    nq: int
    nk: int
    d: int
    dv: int


def square(batch: int, heads: int, rows: int, d: int) -> Shape:
    return Shape(batch, heads, heads, rows, rows, d, d)


def held(s: Shape, element: int) -> int:
    """The bytes of the output, of the log-sum-exp and of the three gradients."""
    rows, keys = s.batch * s.heads * s.nq, s.batch * s.heads_kv * s.nk
    return element * (rows + keys) * (s.d + s.dv) + 4 * rows


def exact_sums(s: Shape, element: int) -> int:
    """What the most frugal kernel of PyTorch, cuDNN's, was measured to need beside that: dq in fp32
    and one more number for each row, without any padding, and where query heads share a head of k
    the gradients of k and v for each of them.
    """
    shared = s.heads * s.nk * (s.d + s.dv) * element if s.heads != s.heads_kv else 0
    return s.batch * (4 * s.heads * s.nq * (s.d + 1) + shared)


def plan_of(kernel: str, device: str, s: Shape, **call: Any) -> native.LaunchPlan | None:
    dtype = torch.float32 if kernel == "simt" else torch.bfloat16
    q = torch.empty(s.batch, s.heads, s.nq, s.d, dtype=dtype, device="meta")
    k = torch.empty(s.batch, s.heads_kv, s.nk, s.d, dtype=dtype, device="meta")
    v = torch.empty(s.batch, s.heads_kv, s.nk, s.dv, dtype=dtype, device="meta")
    try:
        decision = archflash.explain(
            q, k, v, device=device, backward=True, implementation=kernel, **call
        )
    except archflash.ForcedImplementationError:  # head dimensions above those of the folder
        return None
    return decision.plan


def element_of(kernel: str) -> int:
    return 4 if kernel == "simt" else 2


# Peaks of the best of PyTorch's fused kernels in MiB: forward and backward pass in bf16 on an H200,
# torch 2.11 with CUDA 13.0 and its cuDNN, 2026-11-28. Where batch * heads is above 65,535, that is
# its memory-efficient kernel, because the others fail.
MEASURED = {
    square(4096, 6, 49, 32): 452.6,
    square(16384, 8, 16, 40): 2874.0,
    square(32768, 12, 1, 64): 6391.5,
    square(8192, 8, 1, 128): 4170.2,
    square(4096, 8, 16, 64): 388.0,
    square(4096, 8, 16, 128): 772.0,
    square(2048, 8, 16, 256): 770.0,
    square(2048, 8, 33, 40): 251.6,
    square(2048, 8, 65, 64): 788.1,
    square(1024, 8, 129, 128): 1556.1,
    square(512, 8, 200, 80): 756.3,
    square(512, 8, 77, 192): 695.4,
    square(512, 8, 50, 160): 376.6,
    square(4096, 8, 16, 8): 52.0,
    square(4096, 8, 16, 24): 148.0,
    Shape(2048, 8, 8, 300, 7, 64, 64): 2465.5,
    Shape(256, 16, 4, 100, 100, 128, 128): 653.1,
    square(4, 16, 4096, 40): 122.0,
    square(4, 16, 4096, 64): 194.0,
    square(2, 16, 4096, 72): 109.0,
    square(2, 16, 4096, 96): 145.0,
    square(2, 16, 4096, 256): 385.0,
    Shape(2, 32, 8, 4096, 4096, 128, 128): 418.0,
    square(65, 8, 1024, 64): 398.1,
}


def has_one_part(plan: native.LaunchPlan) -> bool:
    """Whether a call has too few CTAs for two parts, each of which has to fill the GPU four times.
    Its workspace is then that of the kernel's tile: of whole blocks of rows, and up to twice as
    many columns.
    """
    grid = next(
        launch["grid"] for launch in plan.to_dict()["launches"] if "_bwd_" in launch["kernel"]
    )
    return math.prod(grid) < 8 * plan.device.sm_count


@pytest.mark.parametrize("shape", MEASURED, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kernel", ["hopper", "ampere"])
def test_no_more_than_pytorch_was_measured_to_need(kernel: str, shape: Shape) -> None:
    plan = plan_of(kernel, "H200", shape)
    assert plan is not None
    most = 1.3 if kernel == "ampere" and has_one_part(plan) else MOST
    assert held(shape, 2) + plan.workspace_bytes <= most * MEASURED[shape] * MIB


BATCHES = ((1, 1), (1, 8), (2, 16), (64, 12), (512, 8), (4096, 8), (32768, 12))  # and heads
ROWS = (1, 16, 17, 49, 127, 128, 129, 300, 1024, 4096, 65536)
HEAD_DIMS = (8, 24, 40, 64, 72, 96, 128, 136, 192, 256)
LARGEST = 1 << 31  # elements of q


@pytest.mark.slow
@each_folder
def test_no_more_than_exact_sums_of_dq_whatever_the_shape(kernel: str, device: str) -> None:
    planned = 0
    for (batch, heads), rows, d in ((b, n, d) for b in BATCHES for n in ROWS for d in HEAD_DIMS):
        if batch * heads * rows * d > LARGEST:
            continue
        shapes = [square(batch, heads, rows, d), Shape(batch, heads, heads, rows, 77, d, d)]
        if heads % 4 == 0:
            shapes.append(Shape(batch, heads, heads // 4, rows, rows, d, d))
        for s in shapes:
            plan = plan_of(kernel, device, s, causal=rows % 2 == 1)
            if plan is None:
                continue
            planned += 1
            mine = held(s, element_of(kernel))
            peer = mine + exact_sums(s, element_of(kernel))
            most = max(MOST * peer, peer + SLACK[kernel] * s.heads // s.heads_kv)
            if s.nq >= 1024 and has_one_part(plan):
                columns = 64 if max(s.d, s.dv) <= 64 else 128 if max(s.d, s.dv) <= 128 else 256
                rows_of_tiles = batch * heads * (s.nq + 127) // 128 * 128
                most = max(most, mine + rows_of_tiles * (4 * columns + 8) + MIB)
                if plan.kernels[-1].endswith("_parts"):  # parts of dk and dv, two rounds of CTAs
                    parts = 2 * plan.device.sm_count * (2 if max(s.d, s.dv) <= 32 else 1)
                    most += 4 * parts * 128 * (s.d + s.dv)
            assert mine + plan.workspace_bytes <= most, s
    assert planned > 500


@each_folder
def test_deterministic_gradients_need_no_more_either(kernel: str, device: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for batch, heads in BATCHES:
            for rows in (16, 129, 1024):
                s = square(batch, heads, rows, 64)
                plan = plan_of(kernel, device, s)
                assert plan is not None
                mine = held(s, element_of(kernel))
                peer = mine + exact_sums(s, element_of(kernel))
                assert mine + plan.workspace_bytes <= max(MOST * peer, peer + SLACK[kernel]), s
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("d", "copies"), [(33, 4), (40, 0)])
def test_copies_are_made_for_one_part_after_the_other(d: int, copies: int) -> None:
    """Rows that are not whole chunks of 16 bytes are copied, at 40 columns for 33."""
    s = square(8192, 8, 49, d)
    plan = plan_of("hopper", "H200", s)
    assert plan is not None
    assert plan.kernels.count("copy_gather") == copies
    assert held(s, 2) + plan.workspace_bytes <= MOST * (held(s, 2) + exact_sums(s, 2))


@pytest.mark.parametrize(("kernel", "device"), FOLDERS[:-1])
@pytest.mark.parametrize("rows", [1, 16, 49, 128, 1000])
def test_packed_sequences_take_turns_by_heads(kernel: str, device: str, rows: int) -> None:
    """Of as many sequences as give the GPU enough to do, one head of 16 at a time needs a
    sixteenth: rows of other sequences are not known before the kernels run.
    """
    sequences, heads, d = 1 << 22 >> (rows.bit_length() + 3), 16, 64
    total = sequences * rows
    q = torch.empty(total, heads, d, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    lse = torch.empty(heads, total, device="meta")
    call = _options.complete({"cu_seqlens_q": ends, "cu_seqlens_k": ends})
    request = _gradients.Request(q, q, q, q, q, lse, None, call)
    into = _gradients.Gradients.like(request)
    plan = _gradients.decide(request, into, _api.find_device(device), kernel).plan
    assert plan is not None
    padded = (total + 129 * sequences) * d * 4  # of a head, as FlashAttention pads it for all
    exact = 4 * total * (d + 2) * heads
    assert plan.workspace_bytes <= max(min(3 * exact, heads * padded), 2 * exact, 1.3 * padded)


def test_sums_of_short_packed_sequences_are_not_computed_in_parts() -> None:
    """They fill half of their last tile. FlashAttention pads them by 128 rows each."""
    q = torch.empty(8192, 12, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(76, dtype=torch.int32, device="meta")
    decision = archflash.explain(
        q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, device="H200", backward=True
    )
    assert decision.plan is not None
    assert len(decision.plan.kernels) == 3
    assert decision.plan.workspace_bytes <= 4 * 8192 * 12 * 66 * (8192 + 75 * 128) / 8192
