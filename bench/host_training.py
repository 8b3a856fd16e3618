"""Eager calls whose gradients are needed, and what they cost on the host: see host_overhead.py."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.candidates import torch_varlen
from bench.results import percentile

HEADS, ROWS, HEAD_DIM = 4, 64, 64
TENSOR_SETS = 16
# The key length of the growing call starts again after this many steps. The plan cache holds far
# fewer plans, so that every step misses it; and the lengths stay short enough that the device keeps
# up.
GROWING_STEPS = 2048


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
