"""What PyTorch's own kernels would do with a call: which one serves it, and whether it fails."""

from __future__ import annotations

from functools import lru_cache

from archflash import _archflash as _native
from archflash import _calibrated, _fused_kernels, _measured, _options, _registry

NAMES = {
    "torch-cudnn": "PyTorch's cuDNN kernel",
    "torch-flash": "PyTorch's flash kernel",
    "torch-efficient": "PyTorch's memory-efficient kernel",
}


WIDER_MASK = "a float32 attn_mask with 16-bit inputs needs plain operations"

# Options that _fused_kernels.fused_kernel is asked about, or that change no result.
_KNOWN_TO_FUSED_KERNELS = frozenset(
    ("causal", "window", "softcap", "sinks", "attn_mask", "alibi_slopes", "key_ranges",
     "block_mask", "return_lse", *_options.ADVICE)
)  # fmt: skip


# Options of the calls that `archflash calibrate` measures. Others cost PyTorch more.
_OF_CALIBRATED_CALLS = frozenset(
    ("causal", "attn_mask", "alibi_slopes", "key_ranges", "block_mask", *_options.ADVICE)
)


def kernel_of(
    problem: _native.Problem,
    capability: tuple[int, int] | None,
    dtype: str | None = None,
    *,
    dropout: bool = False,
    with_faults: bool = False,
) -> str | list[str]:
    """The fused kernel of PyTorch that `torch` uses for a problem, or why it uses none.

    Args:
        problem, capability: the call and the GPU.
        dtype: taken for that of the problem; none by default.
        dropout: whether PyTorch drops weights; no by default.
        with_faults: whether PyTorch itself is asked, which does not keep from kernels that fail.
    """
    if problem.kv_cache:
        return ["a KV cache needs a mask over its whole capacity"]
    if problem.dropout_p:
        return ["the random bits of rng_state need plain operations"]
    if mask_is_wider(problem) and not dropout:  # PyTorch's own function rounds it
        return [WIDER_MASK]
    if unknown := [name for name in problem.given if name not in _KNOWN_TO_FUSED_KERNELS]:
        return [f"{unknown[0]} needs plain operations"]
    return _fused_kernels.fused_kernel(
        device_type="cuda", capability=capability, dtype=dtype or problem.dtype, d=problem.d,
        dv=problem.dv, nq=problem.nq, nk=problem.nk, gqa=problem.heads_q != problem.heads_kv,
        causal=problem.causal, window=problem.window, softcap=problem.softcap, sinks=problem.sinks,
        q_offset_given=problem.q_offset_given, varlen=problem.varlen,
        masked=_says_which_keys(problem), alibi=problem.alibi_slopes, want_lse=problem.want_lse,
        fp8=problem.dtype.startswith("float8"), batch=problem.batch, heads=problem.heads_q,
        gradients=problem.needs_grad, dropout=dropout, with_faults=with_faults,
    )  # fmt: skip


_FLOAT32_MASK = 2  # Problem.mask in src/common/problem.h


def mask_is_wider(problem: _native.Problem) -> bool:
    """Whether a call of 16 bits has a float32 attn_mask, such as lists of keys become where its
    gradients are needed. PyTorch's fused kernels take none, and rounding would change the result.
    """
    return problem.mask == _FLOAT32_MASK and problem.dtype in _OF_FUSED_KERNELS


# Only for these dtypes `kernel_of` names a kernel.
_OF_FUSED_KERNELS = ("float16", "bfloat16")


def chosen_kernel(problem: _native.Problem, capability: tuple[int, int] | None) -> str | list[str]:
    """The fused kernel that PyTorch itself uses for a problem, whether it fails there or not; a
    list where it uses none.
    """
    if problem.dtype not in _OF_FUSED_KERNELS:
        return []  # each step of a decoding loop comes here: what takes longer is not asked
    return kernel_of(problem, capability, with_faults=True)


@lru_cache(maxsize=256)
def fails(
    problem: _native.Problem, capability: tuple[int, int] | None, kernel: str | None = None
) -> str | None:
    """How a kernel of PyTorch fails at a problem, as a sentence (`_pytorch_faults`); None if it
    does not.

    Args:
        problem, capability: the call and the GPU.
        kernel: "torch-cudnn", "torch-flash" or "torch-efficient"; None for the one that PyTorch
            itself would use, if it has one.
    """
    pytorchs = kernel or chosen_kernel(problem, capability)
    if capability is None or isinstance(pytorchs, list):
        return None
    masked = _says_which_keys(problem) or needs_mask(problem)
    failing = _fused_kernels.faults(
        capability=capability, batch=problem.batch, heads=problem.heads_q, nq=problem.nq,
        nk=problem.nk, d=problem.d, dv=problem.dv, causal=problem.causal, masked=masked,
        gradients=problem.needs_grad, scale=problem.scale,
    )  # fmt: skip
    what = failing.get(pytorchs)
    return None if what is None else f"{NAMES[pytorchs]} {what}"


def _says_which_keys(problem: _native.Problem) -> bool:
    """Whether a call has a mask as data from which PyTorch would make a mask of all scores."""
    return problem.attn_mask or problem.key_ranges or problem.block_mask


def may_serve(problem: _native.Problem) -> bool:
    """Whether a call has no packed sequences, cache, approximation, lists of keys, number of splits
    or batch_invariant, which PyTorch's kernels do not support.
    """
    plain = not problem.varlen and not problem.kv_cache and not problem.approximate
    plain = plain and not problem.dropout_p and not problem.key_indices
    return plain and problem.num_splits is None and not problem.batch_invariant


def needs_mask(problem: _native.Problem) -> bool:
    """Whether PyTorch needs a mask tensor that says which keys each query sees."""
    return _fused_kernels.needs_mask(
        causal=problem.causal,
        window=problem.window,
        q_offset_given=problem.q_offset_given,
        nq=problem.nq,
        nk=problem.nk,
    )


def differentiates(
    problem: _native.Problem,
    capability: tuple[int, int] | None,
    chosen: str | list[str] | None = None,
    *,
    dropout: bool = False,
) -> str | None:
    """The fused kernel of PyTorch that computes a call and its gradients as `torch` would have it,
    with weights dropped if `dropout` says so; None if none does.

    Args:
        problem, capability: the call and the GPU.
        chosen: what `chosen_kernel` says, where it is known and does not fail.
        dropout: as for `kernel_of`.
    """
    if problem.batch_invariant:
        return None
    of_few_keys = problem.window or problem.key_ranges or problem.block_mask
    if problem.dtype != "float32" and of_few_keys:
        return None  # PyTorch would make a mask of all scores, and skip nothing
    if problem.dtype == "float32" and problem.heads_q != problem.heads_kv:
        return None
    kernel = chosen
    if kernel is None or problem.dtype == "float32":
        kernel = differentiating_kernel(problem, capability, dropout=dropout)
    return None if isinstance(kernel, list) else kernel


def differentiating_kernel(
    problem: _native.Problem, capability: tuple[int, int] | None, *, dropout: bool = False
) -> str | list[str]:
    """The fused kernel of PyTorch that computes a call and its gradients, or why none does: as for
    `kernel_of`. In float32 that is the memory-efficient one, which takes what it takes in float16,
    but no heads that share one of k.
    """
    if problem.dtype != "float32":
        return kernel_of(problem, capability, dropout=dropout)
    reasons = kernel_of(problem, capability, "float16", dropout=dropout)
    return reasons if isinstance(reasons, list) else "torch-efficient"


def measured_kernel(problem: _native.Problem, capability: tuple[int, int] | None) -> str | None:
    """The kernel of PyTorch that serves a problem as it was measured; None if there is none."""
    of = differentiating_kernel if problem.needs_grad else kernel_of
    kernel = of(problem, capability)
    measured = _measured.find(problem, capability)
    if measured is None or isinstance(kernel, list):
        return None
    return kernel if serves_as_measured(kernel, problem, measured) else None


def serves_as_measured(
    kernel: str, problem: _native.Problem, measured: _measured.Measurement
) -> bool:
    """Whether a kernel of PyTorch was measured for problems of this kind and serves this one
    without a mask. With one it was measured without what `torch` does around it.
    """
    masked = problem.masked or needs_mask(problem)
    return kernel in measured.order and not masked and may_serve(problem)


def as_calibrated(
    problem: _native.Problem, capability: tuple[int, int] | None, calibrated: _calibrated.Prediction
) -> str | None:
    """Under which name the user measured what `torch` does with a problem; None if they did not."""
    if fails(problem, capability) or set(problem.given) - _OF_CALIBRATED_CALLS:
        return None
    if _registry.TORCH in calibrated.cost:
        return _registry.TORCH
    kernel = kernel_of(problem, capability)
    if isinstance(kernel, list) or problem.masked or needs_mask(problem):
        return None
    return kernel if kernel in calibrated.cost and may_serve(problem) else None
