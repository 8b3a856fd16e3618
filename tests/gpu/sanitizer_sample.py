"""Random calls of every kernel for compute-sanitizer, the same for the same seed: some with masks
as data, with dropout and with gradients.

    compute-sanitizer --tool racecheck --kernel-name kns=attention_fwd \
        python -m tests.gpu.sanitizer_sample --seed 0 --count 60 [--kernel NAME]

Tools: memcheck, racecheck, synccheck; and initcheck, without --kernel-name: it takes what kernels
that it does not watch have written for uninitialised. tests/core_set judges the numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch

import archflash

from .gpu_cases import DEVICE, cu_seqlens, int32, kernels, rand

WITH_GRADIENTS = ("simt", "ampere", "hopper")


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
    if rng.random() < 0.4:
        call |= random_mask(rng, shapes, "cu_seqlens_q" in call, kind)
    if rng.random() < 0.15:
        call["dropout_p"] = 0.2
        call["rng_state"] = torch.tensor([rng.randrange(1000), 0], device=DEVICE)
    return kernel, [rand(*shape, seed=i).to(kind) for i, shape in enumerate(shapes)], call


def random_mask(
    rng: random.Random, shapes: Sequence[tuple[int, ...]], packed: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Options with a mask as data for a call whose q, k and v have these shapes."""
    heads_q = shapes[0][1]
    slopes = {"alibi_slopes": rand(heads_q, seed=2).abs()}
    if packed:
        return slopes
    batch, _, rows, _ = shapes[0]
    keys = shapes[1][2]
    heads = rng.choice([1, heads_q])
    noise = rand(batch, heads, rows, keys, seed=3)
    starts = (noise[..., :2].abs() * keys).int() if keys >= 2 else int32(0).expand(1, 1, rows, 2)
    ranges = torch.stack([starts, starts + rng.choice([1, 40, 200])], dim=-1).contiguous()
    return rng.choice(
        [
            slopes,
            {"attn_mask": noise > -0.5},
            {"attn_mask": noise.to(dtype if dtype.itemsize == 2 else torch.float32)},
            {"key_ranges": ranges},
        ]
    )


def attend(kernel: str, tensors: Sequence[torch.Tensor], call: dict[str, Any]) -> None:
    """Makes a call, and in 16 and 32 bits, where the kernel has them, also its gradients."""
    differentiable = tensors[0].dtype.itemsize > 1 and kernel in WITH_GRADIENTS
    leaves = [x.detach().requires_grad_(differentiable) for x in tensors]
    result = archflash.attention(*leaves, implementation=kernel, **call)
    outputs = result if isinstance(result, tuple) else (result,)
    if differentiable:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])


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
            attend(kernel, tensors, call)
        except archflash.ForcedImplementationError:
            refused += 1
            continue
        torch.cuda.synchronize()
        made += 1
    print(f"{made} calls made, {refused} refused")


if __name__ == "__main__":
    main()
