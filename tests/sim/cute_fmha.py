"""Compiles CUTLASS's CuTe-DSL attention kernel for Blackwell with no GPU, and records its launch.

Run as a script by a Python that has nvidia-cutlass-dsl, with cute_driver.c in LD_PRELOAD:

    python cute_fmha.py CUTLASS FOLDER '{"d": 64, "nq": 9, "nk": 9, "heads": 2, "causal": false}'

CUTLASS is a checkout of the public repository, of the same version; FOLDER takes what is made.
Writes a line of JSON: the launch, the PTX and where the tensors q, k, v and out are.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

EXAMPLES = "examples/python/CuTeDSL"
KERNEL = "cute/blackwell/kernel/attention/fmha"


def record(cutlass_folder: Path, folder: Path, problem: dict[str, Any]) -> dict[str, Any]:
    """The launch of one attention call.

    Args:
        cutlass_folder: the checkout.
        folder: an empty one.
        problem: d, nq, nk, heads, causal (aligned to the bottom right).
    """
    os.environ |= {
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "RECORD": str(folder / "launches"),
    }
    sys.path[:0] = [str(cutlass_folder / EXAMPLES / KERNEL), str(cutlass_folder / EXAMPLES)]
    import cuda.bindings.driver as cuda
    import cutlass
    import fmha  # the example
    import torch
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    # It asks a driver through another library.
    CudaDialectJitCompiledFunction.num_devices = 1
    d, nq, nk, heads = (problem[name] for name in ("d", "nq", "nk", "heads"))
    shapes = {
        "q": (1, nq, 1, heads, d),
        "k": (1, nk, 1, 1, d),
        "v": (1, nk, 1, 1, d),
        "out": (1, nq, 1, heads, d),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    views = [
        from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=4)
        for tensor in tensors.values()
    ]
    masks = fmha.fmha_utils.MaskEnum
    scale = 1 / math.sqrt(d)
    attention = fmha.BlackwellFusedMultiHeadAttentionForward(
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
        *views,
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
    compiled = cute.compile(attention, *arguments, options="--opt-level=2")
    (file,) = folder.glob("*.ptx")
    ptx = file.read_text()
    sizes = parameters(ptx)
    os.environ["SIZES"] = ",".join(str(size) for _, size in sizes)
    compiled(*arguments)
    (launch,) = (folder / "launches").read_text().splitlines()
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    result: dict[str, Any] = json.loads(launch)
    return result | {
        "ptx": ptx,
        "aligns": [align for align, _ in sizes],
        "places": places,
        "shapes": shapes,
    }


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
