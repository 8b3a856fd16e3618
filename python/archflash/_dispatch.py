"""Decides which implementation serves a call, and says why the others do not. Deciding needs no
GPU, and nothing here launches a kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeGuard

from archflash import _archflash as _native
from archflash import _measured, _options, _proofs, _registry, _torch
from archflash._errors import ForcedImplementationError, NotCompiledError, UnsupportedError

logger = logging.getLogger("archflash")

MINIMUM_DRIVER = 580  # the driver that CUDA 13.0 needs, whose runtime is in the wheel
_FORCE_VARIABLE = "ARCHFLASH_FORCE_IMPLEMENTATION"
_FALLBACK_VARIABLE = "ARCHFLASH_FALLBACK"
_SIM_DEVICE_VARIABLE = "ARCHFLASH_SIM_DEVICE"

# What force() has set in this context. It overrides the environment variable; an argument of the
# call overrides it.
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "archflash_forced", default=os.environ.get(_FORCE_VARIABLE) or None
)
forced = _forced.get
if forced() is not None:
    _native.note_forced()


@contextlib.contextmanager
def force(name: str) -> Iterator[None]:
    """Forces an implementation for the calls inside a `with` block, in this thread or task.

    Args:
        name: one of the names that `archflash.implementations()` lists.

    Raises:
        ForcedImplementationError: `name` is not one of them. A call that the forced implementation
            cannot serve raises it too.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(1, 2, 5, 8)
        >>> with archflash.force("torch"):
        ...     archflash.attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """
    check_name(name)
    _native.note_forced()
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def check_name(name: object) -> None:
    """Raises ForcedImplementationError unless an implementation has that name."""
    if not (isinstance(name, str) and name in _registry.names()):
        raise ForcedImplementationError(
            f"no implementation is called {_native.given(name)}: "
            f"this build has {', '.join(_registry.names())}"
        )


@dataclass(frozen=True)
class Decision:
    """What `archflash.explain` returns.

    Attributes:
        chosen: the name of the implementation that serves the call.
        why: one sentence on why it was chosen.
        reasons: for each other implementation, why it was not chosen; in the order in which they
            were asked.
        problem: the call as planning sees it.
        device: the GPU that was planned for; None for tensors on the CPU.
        plan: the launches that will be made; None for `torch`.
        fallback: whether `torch` serves the call because no kernel can.
        unproved: the kernels that would come before the chosen one, and have never run on a GPU of
            this compute capability.
    """

    chosen: str
    why: str
    reasons: dict[str, list[str]]
    problem: _native.Problem
    device: _native.Device | None
    plan: _native.LaunchPlan | None
    fallback: bool
    unproved: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{describe_problem(self.problem)} on {describe_device(self.device)}"]
        lines.append(f"  chosen  {self.chosen}: {self.why}")
        if self.plan is not None:
            lines += [f"          {name}: {text}" for name, text in plan_facts(self.plan)]
        for name, reasons in self.reasons.items():
            lines += [f"  not     {name}: {reason}" for reason in reasons]
        return "\n".join(lines)


def describe_problem(problem: _native.Problem) -> str:
    """The dtype, shapes and features of a problem, in one line."""
    if problem.kv_cache:
        shape = f"{problem.batch} sequences, heads {problem.heads_q}"
        shape += f" over {problem.heads_kv}" if problem.heads_q != problem.heads_kv else ""
        shape += f", {problem.nq} queries" + (" in all" if problem.varlen else "")
        shape += f", a cache of up to {problem.nk} keys"
        shape += f" each in pages of {problem.page_size}" if problem.page_size else " each"
        shape += f" in {problem.kv_dtype}" if problem.kv_dtype != problem.dtype else ""
        shape += f", head dim {problem.d}"
        shape += f" and {problem.dv}" if problem.d != problem.dv else ""
        shape += f", {problem.n_new} new keys" if problem.n_new else ""
        shape += f", {problem.rotary_dim} rotated columns" if problem.rotary_dim else ""
        shape += ", qv" if problem.qv_align else ""
        shape += f", chunks of {problem.attention_chunk}" if problem.attention_chunk else ""
    elif problem.varlen:
        kv = f"{problem.nk}, {problem.heads_kv}"
        shape = f"{problem.batch} sequences packed into q "
        shape += f"({problem.nq}, {problem.heads_q}, {problem.d}) "
        shape += f"k ({kv}, {problem.d}) v ({kv}, {problem.dv})"
    else:
        shape = f"batch {problem.batch}, heads {problem.heads_q}"
        shape += f" over {problem.heads_kv}" if problem.heads_q != problem.heads_kv else ""
        shape += f", {problem.nq} queries, {problem.nk} keys, head dim {problem.d}"
        shape += f" and {problem.dv}" if problem.d != problem.dv else ""
    features = (
        "approximate", "num_splits", "causal", "window", "softcap", "sinks", "attn_mask",
        "alibi_slopes", "key_ranges", "block_mask", "dropout_p",
    )  # fmt: skip
    flags = (field for field in _options.FLAG_FIELDS.values() if field not in features)
    words = {"want_lse": "LSE", "needs_grad": "gradients"}
    words["approximate"] = f"approximate={problem.approximate!r}"
    words["num_splits"] = f"num_splits={problem.num_splits}"
    names = (*features, *flags, "cache_batch_idx", "leftpad_k", "needs_grad")
    given = [words.get(name, name) for name in names if getattr(problem, name)]
    return f"{problem.dtype}, {shape}" + (f", {', '.join(given)}" if given else "")


def describe_device(device: _native.Device | None) -> str:
    """The name, capability and number of SMs of a device, as a phrase."""
    if device is None:
        return "the CPU"
    major, minor = device.capability
    return f"{device.name} (compute capability {major}.{minor}, {device.sm_count} SMs)"


def plan_facts(plan: _native.LaunchPlan) -> list[tuple[str, str]]:
    """What a plan will do, as (name, value) pairs for people."""
    facts = [("code", plan.code), *plan.notes]
    launches: dict[str, int] = {}  # in order; parts of a call repeat theirs
    for launch in plan.to_dict()["launches"]:
        grid, cluster = (
            " x ".join(str(size) for size in launch[what] if size != 1) or "1"
            for what in ("grid", "cluster")
        )
        if cluster != "1":
            grid += f" in clusters of {cluster}"
        text = (
            f"{launch['kernel']}, grid {grid}, block {launch['block'][0]}, "
            f"{launch['shared_bytes']} bytes of shared memory"
        )
        launches[text] = launches.get(text, 0) + 1
    for text, times in launches.items():
        facts.append(("launch", text + (f", {times} times" if times > 1 else "")))
    if plan.workspace_bytes:
        zeroed = f", of which the first {plan.zeroed_bytes} are zeroed" if plan.zeroed_bytes else ""
        facts.append(("workspace", f"{plan.workspace_bytes} bytes{zeroed}"))
    return facts


# --- the device ---


@cache
def driver_problem() -> str | None:
    """Why CUDA cannot be used here, as a sentence that says what to do; None if it can be used."""
    status = _native.driver_status()
    if status.usable:
        return None
    if "too old" in status.problem:
        version = _driver_version(status.cuda_version)
        return f"driver {version} is older than {MINIMUM_DRIVER}: update it"
    return str(status.problem)


def _driver_version(cuda_version: int) -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text):
            return match[1]
    return f"for CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"


@cache
def query_device(index: int) -> _native.Device:
    """The CUDA device with this index, as the driver describes it. The driver is asked only once.

    Raises:
        ValueError: there is no such device.
    """
    count = _native.driver_status().device_count
    if not 0 <= index < count:
        raise ValueError(f"there is no device cuda:{index} here: cuda:0 to cuda:{count - 1} are")
    return _native.query_device(index)


def device_of(problem: _native.Problem, index: int) -> tuple[_native.Device | None, str | None]:
    """The device of a problem's tensors (None for the CPU), and the reason why no kernel can run
    there, if there is one.
    """
    if not problem.on_cuda:
        return None, None
    obstacle = driver_problem()
    return (query_device(index), None) if obstacle is None else (_unasked_device(), obstacle)


def _unasked_device() -> _native.Device:
    """A device that stands for a GPU which archflash's CUDA runtime cannot describe."""
    unknown = (
        "major",
        "minor",
        "sm_count",
        "shared_per_block",
        "shared_per_sm",
        "l2_bytes",
        "registers_per_sm",
        "threads_per_sm",
    )
    return _native.Device.from_dict({"name": "an NVIDIA GPU", **dict.fromkeys(unknown, 0)})


# --- the decision ---


def order(problem: _native.Problem, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The implementations in the order in which they are asked. Those that take the dtype come
    first, by measured speed if this kind of problem was measured on such a GPU, else by expected
    speed.
    """
    measured = _measured.find(problem, capability)
    kernels = _kernels_in_order(problem.dtype, capability, measured.order if measured else ())
    if pytorch_fails(problem, capability):
        return _before_pytorch(problem, capability, kernels)
    if problem.needs_grad and _pytorch_differentiates(problem, capability):
        faster = _faster_with_gradients(problem, capability, kernels)
        return (*faster, _registry.TORCH, *(name for name in kernels if name not in faster))
    if problem.dtype == "float32":
        # simt has 0.5 to 0.8 of the speed of PyTorch's memory-efficient kernel there (H200).
        if max(problem.d, problem.dv) > 256:
            return (_registry.TORCH, *kernels)
        return (*kernels, _registry.TORCH)
    tensor_cores = [name for name in kernels if _registry.uses_tensor_cores(name)]
    cuda_cores = [name for name in kernels if not _registry.uses_tensor_cores(name)]
    pytorchs = _pytorchs_kernel(problem, capability)
    if isinstance(pytorchs, list):
        return (*tensor_cores, *cuda_cores, _registry.TORCH)
    if _dense_mask_of_few_rows(problem):
        return (*tensor_cores, _registry.TORCH, *cuda_cores)
    if _dense_mask_alone(problem):
        # hopper says no where it was not measured to be faster (_only_forced).
        faster = [name for name in kernels if name == "hopper" and capability == (9, 0)]
        others = [name for name in kernels if name not in faster]
        return (*faster, _registry.TORCH, *others)
    if measured is not None and _serves_as_measured(pytorchs, problem, measured):
        place = measured.place(pytorchs)
        before = [name for name in kernels if measured.place(name) < place]
        after = [name for name in kernels if name not in before]
        return (*before, _registry.TORCH, *after)
    if problem.nq <= _measured.FEW_QUERIES and _pytorch_may_serve(problem):
        splitting = [name for name in tensor_cores if _registry.splits_keys(name)]
        others = [name for name in tensor_cores if name not in splitting]
        # PyTorch's fused kernels also split the keys over the GPU. With one query row on an H200
        # that is 1.8 to 17 times faster than a kernel that does not (bench/results).
        return (*splitting, _registry.TORCH, *others, *cuda_cores)
    if capability is not None and _pytorch_is_faster_than_mma_sync(pytorchs, problem, capability):
        own = [name for name in tensor_cores if _registry.uses_own_instructions(name, capability)]
        others = [name for name in tensor_cores if name not in own]
        return (*own, _registry.TORCH, *others, *cuda_cores)
    return (*tensor_cores, _registry.TORCH, *cuda_cores)


@lru_cache(maxsize=256)
def pytorch_fails(
    problem: _native.Problem, capability: tuple[int, int] | None, kernel: str | None = None
) -> str | None:
    """How a kernel of PyTorch fails at a problem, as a sentence (`_pytorch_faults`); None if it
    does not.

    Args:
        problem, capability: the call and the GPU.
        kernel: "torch-cudnn", "torch-flash" or "torch-efficient"; None for the one that PyTorch
            itself would use, if it has one.
    """
    pytorchs = kernel or _pytorchs_kernel(problem, capability, with_faults=True)
    if isinstance(pytorchs, list) or capability is None:
        return None
    masked = problem.attn_mask or problem.key_ranges or problem.block_mask
    masked = masked or _needs_mask(problem)
    failing = _torch.faults(
        capability=capability,
        batch=problem.batch,
        heads=problem.heads_q,
        nq=problem.nq,
        nk=problem.nk,
        d=problem.d,
        dv=problem.dv,
        causal=problem.causal,
        masked=masked,
        gradients=problem.needs_grad,
        scale=problem.scale,
    )
    what = failing.get(pytorchs)
    return None if what is None else f"{_PYTORCHS[pytorchs]} {what}"


def _before_pytorch(
    problem: _native.Problem, capability: tuple[int, int] | None, kernels: Sequence[str]
) -> tuple[str, ...]:
    """The order where PyTorch's own choice fails. `torch` keeps from it, and comes before kernels
    without tensor cores if another fused kernel of PyTorch remains.
    """
    if isinstance(_pytorchs_kernel(problem, capability), list):
        return (*kernels, _registry.TORCH)
    cuda_cores = [name for name in kernels if not _registry.uses_tensor_cores(name)]
    others = [name for name in kernels if name not in cuda_cores]
    return (*others, _registry.TORCH, *cuda_cores)


def _pytorch_is_faster_than_mma_sync(
    pytorchs: str | list[str], problem: _native.Problem, capability: tuple[int, int]
) -> TypeGuard[str]:
    """Whether PyTorch's kernel for a problem is expected to be faster than ours of mma.sync: on
    10.x and 11.0, whose tensor cores mma.sync leaves mostly idle, for calls that PyTorch serves as
    they are. Where it would need a mask of all scores, ours are, because they skip hidden keys.
    """
    plain = _pytorch_may_serve(problem) and not problem.masked and not _needs_mask(problem)
    return capability[0] in (10, 11) and plain and pytorchs in ("torch-cudnn", "torch-flash")


def _faster_with_gradients(
    problem: _native.Problem, capability: tuple[int, int] | None, kernels: Sequence[str]
) -> list[str]:
    """The kernels that computed such a call and its gradients faster than the kernel that PyTorch
    has for it, where both were measured.
    """
    measured = _measured.find(problem, capability)
    pytorchs = _pytorchs_kernel(problem, capability)
    if measured is None or isinstance(pytorchs, list):
        return []
    if not _serves_as_measured(pytorchs, problem, measured):
        return []
    place = measured.place(pytorchs)
    return [name for name in kernels if measured.place(name) < place]


def _dense_mask_alone(problem: _native.Problem) -> bool:
    """Whether a call has an attn_mask and nothing that says which of its blocks are hidden. On an
    H200 PyTorch's fused kernels serve such calls faster than ampere, the memory-efficient one too,
    and hopper faster than they (docs/masks.md).
    """
    return problem.attn_mask and not (problem.key_ranges or problem.block_mask or problem.dropout_p)


# On an H200 `torch` takes 5 to 9 times as long as ampere up to so many rows of 4,096 keys (331 and
# 42 us for one row of 2x16 heads of 128).
_FEW_ROWS_OF_A_MASK = 128


def _dense_mask_of_few_rows(problem: _native.Problem) -> bool:
    """Whether so few query rows read a dense mask that what `torch` does around PyTorch's kernel,
    which passes over all keys and values, takes longer than any kernel of ours.
    """
    return _dense_mask_alone(problem) and problem.nq <= _FEW_ROWS_OF_A_MASK


@cache
def _kernels_in_order(
    dtype: str, capability: tuple[int, int] | None, measured: tuple[str, ...]
) -> tuple[str, ...]:
    """Our kernels, in the order of the measured speeds; those that take the dtype come first."""
    return tuple(
        sorted(
            _registry.kernel_names(),
            key=lambda name: (
                not _registry.takes(name, dtype),
                measured.index(name) if name in measured else len(measured),
                not _registry.made_for(name, dtype, capability),
            ),
        )
    )


def _pytorch_may_serve(problem: _native.Problem) -> bool:
    """Whether a call has no packed sequences, cache, approximation, number of splits or
    batch_invariant, which PyTorch's kernels do not support.
    """
    plain = not problem.varlen and not problem.kv_cache and not problem.approximate
    plain = plain and not problem.dropout_p
    return plain and problem.num_splits is None and not problem.batch_invariant


def _measured_pytorch(problem: _native.Problem, capability: tuple[int, int] | None) -> str | None:
    """The kernel of PyTorch that serves a problem as it was measured; None if there is none."""
    kernel = _pytorchs_kernel(problem, capability)
    measured = _measured.find(problem, capability)
    if measured is None or isinstance(kernel, list):
        return None
    return kernel if _serves_as_measured(kernel, problem, measured) else None


def _serves_as_measured(
    kernel: str, problem: _native.Problem, measured: _measured.Measurement
) -> bool:
    """Whether a kernel of PyTorch was measured for problems of this kind and serves this one
    without a mask. With one it was measured without what `torch` does around it.
    """
    masked = problem.masked or _needs_mask(problem)
    return kernel in measured.order and not masked and _pytorch_may_serve(problem)


def _needs_mask(problem: _native.Problem) -> bool:
    """Whether PyTorch needs a mask tensor that says which keys each query sees."""
    return _torch.needs_mask(
        causal=problem.causal,
        window=problem.window,
        q_offset_given=problem.q_offset_given,
        nq=problem.nq,
        nk=problem.nk,
    )


def _pytorch_differentiates(
    problem: _native.Problem, capability: tuple[int, int] | None, *, dropout: bool = False
) -> bool:
    """Whether a fused kernel of PyTorch computes a call and its gradients, with weights dropped if
    `dropout` says so. In float32 that is the memory-efficient one, which takes what it takes in
    float16, but no heads that share one of k.
    """
    if problem.batch_invariant:
        return False
    of_few_keys = problem.window or problem.key_ranges or problem.block_mask
    if problem.dtype != "float32" and of_few_keys:
        return False  # PyTorch would make a mask of all scores, and skip nothing
    if problem.dtype == "float32" and problem.heads_q != problem.heads_kv:
        return False
    dtype = "float16" if problem.dtype == "float32" else problem.dtype
    kernel = _pytorchs_kernel(problem, capability, dtype, dropout=dropout)
    return not isinstance(kernel, list)


@lru_cache(maxsize=256)
def pytorch_drops_faster(problem: _native.Problem, device: _native.Device | None) -> bool:
    """Whether PyTorch's SDPA serves a call with dropout faster than our kernels: where it has a
    fused one, but for calls that hopper serves with head dimensions from 64 on. ampere is faster
    than some of those on an H200, slower than others, and unmeasured elsewhere (docs/masks.md).

    Args:
        problem: the call without its dropout.
        device: where its tensors are; None for the CPU.
    """
    if device is None or not _pytorch_differentiates(problem, device.capability, dropout=True):
        return False
    if device.capability != (9, 0) or min(problem.d, problem.dv) < 64:
        return True
    # Which share is dropped does not decide who serves a call.
    dropped = _native.Problem.from_dict(problem.to_dict() | {"dropout_p": 0.5})
    plan = first_plan(dropped, device)
    return plan is None or plan.implementation != "hopper"


def _pytorchs_kernel(
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
    return _torch.fused_kernel(
        device_type="cuda",
        capability=capability,
        dtype=dtype or problem.dtype,
        d=problem.d,
        dv=problem.dv,
        nq=problem.nq,
        nk=problem.nk,
        gqa=problem.heads_q != problem.heads_kv,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        sinks=problem.sinks,
        q_offset_given=problem.q_offset_given,
        varlen=problem.varlen,
        masked=problem.attn_mask or problem.key_ranges or problem.block_mask,
        alibi=problem.alibi_slopes,
        want_lse=problem.want_lse,
        fp8=problem.dtype.startswith("float8"),
        batch=problem.batch,
        heads=problem.heads_q,
        gradients=problem.needs_grad,
        dropout=dropout,
        with_faults=with_faults,
    )


def select(
    problem: _native.Problem,
    device: _native.Device | None,
    name: str | None = None,
    obstacle: str | None = None,
) -> Decision:
    """Decides who serves a problem.

    Args:
        problem: the call, as `_archflash.make_problem` states it.
        device: the GPU to plan for; None for tensors on the CPU.
        name: the forced implementation; None to choose the best that can serve the problem.
        obstacle: why no kernel can be launched on that GPU at all; None if kernels can be.

    Returns:
        The decision, with every other implementation's reasons.

    Raises:
        ForcedImplementationError: the forced one is unknown or cannot serve the problem.
        NotCompiledError: the forced one was left out of this build.
    """
    if name is not None:
        return _select_forced(problem, device, name, obstacle)
    if problem.batch_invariant and (device is None or obstacle):
        raise UnsupportedError(f"{_NOT_INVARIANT}: {obstacle or _ON_CPU}")
    if device is None:
        reasons = {kernel: [_ON_CPU] for kernel in _registry.kernel_names()}
        return Decision(
            _registry.TORCH, "it serves tensors on the CPU", reasons, problem, None, None, False
        )
    if obstacle:
        reasons = {kernel: [obstacle] for kernel in _registry.kernel_names()}
        return Decision(
            _registry.TORCH, "no kernel can run here", reasons, problem, device, None, True
        )

    answers = _Answers(problem, device)
    chosen, plan = answers.first()
    unproved = tuple(answers.unproved)
    _require_kernel(chosen, answers, problem, device)
    reasons = {}
    for other in answers.order:
        if other == chosen:
            continue
        reasons[other] = answers.reasons(other) or [_why_behind(other, chosen, problem, device)]
    fallback = not answers.a_kernel_could()
    why = _why(chosen, fallback, problem, device)
    return Decision(chosen, why, reasons, problem, device, plan, fallback, unproved)


_PYTORCHS = {
    "torch-cudnn": "PyTorch's cuDNN kernel",
    "torch-flash": "PyTorch's flash kernel",
    "torch-efficient": "PyTorch's memory-efficient kernel",
}
_FASTEST = "the fastest measured of those that serve this call"
MASK_READ_FASTER = "PyTorch's fused kernels read a dense mask faster, where that was measured"
# GPUs that have special instructions for their tensor cores, which cuDNN uses.
_CUDNN_CAPABILITIES = (9, 10)


def _why_behind(other: str, chosen: str, problem: _native.Problem, device: _native.Device) -> str:
    """Why an implementation that could serve a problem comes after the chosen one."""
    if other == _registry.TORCH and (fails := pytorch_fails(problem, device.capability)):
        return fails
    if chosen == _registry.TORCH and _dense_mask_alone(problem) and not problem.needs_grad:
        return MASK_READ_FASTER
    if problem.needs_grad and chosen == _registry.TORCH:
        return "PyTorch's fused kernels compute the gradients faster, where that was measured"
    if other == _registry.TORCH and _dense_mask_of_few_rows(problem):
        return (
            f"{chosen} passes over keys and values once, what archflash's promises need more often"
        )
    if chosen == "hopper" and other == _registry.TORCH and _dense_mask_alone(problem):
        return (
            f"{chosen} was measured to be faster with such a mask than PyTorch's kernels and what "
            "archflash's promises need around them"
        )
    measured = _measured.find(problem, device.capability)
    pytorchs = _measured_pytorch(problem, device.capability)
    if measured is not None and chosen != _registry.TORCH and chosen in measured.order:
        if other in measured.order:
            return f"{chosen} was measured to be faster"
        if other == _registry.TORCH and pytorchs:
            speeds = measured.speeds
            # The margins of bench.measured let a slower kernel come first.
            if speeds.get(pytorchs, 0) > speeds.get(chosen, 0) > 0:
                return (
                    f"{chosen} was measured to be about as fast as {_PYTORCHS[pytorchs]}, which "
                    "makes a plan for every new shape"
                )
            return f"{chosen} was measured to be faster than {_PYTORCHS[pytorchs]}"
    if chosen != _registry.TORCH:
        sixteen_bits = problem.dtype in ("float16", "bfloat16")
        unmeasured = measured is None and device.capability[0] in _CUDNN_CAPABILITIES
        if other == _registry.TORCH and sixteen_bits and unmeasured:
            cudnn = _PYTORCHS["torch-cudnn"]
            return f"{chosen} comes first, though {cudnn} may be faster on this GPU"
        return f"{chosen} is expected to be faster"
    if measured is not None and pytorchs and other in measured.order:
        return f"{_PYTORCHS[pytorchs]} was measured to be faster"
    tensor_cores = _registry.uses_tensor_cores(other)
    kernel = _pytorchs_kernel(problem, device.capability)
    if tensor_cores and _pytorch_is_faster_than_mma_sync(kernel, problem, device.capability):
        return f"mma.sync leaves this GPU's tensor cores mostly idle: {_PYTORCHS[kernel]} is first"
    short = "it does not split the keys" if tensor_cores else "it leaves the tensor cores unused"
    return f"{short}: PyTorch is expected to be faster"


def pytorch_reads_mask_faster(problem: _native.Problem, plan: _native.LaunchPlan) -> bool:
    """Whether PyTorch's own kernel, without what `torch` does around it, was measured to be faster
    with such an attn_mask than the kernel of a plan that would serve the call.
    """
    measured = _measured.find(problem, plan.device.capability) if problem.attn_mask else None
    pytorchs = _pytorchs_kernel(problem, plan.device.capability)
    if _dense_mask_of_few_rows(problem):
        return not isinstance(pytorchs, list)
    if measured is None or isinstance(pytorchs, list):
        return False
    return measured.place(pytorchs) < measured.place(plan.implementation)


def _dropout_measured_on_hopper(problem: _native.Problem) -> bool:
    """Whether a call with dropout has as many query rows as those in which hopper was measured to
    be faster than ampere: 1.3 to 1.9 times, hopper on an H100 and ampere on an H200
    (docs/masks.md).
    """
    rows = problem.nq // max(problem.batch, 1) if problem.varlen else problem.nq
    return rows >= 128


def _only_forced(
    name: str,
    problem: _native.Problem,
    capability: tuple[int, int],
    plan: _native.LaunchPlan | None = None,
) -> bool:
    """Whether a kernel serves a problem only if it is forced, because the GPU is of another
    generation than its own and it was not measured there.
    """
    if not _registry.only_forced(name, capability):
        return False
    if problem.kv_cache:
        return False  # such a kernel refuses all caches but those that it was measured for
    if name == "hopper" and problem.dropout_p:
        return not _dropout_measured_on_hopper(problem)
    if problem.attn_mask and not (plan and plan.tile and plan.tile.name.endswith("_dense")):
        return True  # of hopper's kernels that read an attn_mask only these were measured
    measured = _measured.find(problem, capability)
    return measured is None or name not in measured.order


class _Answers:
    """The answers of the implementations to a call that forces none. Each is asked at most once.

    Attributes:
        order: the implementations in the order in which they are asked.
        unproved: those that could serve the call and were asked, but have no proof for this GPU;
            after first() those that come before the chosen one.
    """

    def __init__(self, problem: _native.Problem, device: _native.Device) -> None:
        self._problem = problem
        self._device = device
        self._capability = device.capability
        self.order = order(problem, self._capability)
        self.unproved: list[str] = []
        self._of: dict[str, _native.LaunchPlan | list[str]] = {}

    def _ask(self, name: str) -> _native.LaunchPlan | list[str]:
        """A kernel's plan, or its reasons."""
        answer = self._of.get(name)
        if answer is None:
            answer = _native.plan(name, self._problem, self._device)
            if not isinstance(answer, list) and _only_forced(
                name, self._problem, self._capability, answer
            ):
                major, minor = self._capability
                answer = [
                    f"compute capability {major}.{minor}: {name} serves it only when it is forced"
                ]
            elif not isinstance(answer, list) and (why := self._why_not(name)):
                self.unproved.append(name)
                answer = [why]
            self._of[name] = answer
        return answer

    def _why_not(self, name: str) -> str | None:
        """Why a kernel has no proof for this call; see _proofs."""
        why = _proofs.why_not(name, self._capability)
        if why is None and self._problem.needs_grad:
            why = _proofs.why_not(name, self._capability, _proofs.BACKWARD)
        return why

    def first(self) -> tuple[str, _native.LaunchPlan | None]:
        """The first implementation in the order that can serve the call, and its plan; that of
        `torch` is None.
        """
        for name in self.order:
            if name == _registry.TORCH:
                break
            answer = self._ask(name)
            if not isinstance(answer, list):
                return name, answer
        return _registry.TORCH, None

    def reasons(self, name: str) -> list[str]:
        """Why an implementation cannot serve the call; empty if it can, as `torch` always can."""
        answer = [] if name == _registry.TORCH else self._ask(name)
        return answer if isinstance(answer, list) else []

    def a_kernel_could(self) -> bool:
        """Whether any kernel can serve the call."""
        return any(not isinstance(self._ask(name), list) for name in _registry.kernel_names())


_ON_CPU = "q, k and v are on the CPU: move them to a CUDA device"
_NOT_INVARIANT = (
    "batch_invariant=True needs a kernel of archflash: PyTorch's own do not promise the same bits"
)


def _require_kernel(
    chosen: str, answers: _Answers, problem: _native.Problem, device: _native.Device
) -> None:
    """Raises UnsupportedError where `torch` would serve a call that only a kernel can."""
    if chosen != _registry.TORCH or not problem.batch_invariant:
        return
    refusals = {name: answers.reasons(name) for name in answers.order if name != _registry.TORCH}
    kernel, reasons = nearest(refusals, problem, device)
    listed = "".join(f"\n  {kernel}: {reason}" for reason in reasons)
    raise UnsupportedError(f"{_NOT_INVARIANT}, and none serves this call:{listed}")


def first_plan(problem: _native.Problem, device: _native.Device) -> _native.LaunchPlan | None:
    """The plan of the implementation that serves a problem on a GPU if none is forced; None if that
    is `torch`.
    """
    return _Answers(problem, device).first()[1]


def _why(chosen: str, fallback: bool, problem: _native.Problem, device: _native.Device) -> str:
    measured = _measured.find(problem, device.capability)
    if chosen != _registry.TORCH:
        summary = str(_native.describe(chosen).summary)
        if problem.needs_grad and not _pytorch_differentiates(problem, device.capability):
            return f"{summary}; it has a backward pass, and PyTorch no fused kernel for this call"
        if _dense_mask_of_few_rows(problem):
            return f"{summary}; `torch` would pass over all keys for few rows of a dense mask"
        if measured is None or chosen not in measured.order:
            return summary
        return f"{summary}; {_FASTEST} ({measured})"
    if fallback:
        return "no kernel of archflash serves this call"
    if problem.needs_grad:
        if measured is not None and (pytorchs := _measured_pytorch(problem, device.capability)):
            return f"{_PYTORCHS[pytorchs]} with its gradients; {_FASTEST} ({measured})"
        why = "PyTorch's fused kernels compute this call and its gradients"
        return why + _why_hidden_keys(problem, device.capability)
    if _dense_mask_alone(problem):
        return MASK_READ_FASTER
    if measured is not None and (pytorchs := _measured_pytorch(problem, device.capability)):
        return f"{_PYTORCHS[pytorchs]}; {_FASTEST} ({measured})"
    return "PyTorch's fused kernel uses the tensor cores and is expected to be faster"


def _why_hidden_keys(problem: _native.Problem, capability: tuple[int, int]) -> str:
    """What `torch` does to a call with a mask and gradients, as the end of a sentence."""
    more = _torch.hidden_keys(capability, problem.nq, problem.nk)
    if more == 0 or _pytorchs_kernel(problem, capability) != "torch-cudnn":
        return ""
    return (
        f"; it gets {more} more keys that the mask hides, because the cuDNN kernel gives NaN as "
        "gradients of rows with a log-sum-exp below -88 otherwise"
    )


def _select_forced(
    problem: _native.Problem, device: _native.Device | None, name: str, obstacle: str | None
) -> Decision:
    check_name(name)
    if name == _registry.TORCH and problem.batch_invariant:
        raise ForcedImplementationError(f"torch is forced, but {_NOT_INVARIANT}")
    if name == _registry.TORCH:
        return Decision(name, "it is forced", _unasked(name), problem, device, None, False)
    if not _native.targets(name):
        raise NotCompiledError(
            f"{name} is forced, but this build left it out: build again with ARCHFLASH_ARCHS=all"
        )
    why = "it is forced"
    if device is None:
        device = simulated_device(name)
        problem = problem.as_if_on_cuda()
        why += f"; tensors on the CPU are served by the simulator, as on {device.name}"
    if obstacle:
        raise ForcedImplementationError(f"{name} is forced, but {obstacle}")
    answer = _native.plan(name, problem, device)
    if isinstance(answer, list):
        listed = "".join(f"\n  {reason}" for reason in answer)
        raise ForcedImplementationError(
            f"{name} is forced, but cannot serve {describe_problem(problem)}:{listed}"
        )
    return Decision(name, why, _unasked(name), problem, device, answer, False)


def simulated_device(name: str) -> _native.Device:
    """The GPU that the simulator stands for: the one that ARCHFLASH_SIM_DEVICE names, otherwise the
    home device of the implementation.

    Raises:
        ForcedImplementationError: ARCHFLASH_SIM_DEVICE names no GPU of the table.
    """
    asked = os.environ.get(_SIM_DEVICE_VARIABLE)
    known = _native.find_known_device(asked or _native.describe(name).home_device)
    if known is None:
        names = ", ".join(row.device.name for row in _native.known_devices())
        raise ForcedImplementationError(
            f"{_SIM_DEVICE_VARIABLE}={asked} is no GPU in the table of known ones: {names}"
        )
    return known.device


def _unasked(name: str) -> dict[str, list[str]]:
    return {other: [f"{name} is forced"] for other in _registry.names() if other != name}


def decide(
    problem: _native.Problem, device_index: int, name: str | None
) -> _native.LaunchPlan | None:
    """The plan for a call on a real device; None if `torch` serves it. The runtime calls this when
    the plan cache misses.
    """
    device, obstacle = device_of(problem, device_index)
    plan, refusals = choose(problem, device, name, obstacle)
    if refusals:
        assert device is not None
        kernel, reasons = nearest(refusals, problem, device)
        for reason in reasons:
            note_fallback(f"{kernel}: {reason}")
    return plan


def choose(
    problem: _native.Problem,
    device: _native.Device | None,
    name: str | None,
    obstacle: str | None,
) -> tuple[_native.LaunchPlan | None, dict[str, list[str]]]:
    """What `select` decides, without its explanations where they take time: a decoding loop comes
    here with a new length each step.

    Returns:
        The plan, None if `torch` serves the problem; and where that is because no kernel can, the
        reasons of each kernel, in the order in which they were asked.

    Raises:
        UnsupportedError: no kernel can, and `torch` must not.
    """
    if name is not None or device is None or obstacle is not None:
        decision = select(problem, device, name, obstacle)
        return decision.plan, decision.reasons if decision.fallback else {}
    answers = _Answers(problem, device)
    chosen, plan = answers.first()
    _require_kernel(chosen, answers, problem, device)
    if answers.unproved:
        _proofs.note(answers.unproved[0], device, chosen)
    if plan is not None or answers.a_kernel_could():
        return plan, {}
    kernels = (kernel for kernel in answers.order if kernel != _registry.TORCH)
    return None, {kernel: answers.reasons(kernel) for kernel in kernels}


def why_torch(problem: _native.Problem, device: _native.Device) -> str:
    """Why PyTorch serves a problem that kernels could serve too."""
    return _why(_registry.TORCH, False, problem, device)


def nearest(
    refusals: dict[str, list[str]], problem: _native.Problem, device: _native.Device
) -> tuple[str, list[str]]:
    """The kernel that comes closest to serving a call which none serves, and its reasons.

    Args:
        refusals: the reasons of each kernel, in the order in which the kernels were asked.
        problem: the call.
        device: the GPU.
    """
    kernel = min(
        (name for name in refusals if name != _registry.TORCH),
        key=lambda name: (
            not _native.has_code(name, device.capability)
            or _only_forced(name, problem, device.capability),
            not _registry.takes(name, problem.dtype),
            any(reason.startswith("approximate=") for reason in refusals[name]),
            len(refusals[name]),
        ),
    )
    return kernel, refusals[kernel]


def kind_of(reason: str) -> str:
    """The reason without its numbers: reasons that differ only in sizes count as the same."""
    return re.sub(r"\d+", "#", reason)


_noted: set[str] = set()
_noting = threading.Lock()


def note_fallback(reason: str, stacklevel: int = 4) -> None:
    """Warns, once per reason, that PyTorch serves a call that no kernel serves.

    Args:
        reason: why no kernel serves it, as a sentence.
        stacklevel: frames from here to the caller's, for the warning.

    Raises:
        UnsupportedError: ARCHFLASH_FALLBACK is "error".
    """
    if os.environ.get(_FALLBACK_VARIABLE) == "error":
        raise UnsupportedError(
            f"no kernel of archflash serves this call, and {_FALLBACK_VARIABLE}=error: {reason}"
        )
    with _noting:
        kind = kind_of(reason)
        if kind in _noted:
            return
        _noted.add(kind)
    logger.info("PyTorch serves a call: %s", reason)
    warnings.warn(f"archflash: PyTorch serves this call. {reason}", stacklevel=stacklevel)


_native.set_decide(decide)
