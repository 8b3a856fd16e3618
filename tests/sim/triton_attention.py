"""Small attention kernels in Triton's language: PTX that another compiler makes.

Run as a script it compiles the kernel, with no GPU; the test does so in a process of its own, since
the Triton that is pinned need not be the one that torch brings.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q_ptr,  # (heads, nq, D), contiguous
    k_ptr,  # (heads, nk, D)
    v_ptr,  # (heads, nk, D)
    out_ptr,  # (heads, nq, D)
    nq,
    nk,
    scale,  # of the scores, for 2^x
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,  # aligned to the bottom right
):
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1)
    columns = tl.arange(0, D)
    q_ptr += head * nq * D
    k_ptr += head * nk * D
    v_ptr += head * nk * D
    out_ptr += head * nq * D
    places = rows[:, None] * D + columns[None, :]
    q = tl.load(q_ptr + places, mask=rows[:, None] < nq, other=0.0)
    largest = tl.full([BLOCK_Q], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    out = tl.zeros([BLOCK_Q, D], dtype=tl.float32)
    end = nk
    if CAUSAL:
        end = tl.minimum(nk, (tl.program_id(0) + 1) * BLOCK_Q + nk - nq)
    for first in tl.range(0, end, BLOCK_K, num_stages=3):
        keys = first + tl.arange(0, BLOCK_K)
        k = tl.load(
            k_ptr + keys[None, :] * D + columns[:, None], mask=keys[None, :] < nk, other=0.0
        )
        scores = tl.dot(q, k) * scale
        seen = keys[None, :] < nk
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + nk - nq)
        scores = tl.where(seen, scores, -1e30)
        risen = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - risen[:, None])
        correction = tl.exp2(largest - risen)
        total = total * correction + tl.sum(p, 1)
        out = out * correction[:, None]
        v = tl.load(
            v_ptr + keys[:, None] * D + columns[None, :], mask=keys[:, None] < nk, other=0.0
        )
        out = tl.dot(p.to(tl.float16), v, out)
        largest = risen
    out = out / total[:, None]
    tl.store(out_ptr + places, out.to(tl.float16), mask=rows[:, None] < nq)


@triton.jit
def attention_tma(  # type: ignore[no-untyped-def]
    q_map,  # (heads, nq, D), a tensor map
    k_map,  # (heads, nk, D)
    v_map,  # (heads, nk, D)
    out_map,  # (heads, nq, D)
    nq,
    nk,
    scale,  # of the scores, for 2^x
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,  # aligned to the bottom right
    SPECIALISED: tl.constexpr,  # warps of their own for loads, products and the softmax
):
    row = tl.program_id(0) * BLOCK_Q
    rows = row + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1)
    q = q_map.load([head, row, 0]).reshape(BLOCK_Q, D)
    largest = tl.full([BLOCK_Q], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    out = tl.zeros([BLOCK_Q, D], dtype=tl.float32)
    end = nk
    if CAUSAL:
        end = tl.minimum(nk, row + BLOCK_Q + nk - nq)
    for first in tl.range(0, end, BLOCK_K, warp_specialize=SPECIALISED, num_stages=2):
        keys = first + tl.arange(0, BLOCK_K)
        k = k_map.load([head, first, 0]).reshape(BLOCK_K, D)
        scores = tl.dot(q, k.T) * scale
        seen = keys[None, :] < nk
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + nk - nq)
        scores = tl.where(seen, scores, -1e30)
        risen = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - risen[:, None])
        correction = tl.exp2(largest - risen)
        total = total * correction + tl.sum(p, 1)
        out = out * correction[:, None]
        v = v_map.load([head, first, 0]).reshape(BLOCK_K, D)
        out = tl.dot(p.to(tl.float16), v, out)
        largest = risen
    out = out / total[:, None]
    out_map.store([head, row, 0], out.to(tl.float16).reshape(1, BLOCK_Q, D))


def compile_for(capability: int, constants: dict[str, Any]) -> Any:
    """A kernel compiled for a compute capability (80: 8.0); needs no GPU.

    Args:
        capability: 10 * major + minor.
        constants: D, BLOCK_Q, BLOCK_K, CAUSAL; SPECIALISED, too, of the kernel with tensor maps.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "SPECIALISED" in constants:
        kernel, attributes = attention_tma, {}
        rows = [constants[name] for name in ("BLOCK_Q", "BLOCK_K", "BLOCK_K", "BLOCK_Q")]
        types = [f"tensordesc<fp16[1,{n},{constants['D']}]>" for n in rows]
    else:
        kernel = attention
        types = ["*fp16"] * 4
        # Pointers are multiples of 16 bytes: loads may be wide.
        attributes = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    signature = dict(zip(kernel.arg_names, [*types, "i32", "i32", "fp32"], strict=False))
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 3}
    )


def main() -> None:
    """Writes a line of JSON for each kernel asked for: capability, then constants as JSON."""
    for constants in map(json.loads, sys.argv[2:]):
        compiled = compile_for(int(sys.argv[1]), constants)
        metadata = {
            "kernel": compiled.metadata.name,
            "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps,
            "maps": compiled.metadata.tensordesc_meta or [],
            "ptx": compiled.asm["ptx"],
        }
        print(json.dumps(metadata))


if __name__ == "__main__":
    main()
