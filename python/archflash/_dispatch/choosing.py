"""Who serves a call: the first implementation in the order that says it can, or the forced one."""

from __future__ import annotations

from functools import lru_cache

from archflash import _archflash as _native
from archflash import _calibrated, _proofs, _registry
from archflash._dispatch import device as devices
from archflash._dispatch import explain, forcing, order, pytorch
from archflash._dispatch.explain import Decision
from archflash._errors import ForcedImplementationError, NotCompiledError, UnsupportedError
from archflash._given import is_one_of

_ON_CPU = "q, k and v are on the CPU: move them to a CUDA device"
_NOT_INVARIANT = (
    "batch_invariant=True needs a kernel of archflash: PyTorch's own do not promise the same bits"
)


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
        self.order = order.of(problem, self._capability, device)
        self.unproved: list[str] = []
        # Kernels that multiply by block scales have code for few GPUs only: a run elsewhere, of
        # other kernels, is no proof of them.
        self.elsewhere = problem.descale < 16 and problem.approximate != "nvfp4"
        self._of: dict[str, _native.LaunchPlan | list[str]] = {}

    def _ask(self, name: str) -> _native.LaunchPlan | list[str]:
        """A kernel's plan, or its reasons."""
        answer = self._of.get(name)
        if answer is None:
            answer = _native.plan(name, self._problem, self._device)
            if not isinstance(answer, list) and self._only_forced(
                name, answer.tile is not None and answer.tile.summarizes_masks
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
        why = _proofs.why_not(name, self._capability, elsewhere=self.elsewhere)
        if why is None and self._problem.needs_grad:
            why = _proofs.why_not(name, self._capability, _proofs.BACKWARD)
        return why

    def when_served(self, name: str) -> tuple[str, bool] | None:
        """A kernel, and whether it may serve problems of this kind only where it summarizes their
        masks; None if it serves none of them.
        """
        if name == _registry.TORCH or not _native.has_code(name, self._capability):
            return None
        if self._why_not(name) is not None or self._only_forced(name, True):
            return None
        return name, self._only_forced(name, False)

    def _only_forced(self, name: str, summarizes: bool) -> bool:
        return order.only_forced(name, self._problem, self._capability, summarizes, self._device)

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


def _settled(
    problem: _native.Problem, device: _native.Device | None, name: str | None, obstacle: str | None
) -> _native.Problem:
    """The problem as `archflash.approximate` lets it be served: approximately, where the forced
    kernel or, if none is forced, any kernel offers that; else exactly. On other GPUs than those of
    8.x and 12.x exact kernels are faster.
    """
    if not problem.approximate_if_served:
        return problem
    asked = problem.approximating(True)
    offered = False
    if name is None:
        if device is not None and obstacle is None and device.capability[0] in (8, 12):
            offered = _Answers(asked, device).first()[1] is not None
    else:
        forcing.check_name(name)
        device = device or (None if name == _registry.TORCH else devices.simulated_device(name))
        offered = (
            device is not None
            and name != _registry.TORCH
            and not isinstance(_native.plan(name, asked.as_if_on_cuda(), device), list)
        )
    return problem.approximating(offered)


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
    problem = _settled(problem, device, name, obstacle)
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
        reasons[other] = answers.reasons(other) or [
            explain.why_behind(other, chosen, problem, device)
        ]
    fallback = not answers.a_kernel_could()
    why = explain.why(chosen, fallback, problem, device)
    return Decision(chosen, why, reasons, problem, device, plan, fallback, unproved)


def _select_forced(
    problem: _native.Problem, device: _native.Device | None, name: str, obstacle: str | None
) -> Decision:
    forcing.check_name(name)
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
        device = devices.simulated_device(name)
        problem = problem.as_if_on_cuda()
        why += f"; tensors on the CPU are served by the simulator, as on {device.name}"
    if obstacle:
        raise ForcedImplementationError(f"{name} is forced, but {obstacle}")
    answer = _native.plan(name, problem, device)
    if isinstance(answer, list):
        listed = "".join(f"\n  {reason}" for reason in answer)
        raise ForcedImplementationError(
            f"{name} is forced, but cannot serve {explain.describe_problem(problem)}:{listed}"
        )
    return Decision(name, why, _unasked(name), problem, device, answer, False)


def _unasked(name: str) -> dict[str, list[str]]:
    return {other: [f"{name} is forced"] for other in _registry.names() if other != name}


def _require_kernel(
    chosen: str, answers: _Answers, problem: _native.Problem, device: _native.Device
) -> None:
    """Raises UnsupportedError where `torch` would serve a call that only a kernel can."""
    if chosen != _registry.TORCH or not problem.batch_invariant:
        return
    refusals = {name: answers.reasons(name) for name in answers.order if name != _registry.TORCH}
    kernel, reasons = explain.nearest(refusals, problem, device)
    listed = "".join(f"\n  {kernel}: {reason}" for reason in reasons)
    raise UnsupportedError(f"{_NOT_INVARIANT}, and none serves this call:{listed}")


def choose(
    problem: _native.Problem, device: _native.Device | None, name: str | None, obstacle: str | None
) -> tuple[_native.LaunchPlan | None, dict[str, list[str]]]:
    """What `select` decides, without its explanations where they take time: a decoding loop comes
    here with a new length each step.

    Returns:
        The plan, None if `torch` serves the problem; and where that is because no kernel can, the
        reasons of each kernel, in the order in which they were asked.

    Raises:
        UnsupportedError: no kernel can, and `torch` must not.
    """
    problem = _settled(problem, device, name, obstacle)
    if name is not None or device is None or obstacle is not None:
        decision = select(problem, device, name, obstacle)
        return decision.plan, decision.reasons if decision.fallback else {}
    answers = _Answers(problem, device)
    chosen, plan = answers.first()
    _require_kernel(chosen, answers, problem, device)
    if answers.unproved:
        _proofs.note(answers.unproved[0], device, chosen, answers.elsewhere)
    if plan is not None or answers.a_kernel_could():
        return plan, {}
    kernels = (kernel for kernel in answers.order if kernel != _registry.TORCH)
    return None, {kernel: answers.reasons(kernel) for kernel in kernels}


def decide(
    problem: _native.Problem, device_index: int, name: str | None
) -> _native.LaunchPlan | None:
    """The plan for a call on a real device; None if `torch` serves it. The runtime calls this when
    the plan cache misses.
    """
    device, obstacle = devices.device_of(problem, device_index)
    plan, refusals = choose(problem, device, name, obstacle)
    if refusals:
        assert device is not None
        kernel, reasons = explain.nearest(refusals, problem, device)
        for reason in reasons:
            explain.note_fallback(f"{kernel}: {reason}")
    return plan


# A kernel, and whether it serves only calls in which it summarizes the masks first.
_Kernels = list[tuple[str, bool]]


def order_of_kind(
    problem: _native.Problem, device_index: int, name: str | None
) -> tuple[_native.Device, _Kernels, _Kernels] | None:
    """Who is asked to serve the problems of this one's kind. The runtime calls this once for each
    kind (src/runtime/kinds.h), and then asks them itself: what is read of the problem here must be
    the same for all problems of a kind.

    Returns:
        The GPU to plan for, and the kernels that come before `torch` and behind it, without those
        that cannot run there, have no proof or serve the call only if they are forced. None:
        `decide` is asked for each problem.
    """
    device, obstacle = devices.device_of(problem, device_index)
    if obstacle is not None or problem.approximate_if_served:
        return None
    if name is not None:
        if not is_one_of(name, _registry.kernel_names()) or not _native.targets(name):
            return None
        return device or devices.simulated_device(name), [(name, False)], []
    if device is None or _calibrated.table_of(device) is not None:
        return None  # what the user measured depends on every length
    answers = _Answers(problem, device)
    torch = answers.order.index(_registry.TORCH)
    chosen, _ = answers.first()
    if answers.unproved:
        _proofs.note(answers.unproved[0], device, chosen, answers.elsewhere, stacklevel=3)
    kernels = [answers.when_served(kernel) for kernel in answers.order]
    before = [x for x in kernels[:torch] if x is not None]
    return device, before, [x for x in kernels[torch + 1 :] if x is not None]


def first_plan(problem: _native.Problem, device: _native.Device) -> _native.LaunchPlan | None:
    """The plan of the implementation that serves a problem on a GPU if none is forced; None if that
    is `torch`.
    """
    return _Answers(problem, device).first()[1]


def why_torch(problem: _native.Problem, device: _native.Device) -> str:
    """Why PyTorch serves a problem that kernels could serve too."""
    return explain.why(_registry.TORCH, False, problem, device)


@lru_cache(maxsize=256)
def pytorch_drops_faster(problem: _native.Problem, device: _native.Device | None) -> bool:
    """Whether PyTorch's SDPA serves a call with dropout faster than our kernels: where it has a
    fused one, but for calls that a kernel serves which was measured to be faster.

    Args:
        problem: the call without its dropout.
        device: where its tensors are; None for the CPU.
    """
    if device is None or not pytorch.differentiates(problem, device.capability, dropout=True):
        return False
    # Which share is dropped does not decide who serves a call.
    dropped = _native.Problem.from_dict(problem.to_dict() | {"dropout_p": 0.5})
    plan = first_plan(dropped, device)
    return plan is None or not _registry.drops_faster_than_pytorch(
        plan.implementation, device.capability, min(problem.d, problem.dv)
    )
