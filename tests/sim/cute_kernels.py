"""Compiles CuTe-DSL kernels for Blackwell with no GPU, and records their launch.

The kernels are CUTLASS's examples and FlashAttention-4. Run as a script by a Python that has
nvidia-cutlass-dsl (and, for FlashAttention-4, flash-attn-4), with cute_driver.c in LD_PRELOAD:

    python cute_kernels.py CUTLASS FOLDER '{"kind": "attention", "d": 64, "nq": 9, ...}'
    python cute_kernels.py CUTLASS FOLDER '{"kind": "product", "m": 256, "n": 128, ...}'

CUTLASS is a checkout of the public repository, of the same version; FOLDER takes what is made.
Writes a line of JSON: the launch, the PTX and where the tensors are.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EXAMPLES = "examples/python/CuTeDSL"
KERNELS = ("cute/blackwell/kernel/attention/fmha", "cute/blackwell/kernel/dense_gemm")


def attention(problem: dict[str, Any]) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """Attention: the kernel, its tensors by name, and its arguments.

    Args:
        problem: d, nq, nk, heads, causal (aligned to the bottom right).
    """
    import cuda.bindings.driver as cuda
    import cutlass
    import fmha  # the example
    import torch

    d, nq, nk, heads = (problem[name] for name in ("d", "nq", "nk", "heads"))
    shapes = {
        "q": (1, nq, 1, heads, d),
        "k": (1, nk, 1, 1, d),
        "v": (1, nk, 1, 1, d),
        "out": (1, nq, 1, heads, d),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    masks = fmha.fmha_utils.MaskEnum
    scale = 1 / math.sqrt(d)
    kernel = fmha.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32,
        cutlass.Float32,
        (128, 128),
        d,
        False,  # persistent
        masks.WINDOW_MASK_INFERENCE if problem["causal"] else masks.RESIDUAL_MASK,
        False,  # exponentials by polynomials
        False,  # skipped corrections
        use_tma_store=True,
    )
    arguments = (
        *(view(tensor, 4) for tensor in tensors.values()),
        (1, nq, nq, nk, heads, 1, d, d),
        None,  # lengths of sequences of queries
        None,  # and of keys
        None,  # log-sum-exp
        None,  # sinks
        scale * math.log2(math.e),
        scale,
        1.0,  # of the output
        None,  # threshold of scores to skip
        None,  # window, left
        cutlass.Int32(0) if problem["causal"] else None,  # window, right
        None,
        None,
        cuda.CUstream(0),
        False,  # programmatic launch
    )
    return kernel, tensors, arguments


def flash_attention_4(problem: dict[str, Any]) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """FlashAttention-4's attention by pairs of CTAs: as `attention`.

    Args:
        problem: d, nq, nk, heads, causal (aligned to the bottom right); walk: "grid" for a pair of
            CTAs for each tile, "static" or "launch control" for pairs that take one tile after the
            other.
    """
    import cuda.bindings.driver as cuda
    import cutlass
    import torch
    from cutlass import utils
    from flash_attn.cute.flash_fwd_sm100 import AuxData, FlashAttentionForwardSm100

    d, nq, nk, heads = (problem[name] for name in ("d", "nq", "nk", "heads"))
    shapes = {
        "q": (1, nq, heads, d),
        "k": (1, nk, 1, d),
        "v": (1, nk, 1, d),
        "out": (1, nq, heads, d),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    tensors["lse"] = torch.zeros(1, heads, nq)
    # The static walk asks how many SMs the GPU has: two, so that one pair takes all tiles.
    utils.HardwareInfo = lambda: SimpleNamespace(get_device_multiprocessor_count=lambda: 2)
    kernel = FlashAttentionForwardSm100(
        d,
        qhead_per_kvhead=heads,
        is_causal=problem["causal"],
        # At head dimension 256 there is room for one tile of queries in a CTA.
        q_stage=1 if d == 256 else 2,
        use_s_ping_pong=d == 256,
        use_2cta_instrs=True,
        is_static_persistent=problem["walk"] == "static",
        use_clc_scheduler=problem["walk"] == "launch control",
    )
    views = (view(tensor, tensor.dim() - 1) for tensor in tensors.values())
    # Nothing else that a call may have: lengths, pages, windows, sinks, descales, sparse blocks;
    # then, behind the data of a mask's function, what other walks need.
    unused = (*[None] * 10, AuxData(), *[None] * 8)
    arguments = (*views, cutlass.Float32(1 / math.sqrt(d)), *unused, cuda.CUstream(0))
    return kernel, tensors, arguments


def gemm(problem: dict[str, Any]) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """C (m, n) = A (m, k) B (n, k)^T, float32 from a type of torch: as `attention`.

    Args:
        problem: m, n, k; tile: M and N of an instruction; pair: whether of cta_group::2; cluster:
            CTAs along M and N; dtype; a_k, b_k: whether A and B are K-major.
    """
    import cuda.bindings.driver as cuda
    import cutlass
    import dense_gemm  # the example
    import torch

    m, n, k = (problem[name] for name in ("m", "n", "k"))
    dtype = getattr(torch, problem["dtype"])

    def tensor(rows: int, columns: int, by_rows: bool, dtype: Any) -> Any:
        shape = (1, rows, columns) if by_rows else (1, columns, rows)
        return torch.zeros(shape, dtype=dtype).permute((1, 2, 0) if by_rows else (2, 1, 0))

    tensors = {
        "a": tensor(m, k, problem["a_k"], dtype),
        "b": tensor(n, k, problem["b_k"], dtype),
        "out": tensor(m, n, True, torch.float32),
    }
    kernel = dense_gemm.DenseGemmKernel(
        cutlass.Float32,
        problem["pair"],
        tuple(problem["tile"]),
        tuple(problem["cluster"]),
        True,  # TMA stores
    )
    leading = (int(problem["a_k"]), int(problem["b_k"]), 1)
    views = [view(t, at) for t, at in zip(tensors.values(), leading, strict=True)]
    return kernel, tensors, (*views, cuda.CUstream(0))


def view(tensor: Any, leading: int) -> Any:
    """A tensor of torch as the DSL takes it; `leading`: its contiguous dimension."""
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=leading)


def record(cutlass_folder: Path, folder: Path, problem: dict[str, Any]) -> dict[str, Any]:
    """The launch of one call.

    Args:
        cutlass_folder: the checkout.
        folder: an empty one.
        problem: what a function of MAKERS takes; kind: its name.
    """
    os.environ |= {
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "RECORD": str(folder / "launches"),
    }
    examples = cutlass_folder / EXAMPLES
    sys.path[:0] = [str(examples), *(str(examples / kernel) for kernel in KERNELS)]
    from cutlass import cute
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    # It asks a driver through another library.
    CudaDialectJitCompiledFunction.num_devices = 1
    kernel, tensors, arguments = MAKERS[problem["kind"]](problem)
    compiled = cute.compile(kernel, *arguments, options="--opt-level=2")
    (file,) = folder.glob("*.ptx")
    ptx = file.read_text()
    sizes = parameters(ptx)
    os.environ["SIZES"] = ",".join(str(size) for _, size in sizes)
    compiled(*arguments)
    (launch,) = (folder / "launches").read_text().splitlines()
    result: dict[str, Any] = json.loads(launch)
    return result | {
        "ptx": ptx,
        "aligns": [align for align, _ in sizes],
        "places": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }


MAKERS = {"attention": attention, "FlashAttention-4": flash_attention_4, "product": gemm}


def parameters(ptx: str) -> list[tuple[int, int]]:
    """The alignment and the bytes of each parameter of a module's one kernel."""
    start = ptx.index(".entry")
    found = []
    for line in re.findall(r"\.param[^\n]+", ptx[start : ptx.index("\n)", start)]):
        array = re.search(r"\.align (\d+) \.b8\s+\w+\[(\d+)\]", line)
        number = re.search(r"\.[bufs](8|16|32|64)\s", line)
        if array:
            found.append((int(array[1]), int(array[2])))
        elif number:
            found.append((int(number[1]) // 8,) * 2)
        else:
            raise ValueError(f"not a parameter: {line}")
    return found


if __name__ == "__main__":
    print(json.dumps(record(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))))
