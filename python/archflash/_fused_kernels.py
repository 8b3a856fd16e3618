"""Which of PyTorch's fused attention kernels serves a call, and which of them fail there
(`_pytorch_faults`), told without a GPU.
"""

from __future__ import annotations

import functools
import os

import torch
from torch.torch_version import TorchVersion

from archflash import _pytorch_faults


def fused_kernel(
    *, device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype | str, d: int,
    dv: int, nq: int, nk: int, causal: bool, window: bool, softcap: float | None, sinks: bool,
    q_offset_given: bool, varlen: bool, masked: bool, want_lse: bool, fp8: bool, gqa: bool = False,
    alibi: bool = False, batch: int = 1, heads: int = 1, gradients: bool = False,
    dropout: bool = False, with_faults: bool = False,
) -> str | list[str]:  # fmt: skip
    """Which of PyTorch's fused tensor-core kernels `torch` uses for a call, or why it uses none.

    Args:
        device_type: "cuda", "cpu", ...
        capability: compute capability ``(major, minor)``; None where there is no GPU.
        dtype: of q, k and v, a torch dtype or its name.
        d: head dimension of q and k.
        dv: head dimension of v.
        nq: number of queries.
        nk: number of keys.
        causal: as in the call.
        window: whether a window is given.
        softcap: as in the call; None or 0 for none.
        sinks: whether sinks are given.
        q_offset_given: whether q_offset is given.
        varlen: whether cu_seqlens are given.
        masked: whether attn_mask, key_ranges or block_mask is given.
        want_lse: whether the log-sum-exp is asked for.
        fp8: whether the inputs are FP8.
        gqa: whether q has more heads than k; no by default.
        alibi: whether alibi_slopes are given; no by default.
        batch: number of sequences; 1 by default.
        heads: heads of q; 1 by default.
        gradients: whether the gradients of the call are needed; no by default.
        dropout: whether PyTorch drops weights; no by default.
        with_faults: whether a kernel that fails at the call (`_pytorch_faults`) is used, as by
            PyTorch itself; `torch` does not use it.

    Returns:
        "torch-cudnn", "torch-flash" or "torch-efficient"; or one sentence per reason.
    """
    name = str(dtype).removeprefix("torch.")
    if device_type != "cuda" or capability is None:
        return ["PyTorch's fused kernels need a CUDA device"]
    reasons = []
    if fp8:
        reasons.append("FP8 inputs are dequantised to float32 first")
    elif name not in ("float16", "bfloat16"):
        reasons.append(f"{name} is not a 16-bit dtype, so tensor cores do not apply")
    elif name == "bfloat16" and capability < (8, 0):
        reasons.append(f"bfloat16 needs compute capability 8.0, this is {_dotted(capability)}")
    if capability > (12, 1):
        reasons.append(
            f"PyTorch's fused kernels end at compute capability 12.1, this is {_dotted(capability)}"
        )
    if varlen:
        reasons.append("cu_seqlens needs a Tq x Tk mask")
    if softcap:
        reasons.append("softcap needs plain operations")
    if sinks:
        reasons.append("sinks need plain operations")
    if alibi:
        reasons.append("alibi_slopes need plain operations")
    if want_lse:
        reasons.append("the log-sum-exp needs plain operations")
    if nq == 0 or nk == 0:
        reasons.append("PyTorch's fused kernels take no empty sequence")
    if reasons:
        return reasons

    aligned = d % 8 == 0 and dv % 8 == 0
    flash = []
    masked = masked or needs_mask(
        causal=causal, window=window, q_offset_given=q_offset_given, nq=nq, nk=nk
    )
    if masked:
        flash.append("takes no mask, window or offset")
    if d != dv or d > 256:
        flash.append("needs D = Dv up to 256")
    cudnn = []
    limit = _cudnn_head_dim(capability)
    if not aligned or max(d, dv) > limit:
        cudnn.append(f"needs D and Dv in multiples of 8 up to {limit}")
    if nk == 1:
        cudnn.append("takes no single key")
    if capability < (8, 0):
        flash.append("needs compute capability 8.0")
        cudnn.append("needs compute capability 8.0")
    efficient = []
    if not aligned:
        efficient.append("needs D and Dv in multiples of 8")
    if gqa:
        efficient.append("needs as many key heads as query heads")
    kernels = [("torch-flash", "flash", flash), ("torch-efficient", "memory-efficient", efficient)]
    first = 0 if cudnn_comes_first(capability) else len(kernels)
    kernels.insert(first, ("torch-cudnn", "cuDNN", cudnn))
    failing = {}
    if not with_faults:
        failing = faults(
            capability=capability, batch=batch, heads=heads, nq=nq, nk=nk, d=d, dv=dv,
            causal=causal, masked=masked, gradients=gradients, dropout=dropout,
        )  # fmt: skip
    for kernel, _, why in kernels:
        if kernel in failing:
            why.append(failing[kernel])
        if not why:
            return kernel
    return [f"PyTorch's {words} kernel {' and '.join(why)}" for _, words, why in kernels]


def faults(
    *, capability: tuple[int, int], batch: int, heads: int, nq: int, nk: int, d: int, dv: int,
    causal: bool, masked: bool, gradients: bool, scale: float = 1.0, dropout: bool = False,
    cudnn: int | None = None,
) -> dict[str, str]:  # fmt: skip
    """The kernels of PyTorch that fail at a call, and what happens there (`_pytorch_faults`).

    Args:
        capability: compute capability of the GPU.
        batch, heads, nq, nk, d, dv: sizes; heads are those of q.
        causal: as in the call.
        masked: whether PyTorch needs a mask tensor.
        gradients: whether the gradients of the call are needed.
        scale: as PyTorch gets it; it is positive where `torch` serves the call.
        dropout: whether weights are dropped; no by default.
        cudnn: version of cuDNN; that of this PyTorch by default.
    """
    cudnn = cudnn_version() if cudnn is None else cudnn
    call = _pytorch_faults.Call(
        capability, cudnn, batch, heads, nq, nk, d, dv,
        masked, causal and not masked, gradients, scale, dropout,
    )  # fmt: skip
    return _pytorch_faults.find(call)


def needs_mask(*, causal: bool, window: bool, q_offset_given: bool, nq: int, nk: int) -> bool:
    """Whether PyTorch needs a mask tensor that says which keys each query sees."""
    # One query sees every key of the default causal alignment, so decoding needs no mask.
    return window or (causal and (q_offset_given or nq not in (1, nk)))


# The version of cuDNN that PyTorch 2.11 comes with. It is assumed if this PyTorch has none, such as
# a CPU build that is asked about a GPU.
_CUDNN_ELSEWHERE = 91900


@functools.cache
def cudnn_version() -> int:
    """The version of the cuDNN that PyTorch uses: 91900 is 9.19.0."""
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # the installed cuDNN does not fit this PyTorch
        return 0
    return _CUDNN_ELSEWHERE if version is None else int(version)


@functools.cache
def _prefers_cudnn(torch_version: str) -> bool:
    return bool(TorchVersion(torch_version) >= (2, 10))  # type: ignore[operator]


def cudnn_comes_first(capability: tuple[int, int]) -> bool:
    """Whether PyTorch asks its cuDNN kernel before its others on GPUs of a compute capability.

    It does so on 9.x and 10.x from PyTorch 2.10 on, if cuDNN is newer than 9.15.0
    (check_prefer_cudnn_attention in its sdp_utils.cpp). Older versions of cuDNN have faults with
    lengths that are not multiples of 128, so archflash does not ask for them either.
    """
    return (
        capability[0] in (9, 10)
        and cudnn_version() > 91500
        and _prefers_cudnn(str(torch.__version__))
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )


def _cudnn_head_dim(capability: tuple[int, int]) -> int:
    """The largest head dim that PyTorch gives to cuDNN for a forward pass."""
    version = cudnn_version()
    # From torch 2.14 on also on 10.x; PyTorch's guard for 10.7 is newer.
    wide = capability[0] == 10 and version > (92500 if capability[1] == 7 else 92200)
    return 256 if wide or (capability == (9, 0) and version >= 91000) else 128


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
