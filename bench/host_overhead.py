"""Measures what one eager call costs on the host: the time until it returns, on a tiny shape.

    python -m bench.host_overhead [--count N] [--output FOLDER]

All calls take turns in one loop. Between timed calls the loop waits for the device, often enough
that its queue never fills. Python's garbage collector is off, as in timeit. Writes <gpu>-host.json.
Exit status 2 when nothing can be measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import environment
from bench.candidates import torch_varlen
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


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def percentiles(us: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(percentile(us, p / 100), 3) for p in (20, 50, 80)}


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


@dataclass(frozen=True)
class Training:
    """A kind of call whose gradients are needed.

    Attributes:
        call: the function.
        inputs: the tensors that it is called with, and differentiated by, in turns.
        peer: the name of PyTorch's call that does the same or, where it has none, of its plain one;
            None: it is one of them.
    """

    call: Callable[..., Any]
    inputs: list[tuple[Any, ...]]
    peer: str | None = "torch SDPA"


def training_calls(device: str, archflash: Any) -> dict[str, Training]:
    """By name, through compat, and PyTorch's SDPA.

    Args:
        device: torch device.
        archflash: the package.
    """
    import torch

    from archflash.compat import flash_attn, flash_attn_interface

    half, single = torch.bfloat16, torch.float32

    def leaves(*shape: int, dtype: torch.dtype = half) -> list[torch.Tensor]:
        made = (torch.randn(shape, dtype=dtype, device=device) for _ in range(TENSOR_SETS))
        return [x.requires_grad_() for x in made]

    def sets(*shape: int, dtype: torch.dtype = half) -> list[tuple[Any, ...]]:
        return list(zip(*(leaves(*shape, dtype=dtype) for _ in "qkv"), strict=True))

    of = functools.partial

    def rows_first(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = sdpa(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)
        return out

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch_varlen(q, k, v, ends, ends, ROWS, ROWS)

    def with_sinks(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention(q, k, v, sinks=sinks)

    sdpa, attention = torch.nn.functional.scaled_dot_product_attention, archflash.attention
    ends = torch.tensor([0, ROWS // 4, ROWS], dtype=torch.int32, device=device)
    cu: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    of_lengths = {**cu, "max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    seen = torch.rand(1, HEADS, ROWS, ROWS, device=device) > 0.2
    ranges = torch.tensor([0, ROWS], dtype=torch.int32, device=device).expand(1, 1, ROWS, 1, 2)
    slopes = torch.rand(HEADS, device=device)
    plain = sets(1, HEADS, ROWS, HEAD_DIM)
    in_fp32 = sets(1, HEADS, ROWS, HEAD_DIM, dtype=single)
    heads_last, packed = sets(1, ROWS, HEADS, HEAD_DIM), sets(ROWS, HEADS, HEAD_DIM)
    beside_sinks = [(*x, y) for x, y in zip(plain, leaves(HEADS, dtype=single), strict=True)]
    in_one = [(x,) for x in leaves(1, ROWS, 3, HEADS, HEAD_DIM)]
    two = leaves(1, ROWS, 2, HEADS, HEAD_DIM)
    in_two = [(x, y) for (x, *_), y in zip(heads_last, two, strict=True)]

    calls = {
        "torch SDPA": Training(sdpa, plain, None),
        "torch SDPA, fp32": Training(sdpa, in_fp32, None),
        "torch SDPA, attn_mask": Training(of(sdpa, attn_mask=seen), plain, None),
        "torch SDPA, dropout": Training(of(sdpa, dropout_p=0.1), plain, None),
        "torch SDPA, rows first": Training(rows_first, heads_last, None),
        "torch SDPA, one tensor": Training(lambda x: rows_first(*x.unbind(2)), in_one, None),
        "torch SDPA, two tensors": Training(lambda q, x: rows_first(q, *x.unbind(2)), in_two, None),
        "attention": Training(attention, plain),
        "attention, hopper forced": Training(of(attention, implementation="hopper"), plain),
        "attention, rows first": Training(of(attention, layout="bnhd"), heads_last),
        "attention, fp32": Training(attention, in_fp32, "torch SDPA, fp32"),
        "attention, fp32, simt forced": Training(
            of(attention, implementation="simt"), in_fp32, "torch SDPA, fp32"
        ),
        "attention, packed": Training(of(attention, **cu), packed, "varlen_attn"),
        "attention, attn_mask": Training(
            of(attention, attn_mask=seen), plain, "torch SDPA, attn_mask"
        ),
        "attention, key_ranges": Training(of(attention, key_ranges=ranges), plain),
        "attention, alibi_slopes": Training(of(attention, alibi_slopes=slopes), plain),
        "attention, dropout": Training(of(attention, dropout_p=0.1), plain, "torch SDPA, dropout"),
        "attention, sinks": Training(with_sinks, beside_sinks),
        "attention, gradient of the LSE": Training(of(attention, return_lse=True), plain),
        "scaled_dot_product_attention": Training(archflash.scaled_dot_product_attention, plain),
        "compat flash_attn_func": Training(
            flash_attn.flash_attn_func, heads_last, "torch SDPA, rows first"
        ),
        "compat flash_attn_varlen_func": Training(
            of(flash_attn.flash_attn_varlen_func, **of_lengths), packed, "varlen_attn"
        ),
        "compat flash_attn_qkvpacked_func": Training(
            flash_attn.flash_attn_qkvpacked_func, in_one, "torch SDPA, one tensor"
        ),
        "compat flash_attn_kvpacked_func": Training(
            flash_attn.flash_attn_kvpacked_func, in_two, "torch SDPA, two tensors"
        ),
        "compat FlashAttention-3": Training(
            flash_attn_interface.flash_attn_func, heads_last, "torch SDPA, rows first"
        ),
    }
    if device == "cuda":  # varlen_attn is there alone
        calls["varlen_attn"] = Training(varlen, packed, None)
    batches = [sets(batch, HEADS, ROWS, HEAD_DIM)[0] for batch in (1, 5, 2, 8, 3, 7, 4, 6)]
    calls["torch SDPA, batches that change"] = Training(sdpa, batches, None)
    calls["attention, batches that change"] = Training(
        attention, batches, "torch SDPA, batches that change"
    )
    long = [torch.randn(1, HEADS, ROWS + GROWING_STEPS, HEAD_DIM, dtype=half, device=device)] * 3
    growing = [
        tuple(x[:, :, :length].detach().requires_grad_() for x in long)
        for length in range(ROWS, ROWS + GROWING_STEPS)
    ]
    calls["attention, lengths growing by one"] = Training(attention, growing)
    return calls


def measure_training(
    calls: Mapping[str, Training], count: int, synchronize: Callable[[], object]
) -> dict[str, dict[str, Any]]:
    """Times calls whose gradients are needed, and their backward passes, with the garbage collector
    off. Each timed call follows another one of its kind, as in a model, whose layers are alike, and
    each round has an order of its own, as it matters what ran before.

    Args:
        calls: by name.
        count: measured calls of each kind.
        synchronize: waits for the device.

    Returns:
        For each name "forward", the forward pass alone, and "both", as `measure`, and "peer".
    """
    import torch

    def passes(call: Callable[..., Any], tensors: tuple[Any, ...]) -> object:
        given = call(*tensors)
        outputs = given if isinstance(given, tuple) else (given,)
        return torch.autograd.grad(outputs, tensors, [x.detach() for x in outputs])

    def forward(call: Callable[..., Any], tensors: tuple[Any, ...]) -> object:
        return call(*tensors)

    clock, ways = time.perf_counter_ns, {"forward": forward, "both": passes}
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in calls}
    names, shuffle = list(calls), random.Random(0).shuffle
    with without_garbage_collector():
        for number in range(-TENSOR_SETS, count):
            shuffle(names)
            for name in names:
                kind = calls[name]
                synchronize()
                inputs = [kind.inputs[(4 * number + i) % len(kind.inputs)] for i in range(4)]
                for way, function in ways.items():
                    function(kind.call, inputs.pop())
                    start = clock()
                    result = function(kind.call, inputs[-1])
                    end = clock()
                    del result
                    inputs.pop()
                    if number >= 0:
                        times[name][way].append((end - start) / 1e3)
    synchronize()
    return {
        name: {way: percentiles(us) for way, us in times[name].items()} | {"peer": kind.peer}
        for name, kind in calls.items()
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


def ratio_to_peer(training: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """The time of both passes of a call divided by that of PyTorch's; None for one of PyTorch's."""
    peer = training[name]["peer"]
    if peer not in training:
        return None
    return float(training[name]["both"]["p50"] / training[peer]["both"]["p50"])


def training_lines(training: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of calls with gradients."""
    width = max(len(name) for name in training)
    lines = [f"{'us per call'.ljust(width)} forward  both   p20    p80  of torch"]
    for name, found in training.items():
        ratio, both = ratio_to_peer(training, name), found["both"]
        lines.append(
            f"{name.ljust(width)} {found['forward']['p50']:6.1f} {both['p50']:6.1f} "
            f"{both['p20']:6.1f} {both['p80']:6.1f}" + ("" if ratio is None else f"  {ratio:.2f}")
        )
    return lines


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
