"""Gradients of a call: what they are computed of, and which implementation computes them
(`_compute_gradients` does it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _key_lists, _options, _proofs, _registry, _strides
from archflash._errors import ForcedImplementationError

_NO_GRADIENTS = 0  # what the runtime is told of autograd: see enum Grad in src/runtime/call.h
# The implementations with a backward pass.
FOLDERS = tuple(name for name in _registry.kernel_names() if _native.has_backward(name))
# Options that change how the forward pass is computed, but not the formula.
_OF_FORWARD = ("approximate", "num_splits", "out")


class _Asked(threading.local):
    """What the calls of a thread ask of their gradients, see `asked_for` and `chosen_unless`."""

    deterministic = False
    or_others = False


_asked = _Asked()


@contextlib.contextmanager
def asked_for(deterministic: bool) -> Iterator[None]:
    """Inside, calls of this thread whose gradients are needed ask for deterministic ones, or leave
    that to PyTorch's setting. Their backward passes, which run later, ask for the same.
    """
    before, _asked.deterministic = _asked.deterministic, deterministic
    try:
        yield
    finally:
        _asked.deterministic = before


@contextlib.contextmanager
def chosen_unless(forced: str | None) -> Iterator[None]:
    """Inside, the implementation that operators of this thread name was chosen, if none was forced:
    others may compute the gradients where that one does not.
    """
    before, _asked.or_others = _asked.or_others, forced is None
    try:
        yield
    finally:
        _asked.or_others = before


def may_be_others() -> bool:
    """Whether the implementation that serves a call was chosen and not forced."""
    return _asked.or_others


def asks_for_deterministic() -> bool:
    """Whether `asked_for` asks for deterministic gradients, whatever PyTorch's setting is."""
    return _asked.deterministic


def wants_deterministic() -> bool:
    """Whether the gradients of a call have to have the same bits every time."""
    return _asked.deterministic or torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Request:
    """What the gradients are computed of.

    Attributes:
        dout: the gradient of the output, shaped like it.
        q, k, v: as the call got them.
        out, lse: what the call gave.
        dlse: the gradient of the log-sum-exp; None: it is 0.
        options: all options of the call by name.
        mask_gradient: whether the gradient of attn_mask is wanted, too, which is floating then.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    options: dict[str, Any]
    mask_gradient: bool = False

    @property
    def sinks(self) -> Tensor | None:
        sinks: Tensor | None = self.options["sinks"]
        return sinks

    def by_head(self, x: Tensor) -> Tensor:
        """A tensor of the call as (batch, heads, rows, columns); packed ones have a batch of 1."""
        if self.options["cu_seqlens_q"] is not None:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.options["layout"] == "bnhd" else x

    def with_mask_of_lists(self) -> Request:
        """The same call with an attn_mask in the place of key_indices."""
        k, v = _key_lists.without_unnamed(self.q, self.k, self.v, self.options)
        options = dict(self.options)
        lists, lengths = options["key_indices"], options["topk_lengths"]
        options["attn_mask"] = _key_lists.as_mask(lists, lengths, self.q, self.k, options["layout"])
        options["key_indices"] = options["topk_lengths"] = None
        return dataclasses.replace(self, k=k, v=v, options=options)

    def problem(self) -> _native.Problem:
        """The call as planning sees it. Raises what `archflash.attention` raises."""
        options = self.options | dict.fromkeys(_OF_FORWARD)
        options |= {"out": self.out, "return_lse": True}
        return _native.make_problem(self.q, self.k, self.v, tuple(options.values()), _NO_GRADIENTS)


@dataclass(frozen=True)
class Gradients:
    """The tensors that gradients are written to, shaped like what they belong to.

    Attributes:
        dq, dk, dv: in the dtype of the inputs, or float32.
        dsinks: float32 ``(heads_q,)``; None if the call has no sinks.
        dmask: float32, shaped like attn_mask with 4 dimensions, zeros to which its gradient is
            added; None if that is not wanted.
        accumulate: whether dq, dk and dv are added to what they hold.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    accumulate: bool = False
    dmask: Tensor | None = None

    @staticmethod
    def like(
        request: Request,
        given: tuple[Tensor | None, ...] = (None, None, None),
        accumulate: bool = False,
    ) -> Gradients:
        """The given dq, dk and dv, and new tensors for the rest in the dtype and stride order of
        the inputs.
        """
        inputs = (request.q, request.k, request.v)
        dq, dk, dv = (
            _strides.new_in_order(x, x.shape) if target is None else target
            for x, target in zip(inputs, given, strict=True)
        )
        sinks = request.sinks
        dsinks = None if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
        dmask = None
        if request.mask_gradient:
            mask = request.options["attn_mask"]
            dmask = mask.new_zeros((1,) * (4 - mask.ndim) + mask.shape, dtype=torch.float32)
        return Gradients(dq, dk, dv, dsinks, accumulate, dmask)

    def with_dmask_of_all_scores(self, request: Request) -> Gradients:
        """These gradients with a number of dmask for each score, so that no two are added up. They
        are these themselves where the mask has as many.
        """
        heads = request.by_head(request.q).shape[:3]
        assert self.dmask is not None
        scores = (*heads, request.by_head(request.k).shape[2])
        if self.dmask.shape == scores:
            return self
        full = self.dmask.new_zeros(scores)
        return dataclasses.replace(self, dmask=full)


Decide = Callable[..., _dispatch.Decision]
# A kernel's plan for the gradients of a call on a device, or why it cannot compute them.
PlanOf = Callable[[str, _native.Device], _native.LaunchPlan | list[str]]


def decider(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Decide:
    """`_dispatch.select` for the gradients of a call, of which nothing but the inputs is known: new
    tensors stand for the output and the gradients.
    """

    q, k, v = (_strides.without_data(x) for x in (q, k, v))
    options = {name: _strides.without_data(value) for name, value in options.items()}
    out = _strides.new_in_order(q, (*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(0, dtype=torch.float32)
    request = Request(out, q, k, v, out, lse, None, options)
    into = Gradients.like(request)

    def of_call(
        problem: _native.Problem,
        device: _native.Device | None,
        name: str | None,
        obstacle: str | None = None,
    ) -> _dispatch.Decision:
        return decide_as_computed(request, into, device, name, obstacle, wants_deterministic())[1]

    return of_call


def reads_lists(
    problem: _native.Problem,
    device: _native.Device | None,
    name: str | None,
    obstacle: str | None = None,
) -> bool:
    """Whether a kernel serves a call with lists of keys and computes its gradients from them. Else
    the call has a mask from the start. The arguments are those of `_dispatch.select`.
    """
    if name == _registry.TORCH:
        return False
    return _has_plan(problem, device, name, obstacle)


@functools.lru_cache(maxsize=256)
def _has_plan(
    problem: _native.Problem, device: _native.Device | None, name: str | None, obstacle: str | None
) -> bool:
    try:
        return _dispatch.select(problem, device, name, obstacle).plan is not None
    except ForcedImplementationError:
        return False


def decide_as_computed(
    request: Request,
    into: Gradients,
    device: _native.Device | None,
    name: str | None,
    obstacle: str | None = None,
    deterministic: bool = False,
) -> tuple[Request, _dispatch.Decision]:
    """The call whose gradients are computed, and who computes them: where no kernel reads the lists
    of keys of a call, it is the same with a mask, and where the forced kernel, which served the
    lists, takes no mask, another one computes it. The arguments are those of `decide`.
    """

    def decision_of(call: Request, kernel: str | None) -> _dispatch.Decision:
        return decide(call, into, device, kernel, obstacle, deterministic)

    def plan_of(call: Request, kernel: str | None) -> _dispatch.Decision | None:
        """The decision if it is for a kernel, which can compute the gradients then."""
        try:
            decision = decision_of(call, kernel)
        except ForcedImplementationError:
            return None
        return None if decision.plan is None else decision

    if request.options["key_indices"] is None:
        return request, decision_of(request, name)
    if decision := plan_of(request, name):
        return request, decision
    masked = request.with_mask_of_lists()
    if name is not None and name != _registry.TORCH:
        for kernel in (name, *FOLDERS):
            if decision := plan_of(masked, kernel):
                return masked, decision
    return masked, decision_of(masked, name)


def decide(
    request: Request,
    into: Gradients,
    device: _native.Device | None,
    name: str | None,
    obstacle: str | None = None,
    deterministic: bool = False,
) -> _dispatch.Decision:
    """Decides who computes the gradients of a call.

    Args:
        request: the call. Its tensors may be on the meta device.
        into: what is to be written.
        device: the GPU to plan for; None for tensors on the CPU.
        name: the forced implementation; None for the best.
        obstacle: why no kernel can be launched on that GPU at all; None if kernels can be.
        deterministic: whether the same inputs must always give the same bits.

    Raises:
        ForcedImplementationError: the forced one is unknown or cannot compute them.
    """
    problem, chosen, plan, fallback = request.problem(), _registry.TORCH, None, False
    on_cuda = problem.as_if_on_cuda()
    unproved: list[str] = []

    answers: dict[str, _native.LaunchPlan | list[str]] = {}

    def plan_of(kernel: str, device: _native.Device) -> _native.LaunchPlan | list[str]:
        if kernel not in answers:  # the first one is asked for its reasons, too
            answers[kernel] = _plan(kernel, request, on_cuda, into, device, deterministic)
        return answers[kernel]

    if name is not None:
        _dispatch.check_name(name)
        chosen, why = name, "it is forced"
        reasons = {other: [f"{name} is forced"] for other in _registry.names() if other != name}
        if name != _registry.TORCH:
            device = device or _dispatch.simulated_device(name)
            plan = forced_plan(name, plan_of, on_cuda, device, obstacle)
    elif device is None or obstacle is not None:
        fallback = device is not None
        why = "no kernel can run here" if fallback else "it serves tensors on the CPU"
        hint = obstacle or "the tensors are on the CPU: move them to a CUDA device"
        reasons = {kernel: [hint] for kernel in _registry.kernel_names()}
    else:
        chosen, plan, unproved = first_with_plan(plan_of, device)
        reasons = {}
        for kernel in _registry.kernel_names():
            answer = plan_of(kernel, device)
            if isinstance(answer, list):
                reasons[kernel] = answer
            elif why_not := _proofs.why_not(kernel, device.capability, _proofs.BACKWARD):
                reasons[kernel] = [why_not]
            elif kernel != chosen:
                reasons[kernel] = [f"{chosen} is expected to be faster"]
        fallback = plan is None
        why = "no kernel of archflash computes these gradients"
        if plan is not None:
            why = "its backward pass reads the output and the log-sum-exp of the call"
            reasons[_registry.TORCH] = ["it would compute the call once more"]
    return _dispatch.Decision(
        chosen, why, reasons, problem, device, plan, fallback, tuple(unproved)
    )


def first_with_plan(
    plan_of: PlanOf, device: _native.Device
) -> tuple[str, _native.LaunchPlan | None, list[str]]:
    """Who computes gradients if nothing is forced: the first kernel that has a plan and a proof for
    the GPU, and its plan, or `torch`; and the kernels before it that lack nothing but a proof.
    """
    unproved: list[str] = []
    for kernel in _registry.kernel_names():  # newer instructions first
        answer = plan_of(kernel, device)
        if isinstance(answer, list):
            continue
        if _proofs.why_not(kernel, device.capability, _proofs.BACKWARD) is None:
            return kernel, answer, unproved
        unproved.append(kernel)
    return _registry.TORCH, None, unproved


def forced_plan(
    name: str,
    plan_of: PlanOf,
    problem: _native.Problem,
    device: _native.Device,
    obstacle: str | None,
) -> _native.LaunchPlan:
    if obstacle:
        raise ForcedImplementationError(f"{name} is forced, but {obstacle}")
    answer = plan_of(name, device)
    if isinstance(answer, list):
        listed = "".join(f"\n  {reason}" for reason in answer)
        raise ForcedImplementationError(
            f"{name} is forced, but cannot compute the gradients of "
            f"{_dispatch.describe_problem(problem)}:{listed}"
        )
    return answer


def _plan(
    name: str,
    request: Request,
    problem: _native.Problem,
    into: Gradients,
    device: _native.Device,
    deterministic: bool,
) -> _native.LaunchPlan | list[str]:
    dout, dq, dk, dv = (request.by_head(x) for x in (request.dout, into.dq, into.dk, into.dv))
    return _native.plan_backward(
        name, problem, device, dout, dq, dk, dv, into.accumulate,
        request.dlse is not None, into.dsinks is not None, deterministic, into.dmask,
    )  # fmt: skip


def operands(request: Request, into: Gradients, plan: _native.LaunchPlan) -> dict[str, Tensor]:
    """Every tensor that a plan reads and writes, by operand name."""
    options = request.options
    given = {
        "q": request.q, "k": request.k, "v": request.v, "out": request.out, "lse": request.lse,
        "dout": request.dout, "dlse": request.dlse, "dq": into.dq, "dk": into.dk, "dv": into.dv,
        "dsinks": into.dsinks, "dmask": into.dmask,
        **{operand: options[name] for name, operand in _options.OPERANDS.items()},
        "workspace": torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=request.q.device),
    }  # fmt: skip
    return {name: x.detach() for name, x in given.items() if isinstance(x, Tensor)}


def check_tensor(
    name: str, x: Any, device: torch.device, shape: Any, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuses what is no tensor of that shape and one of those dtypes on the device."""
    _native.check_data(x, name)
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{name} has dtype {x.dtype}: it must be {allowed}")
    if x.device != device:
        raise TypeError(f"{name} is on {x.device} but q is on {device}: move them to one device")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {tuple(shape)}")
