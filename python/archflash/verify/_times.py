"""A few times of every kernel and of PyTorch, with the clock and the power that the GPU had."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from typing import Any

import torch

import archflash
from archflash import _registry
from archflash.verify._checks import planned
from archflash.verify._making import FP8, Call, Maker
from archflash.verify._setup import Item, Setup, Told

# Words by nvidia-smi's names for them.
QUERY = {
    "clocks.sm": "clock_mhz", "power.draw": "power_w", "power.limit": "power_limit_w",
    "temperature.gpu": "celsius",
}  # fmt: skip
WARM_SECONDS, ROUNDS = 0.3, 15
# Name, dtype, heads of q and of k, query rows, keys, head dimension, whether causal.
SHAPES = (
    ("bf16 d128 causal", "bfloat16", (32, 8), 8192, 8192, 128, True),
    ("bf16 d64", "bfloat16", (32, 32), 4096, 4096, 64, False),
    ("bf16 one row", "bfloat16", (64, 8), 1, 65536, 128, False),
    ("e4m3 d128", "float8_e4m3fn", (32, 8), 8192, 8192, 128, False),
    ("fp32 d64", "float32", (16, 16), 2048, 2048, 64, True),
)


def time_items(setup: Setup) -> list[Item]:
    """Each shape by each kernel, and by PyTorch."""
    return [
        Item(
            f"{name}, {kernel}",
            functools.partial(time, kernel, dtype, heads, (nq, nk), d, {"causal": causal}),
            90,
        )
        for name, dtype, heads, nq, nk, d, causal in SHAPES
        for kernel in (*setup.kernels, _registry.TORCH)
        if takes(kernel, dtype)
    ]


def takes(name: str, dtype: str) -> bool:
    """Whether a kernel, or PyTorch, is to be timed with a dtype."""
    if name == _registry.TORCH:  # for 8 bits it has plain operations only
        return dtype not in FP8
    return _registry.takes(name, dtype) and (
        dtype == "float32" or _registry.uses_tensor_cores(name)
    )


def time(
    kernel: str, dtype: str, heads: tuple[int, int], rows: tuple[int, int], d: int, call: Call,
    setup: Setup,
) -> Told:  # fmt: skip
    """The median of single calls, each between two events, after the clock has settled."""
    nq, nk = rows
    while nk > 1024 and 10 * nk * heads[1] * d * 4 > setup.memory:
        nq, nk = max(nq // 2, 1), nk // 2
    q, k, v = Maker(setup, f"time {dtype} {d}").qkv(dtype, (d, d), heads, nq, nk)
    if kernel != _registry.TORCH:
        planned(kernel, q, k, v, call, setup)

    def run() -> Any:
        return archflash.attention(q, k, v, implementation=kernel, **call)

    run()
    each = max(elapsed_ms(run, 3) / 3, 1e-3)
    for _ in range(int(WARM_SECONDS * 1e3 / each) + 1):
        run()
    state = gpu_state(torch.device(setup.device).index or 0)  # read while the queue has work
    torch.cuda.synchronize(setup.device)
    calls = max(1, int(2 / each))  # short calls are timed together: events take microseconds, too
    times = sorted(1e3 * elapsed_ms(run, calls) / calls for _ in range(ROUNDS))
    seen = nq * nk if not call["causal"] else nq * nk - nq * (nq - 1) / 2
    microseconds = times[len(times) // 2]
    numbers = {
        "rows": nq, "keys": nk, "p50_us": round(microseconds, 2),
        "p20_us": round(times[len(times) // 5], 2), "p80_us": round(times[-len(times) // 5 - 1], 2),
        "tflops": round(4e-6 * heads[0] * seen * d / microseconds, 2), **state,
    }  # fmt: skip
    said = f"{microseconds:.1f} us, {numbers['tflops']} TFLOP/s" + "".join(
        f", {state[name]} {unit}"
        for name, unit in (("clock_mhz", "MHz"), ("power_w", "W"))
        if name in state
    )
    return Told(said, numbers=numbers)


def elapsed_ms(run: Callable[[], Any], calls: int) -> float:
    """Milliseconds on the GPU of several calls."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def gpu_state(index: int) -> dict[str, float]:
    """Clock, power, power limit and temperature of a CUDA device at this moment; what nvidia-smi
    does not say is left out.
    """
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    chosen = [f"--id={uuid if uuid.startswith('GPU-') else f'GPU-{uuid}'}"] if uuid else []
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    line = done.stdout.strip().partition("\n")[0]
    for name, word in zip(QUERY.values(), line.split(","), strict=False):
        try:
            found[name] = float(word)
        except ValueError:  # "[N/A]"
            continue
    return found
