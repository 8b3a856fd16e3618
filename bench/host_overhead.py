"""Measures what one eager call costs on the host: the time until it returns, on a tiny shape.

    python -m bench.host_overhead [--count N] [--output FOLDER]

All calls take turns in one loop. Between timed calls the loop waits for the device, often enough
that its queue never fills. Python's garbage collector is off, as in timeit. Writes <gpu>-host.json.
Exit status 2 when nothing can be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import environment
from bench.host_training import (
    GROWING_STEPS,
    HEAD_DIM,
    HEADS,
    ROWS,
    TENSOR_SETS,
    measure_training,
    percentiles,
    training_calls,
    training_lines,
    without_garbage_collector,
)
from bench.results import RESULTS_FOLDER
from bench.timing import enqueue_times_us

Loops = Mapping[str, tuple[Callable[..., object], list[tuple[Any, ...]]]]

NEW_POINTERS = "archflash, new pointers, cached plan (fp32)"
GROWING = "archflash, Nk growing by one (fp32)"
WITH_OUT = "archflash, out= given (fp32)"
NO_LAUNCH = "archflash, empty batch: no launch (fp32)"
EMPTY_LIKE = "torch.empty_like alone (fp32)"


@contextmanager
def one_sdpa_backend_each() -> Iterator[None]:
    """Leaves torch SDPA its efficient kernel for fp32 and its flash kernel for bf16.

    Entering sdpa_kernel() in each call would cost more than the call.
    """
    from torch.backends import cuda

    before = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
              cuda.cudnn_sdp_enabled())  # fmt: skip
    switches = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp,
                cuda.enable_cudnn_sdp)  # fmt: skip
    try:
        for switch, on in zip(switches, (True, True, False, False), strict=True):
            switch(on)
        yield
    finally:
        for switch, on in zip(switches, before, strict=True):
            switch(on)


def call_loops(device: str, archflash: Any) -> Loops:
    """The calls that are compared, without autograd.

    Args:
        device: torch device.
        archflash: the package.

    Returns:
        For each name, a function and the argument tuples of its calls.
    """
    import torch

    attention, sdpa = archflash.attention, torch.nn.functional.scaled_dot_product_attention

    def sets(dtype: torch.dtype) -> list[tuple[Any, ...]]:
        shape = (1, HEADS, ROWS, HEAD_DIM)
        return [
            tuple(torch.randn(shape, dtype=dtype, device=device) for _ in "qkv")
            for _ in range(TENSOR_SETS)
        ]

    cache_shape = (1, HEADS, ROWS + GROWING_STEPS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(cache_shape, device=device) for _ in "kv")
    query = torch.randn((1, HEADS, 1, HEAD_DIM), device=device)
    growing = [
        (query, k_cache[:, :, :length], v_cache[:, :, :length])
        for length in range(ROWS, ROWS + GROWING_STEPS)
    ]
    float32, half = sets(torch.float32), sets(torch.bfloat16)
    backward = []
    for qkv in half:
        out, lse = attention(*qkv, return_lse=True)
        backward.append((torch.randn_like(out), *qkv, out, lse))
    return {
        NEW_POINTERS: (attention, float32),
        GROWING: (attention, growing),
        "torch SDPA, efficient (fp32)": (sdpa, float32),
        "torch SDPA, efficient, Nk growing by one (fp32)": (sdpa, growing),
        "torch SDPA, flash (bf16)": (sdpa, half),
        "archflash (bf16)": (attention, half),
        "archflash.attention_backward (bf16)": (archflash.attention_backward, backward),
    }


def breakdown_loops(device: str, attention: Callable[..., object]) -> Loops:
    """Public calls that show what parts of a call cost.

    Args:
        device: torch device.
        attention: archflash.attention.

    Returns:
        For each name, a function and the argument tuples of its calls.
    """
    import torch

    def sets(batch: int) -> list[tuple[Any, ...]]:
        shape = (batch, HEADS, ROWS, HEAD_DIM)
        return [tuple(torch.randn(shape, device=device) for _ in "qkv") for _ in range(TENSOR_SETS)]

    def attention_into(q: object, k: object, v: object, out: object) -> object:
        return attention(q, k, v, out=out)

    def read_pointers(q: Any, k: Any, v: Any) -> object:
        return q.data_ptr(), k.data_ptr(), v.data_ptr()

    full = sets(1)
    loops: dict[str, tuple[Callable[..., object], list[tuple[Any, ...]]]] = {
        NEW_POINTERS: (attention, full),
        WITH_OUT: (attention_into, [(*qkv, torch.empty_like(qkv[0])) for qkv in full]),
        NO_LAUNCH: (attention, sets(0)),
        EMPTY_LIKE: (torch.empty_like, [(qkv[0],) for qkv in full]),
        "three Tensor.data_ptr()": (read_pointers, full),
        "an empty Python call": (lambda: None, [()]),
    }
    if device == "cuda":
        loops["torch.cuda.current_stream()"] = (torch.cuda.current_stream, [()])
    return loops


def measure(
    loops: Loops, count: int, synchronize: Callable[[], object], every: int = 100
) -> dict[str, dict[str, float]]:
    """Times loops with the garbage collector off.

    Args:
        loops: functions and their arguments, by name.
        count: measured calls of each.
        synchronize: waits for the device.
        every: calls of each between two synchronisations.

    Returns:
        For each name, p20, p50 and p80 in microseconds.
    """
    with without_garbage_collector():
        # More than TENSOR_SETS warm calls, so that every cached plan is cached.
        times = enqueue_times_us(loops, count, synchronize, every=every, warm=10 * TENSOR_SETS)
    return {name: percentiles(us) for name, us in times.items()}


def sdpa_loops(device: str) -> Loops:
    """Calls of PyTorch's SDPA for each of its operators that archflash.enable() replaces.

    Args:
        device: torch device.

    Returns:
        For each name, a function and the argument tuples of its calls.
    """
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention

    def sets(dtype: torch.dtype, rows: int = ROWS) -> list[tuple[Any, ...]]:
        shapes = [(1, HEADS, n, HEAD_DIM) for n in (rows, ROWS, ROWS)]
        return [
            tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
            for _ in range(TENSOR_SETS)
        ]

    return {
        "SDPA as PyTorch chooses (bf16)": (sdpa, sets(torch.bfloat16)),
        "SDPA as PyTorch chooses (fp32)": (sdpa, sets(torch.float32)),
        "SDPA as PyTorch chooses, one query (bf16)": (sdpa, sets(torch.bfloat16, rows=1)),
    }


def measure_registry(
    loops: Loops, count: int, synchronize: Callable[[], object], enabled: Callable[[], Any]
) -> dict[str, dict[str, float]]:
    """Times loops with and without archflash in PyTorch's registry, in turns of many calls, because
    switching takes long.

    Args:
        loops, count, synchronize: as for `measure`.
        enabled: archflash.enabled.

    Returns:
        As `measure`, for each name two: with archflash, the name ends in "through the registry".
    """
    turns = 8
    times: dict[str, list[float]] = {}
    for _ in range(turns):
        for ending, context in (("", nullcontext), (", through the registry", enabled)):
            with context():
                found = enqueue_times_us(
                    loops, -(-count // turns), synchronize, warm=2 * TENSOR_SETS
                )
            for name, us in found.items():
                times.setdefault(name + ending, []).extend(us)
    return {name: percentiles(us) for name, us in times.items()}


def differences(breakdown: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The cost of parts that no public call shows alone, in microseconds, from the breakdown."""
    p50 = {name: figures["p50"] for name, figures in breakdown.items()}
    return {
        "output allocation (full call less out= given)": p50[NEW_POINTERS] - p50[WITH_OUT],
        "launch (full call less empty batch)": p50[NEW_POINTERS] - p50[NO_LAUNCH],
        "the rest: frame, tensor reading, plan lookup (empty batch less empty_like)": (
            p50[NO_LAUNCH] - p50[EMPTY_LIKE]
        ),
    }


def lines_of(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table of measured calls."""
    width = max(len(name) for name in figures)
    return [f"{'us per call'.ljust(width)}     p20     p50     p80"] + [
        f"{name.ljust(width)} {f['p20']:7.2f} {f['p50']:7.2f} {f['p80']:7.2f}"
        for name, f in figures.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_overhead", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, help="calls of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS_FOLDER, metavar="FOLDER")
    options = parser.parse_args(argv)
    if environment.measures_nothing():
        return 2

    import torch

    import archflash

    facts = environment.run_facts(environment.open_nvml())
    with torch.no_grad(), one_sdpa_backend_each():
        loops = call_loops("cuda", archflash)
        implementation = archflash.explain(*loops[NEW_POINTERS][1][0]).chosen
        calls = measure(loops, options.count, torch.cuda.synchronize)
        parts = breakdown_loops("cuda", archflash.attention)
        breakdown = measure(parts, options.count, torch.cuda.synchronize)
    with torch.no_grad():
        registry = measure_registry(
            sdpa_loops("cuda"), options.count, torch.cuda.synchronize, archflash.enabled
        )
    of_training = max(options.count // 20, 1)
    training = measure_training(
        training_calls("cuda", archflash), of_training, torch.cuda.synchronize
    )
    rest = {name: round(us, 3) for name, us in differences(breakdown).items()}

    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    print(f"B=1 H={HEADS} N={ROWS} D={HEAD_DIM}; archflash chose {implementation} for fp32\n")
    tables = [lines_of(calls), lines_of(registry), training_lines(training), lines_of(breakdown)]
    print("\n\n".join("\n".join(table) for table in tables))
    print("\ndifferences of medians, us")
    print("\n".join(f"{us:7.2f}  {name}" for name, us in rest.items()))

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{environment.gpu_slug(facts['gpu'])}-host.json"
    record = {
        **facts,
        "version": archflash.__version__,
        "implementation": implementation,
        "shape": {"b": 1, "h": HEADS, "n": ROWS, "d": HEAD_DIM},
        "count": options.count,
        "count_training": of_training,
        "calls": calls,
        "registry": registry,
        "training": training,
        "breakdown": breakdown,
        "differences": rest,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
