"""A decision in words: what was asked, who serves it and why, and why the others do not."""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from dataclasses import dataclass

import torch

from archflash import _archflash as _native
from archflash import _calibrated, _measured, _registry, _torch_kernels
from archflash._dispatch import order, pytorch
from archflash._errors import UnsupportedError

logger = logging.getLogger("archflash")
_FALLBACK_VARIABLE = "ARCHFLASH_FALLBACK"
_FASTEST = "the fastest measured of those that serve this call"
MASK_READ_FASTER = "PyTorch's fused kernels read a dense mask faster, where that was measured"
# GPUs that have special instructions for their tensor cores, which cuDNN uses.
_CUDNN_CAPABILITIES = (9, 10)


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
    words = {"return_lse": "LSE", "approximate": f"approximate={problem.approximate!r}"}
    words["num_splits"] = f"num_splits={problem.num_splits}"
    given = [words.get(name, name) for name in problem.given]
    given += ["gradients"] if problem.needs_grad else []
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


def why(chosen: str, fallback: bool, problem: _native.Problem, device: _native.Device) -> str:
    if problem.approximate and chosen != _registry.TORCH:
        summary = str(_native.describe(chosen).summary)
        return f"{summary}; the call asks for approximate={problem.approximate!r}"
    if calibrated := _cost_of(chosen, problem, device):
        served_by = pytorch.kernel_of(problem, device.capability)
        what = "PyTorch's attention"
        if chosen != _registry.TORCH:
            what = str(_native.describe(chosen).summary)
        elif isinstance(served_by, str):
            what = pytorch.NAMES[served_by]
        return f"{what}; {_FASTEST} ({calibrated[0]})"
    measured = _measured.find(problem, device.capability)
    if chosen != _registry.TORCH:
        summary = str(_native.describe(chosen).summary)
        if problem.needs_grad and not pytorch.differentiates(problem, device.capability):
            return f"{summary}; it has a backward pass, and PyTorch no fused kernel for this call"
        if order.dense_mask_of_few_rows(problem):
            return f"{summary}; `torch` would pass over all keys for few rows of a dense mask"
        if measured is None or chosen not in measured.order:
            return summary
        return f"{summary}; {_FASTEST} ({measured})"
    if fallback:
        return "no kernel of archflash serves this call"
    if problem.needs_grad:
        if measured is not None and (
            pytorchs := pytorch.measured_kernel(problem, device.capability)
        ):
            return f"{pytorch.NAMES[pytorchs]} with its gradients; {_FASTEST} ({measured})"
        why = "PyTorch's fused kernels compute this call and its gradients"
        return why + _why_hidden_keys(problem, device.capability)
    if order.dense_mask_alone(problem):
        return MASK_READ_FASTER
    if measured is not None and (pytorchs := pytorch.measured_kernel(problem, device.capability)):
        return f"{pytorch.NAMES[pytorchs]}; {_FASTEST} ({measured})"
    return "PyTorch's fused kernel uses the tensor cores and is expected to be faster"


def _cost_of(
    name: str, problem: _native.Problem, device: _native.Device
) -> tuple[_calibrated.Prediction, float] | None:
    """What the user measured for such calls on this very GPU, and what an implementation costs by
    it; None where it was not measured.
    """
    calibrated = _calibrated.find(problem, device)
    if calibrated is None:
        return None
    if name == _registry.TORCH:
        name = pytorch.as_calibrated(problem, device.capability, calibrated) or ""
    cost = calibrated.cost.get(name)
    return None if cost is None else (calibrated, cost)


def _why_hidden_keys(problem: _native.Problem, capability: tuple[int, int]) -> str:
    """What `torch` does to a call with a mask and gradients, as the end of a sentence."""
    more = _torch_kernels.hidden_keys(capability, problem.nq, problem.nk)
    if more == 0 or pytorch.kernel_of(problem, capability) != "torch-cudnn":
        return ""
    return (
        f"; it gets {more} more keys that the mask hides, because the cuDNN kernel gives NaN as "
        "gradients of rows with a log-sum-exp below -88 otherwise"
    )


def why_behind(other: str, chosen: str, problem: _native.Problem, device: _native.Device) -> str:
    """Why an implementation that could serve a problem comes after the chosen one."""
    if other == _registry.TORCH and (fails := pytorch.fails(problem, device.capability)):
        return fails
    mine, others = _cost_of(chosen, problem, device), _cost_of(other, problem, device)
    if mine and others:
        faster = "faster" if others[1] > mine[1] * (1 + _calibrated.EQUAL) else "about as fast"
        return f"{chosen} is {faster} by what was measured here: {mine[1]:.3g}, {others[1]:.3g} us"
    if chosen == _registry.TORCH and order.dense_mask_alone(problem) and not problem.needs_grad:
        return MASK_READ_FASTER
    if problem.needs_grad and chosen == _registry.TORCH:
        return "PyTorch's fused kernels compute the gradients faster, where that was measured"
    if other == _registry.TORCH and pytorch.mask_is_wider(problem):
        return pytorch.WIDER_MASK
    if other == _registry.TORCH and order.dense_mask_of_few_rows(problem):
        return (
            f"{chosen} passes over keys and values once, what archflash's promises need more often"
        )
    if (
        other == _registry.TORCH
        and order.dense_mask_alone(problem)
        and _registry.reads_masks_faster(chosen, device.capability)
    ):
        return (
            f"{chosen} was measured to be faster with such a mask than PyTorch's kernels and what "
            "archflash's promises need around them"
        )
    measured = _measured.find(problem, device.capability)
    pytorchs = pytorch.measured_kernel(problem, device.capability)
    if measured is not None and chosen != _registry.TORCH and chosen in measured.order:
        if other in measured.order:
            return f"{chosen} was measured to be faster"
        if other == _registry.TORCH and pytorchs:
            speeds = measured.speeds
            # The margins of bench.measured let a slower kernel come first.
            if speeds.get(pytorchs, 0) > speeds.get(chosen, 0) > 0:
                return (
                    f"{chosen} was measured to be about as fast as {pytorch.NAMES[pytorchs]}, "
                    "which makes a plan for every new shape"
                )
            return f"{chosen} was measured to be faster than {pytorch.NAMES[pytorchs]}"
    if chosen != _registry.TORCH:
        sixteen_bits = problem.dtype in ("float16", "bfloat16")
        unmeasured = measured is None and device.capability[0] in _CUDNN_CAPABILITIES
        unmeasured = unmeasured and not problem.key_indices
        if other == _registry.TORCH and sixteen_bits and unmeasured:
            cudnn = pytorch.NAMES["torch-cudnn"]
            return f"{chosen} comes first, though {cudnn} may be faster on this GPU"
        return f"{chosen} is expected to be faster"
    if measured is not None and pytorchs and other in measured.order:
        return f"{pytorch.NAMES[pytorchs]} was measured to be faster"
    tensor_cores = _registry.uses_tensor_cores(other)
    kernel = pytorch.kernel_of(problem, device.capability)
    if tensor_cores and order.pytorch_is_faster_than_mma_sync(kernel, problem, device.capability):
        return (
            f"mma.sync leaves this GPU's tensor cores mostly idle: {pytorch.NAMES[kernel]} is first"
        )
    short = "it does not split the keys" if tensor_cores else "it leaves the tensor cores unused"
    return f"{short}: PyTorch is expected to be faster"


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
            or order.only_forced(name, problem, device.capability, device=device),
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
        ValueError: it is something else.
    """
    asked = os.environ.get(_FALLBACK_VARIABLE, "")
    if asked not in ("", "error"):
        raise ValueError(f"{_FALLBACK_VARIABLE} is {asked!r}: it must be 'error', or unset")
    if asked:
        raise UnsupportedError(
            f"no kernel of archflash serves this call, and {_FALLBACK_VARIABLE}=error: {reason}"
        )
    if torch.compiler.is_compiling():  # which traces neither a lock nor a logger
        return
    with _noting:
        kind = kind_of(reason)
        if kind in _noted:
            return
        _noted.add(kind)
    logger.info("PyTorch serves a call: %s", reason)
    warnings.warn(f"archflash: PyTorch serves this call. {reason}", stacklevel=stacklevel)
