"""A product with block scales in Triton's language, as a script that compiles it for 12.0."""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl


@triton.jit
def product(  # type: ignore[no-untyped-def]
    a_ptr,  # (M, K), packed by twos where an element has 4 bits
    a_scale_ptr,  # (M, K / GROUP)
    b_ptr,  # (N, K)
    b_scale_ptr,  # (N, K / GROUP)
    out_ptr,  # (M, N)
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,  # the types of A and B
    B: tl.constexpr,
    PACK: tl.constexpr,  # elements in a byte
    GROUP: tl.constexpr,  # elements of a scale
):
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    inner = tl.arange(0, K // PACK)
    groups = tl.arange(0, K // GROUP)
    a = tl.load(a_ptr + rows[:, None] * (K // PACK) + inner[None, :])
    b = tl.load(b_ptr + columns[None, :] * (K // PACK) + inner[:, None])
    a_scale = tl.load(a_scale_ptr + rows[:, None] * (K // GROUP) + groups[None, :])
    b_scale = tl.load(b_scale_ptr + columns[:, None] * (K // GROUP) + groups[None, :])
    out = tl.dot_scaled(a, a_scale, A, b, b_scale, B)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], out)


def main() -> None:
    """Writes a line of JSON for each kernel asked for, by its constants as JSON."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "e2m1": "*u8"}
    for constants in map(json.loads, sys.argv[1:]):
        scale = "*fp8e4nv" if constants["GROUP"] == 16 else "*u8"
        operands = [types[constants["A"]], scale, types[constants["B"]], scale, "*fp32"]
        signature = dict(zip(product.arg_names, operands, strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(product, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 120, 32))
        metadata = compiled.metadata
        row = {"kernel": metadata.name, "shared": metadata.shared, "warps": metadata.num_warps}
        print(json.dumps(row | {"ptx": compiled.asm["ptx"]}))


if __name__ == "__main__":
    main()
