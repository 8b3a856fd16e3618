"""Measures what one eager call costs on the host: the time until it returns, on a tiny shape.

    python -m bench.host_overhead [--count N] [--output FOLDER]

All calls take turns in one loop. Between timed calls the loop waits for the device, often enough
that its queue never fills. Python's garbage collector is off, as in timeit. Writes <gpu>-host.json.
Exit status 2 when nothing can be measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import environment
from bench.results import RESULTS_FOLDER, percentile
from bench.timing import enqueue_times_us

Loops = Mapping[str, tuple[Callable[..., object], list[tuple[Any, ...]]]]

HEADS, ROWS, HEAD_DIM = 4, 64, 64
TENSOR_SETS = 16
# The key length of the growing call starts again after this many steps. The plan cache holds far
# fewer plans, so that every step misses it; and the lengths stay short enough that the device keeps
# up.
GROWING_STEPS = 2048

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


def call_loops(device: str, attention: Callable[..., object]) -> Loops:
    """The calls that are compared.

    Args:
        device: torch device.
        attention: archflash.attention.

    Returns:
        For each name, a function and the argument tuples of its calls.
    """
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention

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
    float32 = sets(torch.float32)
    return {
        NEW_POINTERS: (attention, float32),
        GROWING: (attention, growing),
        "torch SDPA, efficient (fp32)": (sdpa, float32),
        "torch SDPA, efficient, Nk growing by one (fp32)": (sdpa, growing),
        "torch SDPA, flash (bf16)": (sdpa, sets(torch.bfloat16)),
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
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # More than TENSOR_SETS warm calls, so that every cached plan is cached.
        times = enqueue_times_us(loops, count, synchronize, every=every, warm=10 * TENSOR_SETS)
    finally:
        if was_enabled:
            gc.enable()
    return {
        name: {f"p{p}": round(percentile(us, p / 100), 3) for p in (20, 50, 80)}
        for name, us in times.items()
    }


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


def training_loops(device: str, archflash: Any) -> Loops:
    """Calls whose gradients are needed, with their backward passes where the name says "both": by
    name, through compat.flash_attn, and PyTorch's SDPA.

    Args:
        device: torch device.
        archflash: the package.

    Returns:
        As `call_loops`.
    """
    import torch

    from archflash.compat import flash_attn

    half, heads_last = torch.bfloat16, (1, ROWS, HEADS, HEAD_DIM)

    def leaves(*shape: int, dtype: torch.dtype = half) -> list[torch.Tensor]:
        made = (torch.randn(shape, dtype=dtype, device=device) for _ in range(TENSOR_SETS))
        return [x.requires_grad_() for x in made]

    def sets(*shape: int, dtype: torch.dtype = half) -> list[tuple[Any, ...]]:
        return list(zip(*(leaves(*shape, dtype=dtype) for _ in "qkv"), strict=True))

    def both(call: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> Any:
        out = call(*inputs[0])

        def passes(out_gradient: Any, *tensors: Any) -> object:
            return torch.autograd.grad(call(*tensors), tensors, out_gradient)

        return passes, [(torch.randn_like(out), *tensors) for tensors in inputs]

    def with_options(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *tensors: function(*tensors, **options)

    sdpa, attention = torch.nn.functional.scaled_dot_product_attention, archflash.attention
    ends = torch.tensor([0, ROWS // 4, ROWS], dtype=torch.int32, device=device)
    packed: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    seen = torch.rand(1, HEADS, ROWS, ROWS, device=device) > 0.2
    plain, single = (1, HEADS, ROWS, HEAD_DIM), torch.float32
    inputs, in_fp32 = sets(*plain), sets(*plain, dtype=single)
    of_results = []
    for q, k, v in inputs:
        tensors = [x.detach() for x in (q, k, v)]
        out, lse = attention(*tensors, return_lse=True)
        of_results.append((torch.randn_like(out), *tensors, out, lse))
    of_lengths = {**packed, "max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    return {
        "torch SDPA, both (bf16)": both(sdpa, inputs),
        "torch SDPA, both (fp32)": both(sdpa, in_fp32),
        "archflash, forward alone (bf16)": (attention, inputs),
        "archflash, both (bf16)": both(attention, inputs),
        "archflash, both (fp32)": both(attention, in_fp32),
        "archflash, both, simt forced (fp32)": both(
            with_options(attention, implementation="simt"), in_fp32
        ),
        "archflash, both, packed": both(
            with_options(attention, **packed), sets(ROWS, HEADS, HEAD_DIM)
        ),
        "archflash, both, attn_mask": both(with_options(attention, attn_mask=seen), inputs),
        "archflash, both, dropout": both(with_options(attention, dropout_p=0.1), inputs),
        "archflash.scaled_dot_product_attention, both": both(
            archflash.scaled_dot_product_attention, inputs
        ),
        "archflash.attention_backward": (archflash.attention_backward, of_results),
        "compat flash_attn_func, both": both(flash_attn.flash_attn_func, sets(*heads_last)),
        "compat flash_attn_varlen_func, both": both(
            with_options(flash_attn.flash_attn_varlen_func, **of_lengths),
            sets(ROWS, HEADS, HEAD_DIM),
        ),
        "compat flash_attn_qkvpacked_func, both": both(
            flash_attn.flash_attn_qkvpacked_func,
            [(x,) for x in leaves(1, ROWS, 3, HEADS, HEAD_DIM)],
        ),
        "compat flash_attn_kvpacked_func, both": both(
            flash_attn.flash_attn_kvpacked_func,
            list(zip(leaves(*heads_last), leaves(1, ROWS, 2, HEADS, HEAD_DIM), strict=True)),
        ),
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
    return {
        name: {f"p{p}": round(percentile(us, p / 100), 3) for p in (20, 50, 80)}
        for name, us in times.items()
    }


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
    problem = environment.why_no_gpu() or environment.why_no_archflash()
    if problem:
        print(problem, file=sys.stderr)
        return 2

    import torch

    import archflash

    facts = environment.run_facts(environment.open_nvml())
    with torch.no_grad(), one_sdpa_backend_each():
        loops = call_loops("cuda", archflash.attention)
        implementation = archflash.explain(*loops[NEW_POINTERS][1][0]).chosen
        calls = measure(loops, options.count, torch.cuda.synchronize)
        parts = breakdown_loops("cuda", archflash.attention)
        breakdown = measure(parts, options.count, torch.cuda.synchronize)
    with torch.no_grad():
        registry = measure_registry(
            sdpa_loops("cuda"), options.count, torch.cuda.synchronize, archflash.enabled
        )
    training = measure(  # both passes of all these calls are many launches: the queue is short
        training_loops("cuda", archflash), options.count // 4, torch.cuda.synchronize, every=4
    )
    rest = {name: round(us, 3) for name, us in differences(breakdown).items()}

    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    print(f"B=1 H={HEADS} N={ROWS} D={HEAD_DIM}; archflash chose {implementation} for fp32\n")
    tables = [*lines_of(calls), "", *lines_of(registry), "", *lines_of(training)]
    tables += ["", *lines_of(breakdown)]
    print("\n".join([*tables, "", "differences of medians, us"]))
    print("\n".join(f"{us:7.2f}  {name}" for name, us in rest.items()))

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{environment.gpu_slug(facts['gpu'])}-host.json"
    record = {
        **facts,
        "version": archflash.__version__,
        "implementation": implementation,
        "shape": {"b": 1, "h": HEADS, "n": ROWS, "d": HEAD_DIM},
        "count": options.count,
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
