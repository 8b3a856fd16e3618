"""Random calls of every kernel for compute-sanitizer, the same for the same seed.

    compute-sanitizer --tool racecheck --kernel-name kns=attention_fwd \
        python -m tests.gpu.sanitizer_sample --seed 0 --count 60 [--kernel NAME]

Tools: memcheck, racecheck, synccheck, initcheck. tests/core_set judges the numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch

import archflash

from .gpu_cases import cu_seqlens, int32, kernels, rand


def random_call(
    rng: random.Random, names: Sequence[str]
) -> tuple[str, list[torch.Tensor], dict[str, Any]]:
    """One of the kernels, q, k and v, and the options of a call that the kernel serves."""
    kernel = rng.choice(names)
    served = {i.name: i.dtypes for i in archflash.implementations()}[kernel]
    dtype = rng.choice([name for name in served if name != "float64"])
    fp8 = dtype.startswith("float8")
    step = 16 if fp8 else 8
    d = rng.randrange(step, 257, step)
    dv = d if rng.random() < 0.7 else rng.randrange(step, 257, step)
    heads_kv = rng.randint(1, 3)
    heads_q = heads_kv * rng.randint(1, 4)
    lengths = [rng.choice([0, 1, 5, 17, 64, 100, 129, 300]) for _ in range(rng.randint(1, 4))]
    keys = [rng.choice([0, 1, 7, 64, 77, 128, 200, 500]) for _ in lengths]
    call: dict[str, Any] = {"causal": rng.random() < 0.5, "return_lse": rng.random() < 0.5}
    if rng.random() < 0.3:
        call["window"] = (rng.choice([None, 0, 9, 100]), rng.choice([None, 0, 9, 100]))
    if rng.random() < 0.3:
        call["softcap"] = rng.choice([2.0, 30.0, 1e6])
    if rng.random() < 0.3:
        call["sinks"] = rand(heads_q, seed=1)
    if rng.random() < 0.3:
        call["q_offset"] = rng.choice([0, -3, 40, int32(*(9 * i for i in range(len(lengths))))])
    if rng.random() < 0.5:
        call["cu_seqlens_q"], call["cu_seqlens_k"] = cu_seqlens(lengths), cu_seqlens(keys)
        rows, columns = sum(lengths) + rng.choice([0, 70]), sum(keys)
        shapes = [(rows, heads_q, d), (columns, heads_kv, d), (columns, heads_kv, dv)]
    else:
        rows, columns, batch = lengths[0], keys[0], len(lengths)
        shapes = [
            (batch, heads, length, dim)
            for heads, length, dim in (
                (heads_q, rows, d),
                (heads_kv, columns, d),
                (heads_kv, columns, dv),
            )
        ]
    kind = getattr(torch, dtype)
    return kernel, [rand(*shape, seed=i).to(kind) for i, shape in enumerate(shapes)], call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--kernel", choices=kernels(), help="calls of this kernel alone")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    names = [arguments.kernel] if arguments.kernel else kernels()
    made = refused = 0
    while made < arguments.count:
        kernel, tensors, call = random_call(rng, names)
        try:
            archflash.attention(*tensors, implementation=kernel, **call)
        except archflash.ForcedImplementationError:
            refused += 1
            continue
        torch.cuda.synchronize()
        made += 1
    print(f"{made} calls made, {refused} refused")


if __name__ == "__main__":
    main()
