"""What targets of mutation have in common: a kernel, and calls that are planned on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as _runtime
from archflash.sim._attention import ptx_text

from .runner import CallTrial, PlannedCall, Score, Subject, run_mutants, sample_of_all


class Target(Protocol):
    """A kernel, by its whole name, and the calls that a mutant of it has to get right."""

    @property
    def kernel(self) -> str: ...

    def calls(self) -> Iterator[PlannedCall]: ...


def subject_of(target: Target) -> Subject:
    """A target's kernel with what it gives unchanged."""
    calls = list(target.calls())
    launch = calls[0].launches[calls[0].number]
    text = ptx_text(launch["image"], calls[0].plan.device.capability)
    trials = [CallTrial(call) for call in calls]
    return Subject(target.kernel, target.kernel, text, math.prod(launch["block"]), trials)


def number_of(kernel: str, name: str, launches: list[dict[str, Any]]) -> int:
    """Which of a plan's launches is of the kernel."""
    kernels = [launch["kernel"] for launch in launches]
    assert kernel in kernels, f"{name} is planned on {kernels}, not on {kernel}"
    return kernels.index(kernel)


class ForwardCall:
    """One call of attention, over a cache or not, planned: see `Call`."""

    same_bits = True

    def __init__(
        self, kernel: str, implementation: str, device: _runtime.Device, name: str,
        inputs: tuple[Tensor, ...], options: dict[str, Any],
        references: tuple[Callable[..., Any], Callable[..., Tensor]], prepares: bool = False,
    ) -> None:  # fmt: skip
        """Plans a call.

        Args:
            kernel: which has to be in the plan.
            implementation: that plans the call.
            device: planned for this one.
            name: what the call exercises.
            inputs: q, k and v, or the caches in their place.
            options: the other arguments.
            references: the functions that give the exact results in float64, and the output of a
                computation in the inputs' type.
            prepares: whether the kernel only prepares what another one reads. Then the bits of the
                workspace count, too: with other ones that kernel may be right, but slower.
        """
        self.name = name
        self.judged = ("out", "lse", "workspace") if prepares else ("out", "lse")
        values = _api.option_values(inputs[0], inputs[1], {**options, "return_lse": True})
        problem = _runtime.make_problem(*inputs, values, 0).as_if_on_cuda()
        plan = _runtime.plan(implementation, problem, device)
        assert not isinstance(plan, list), f"{kernel}, {name}: {plan}"
        self.plan: Any = plan
        self.launches: list[dict[str, Any]] = plan.to_dict()["launches"]
        self.number = number_of(kernel, name, self.launches)
        self.tensors: dict[str, Tensor] = _runtime.operands(plan, *inputs, values)
        options = {name: x for name, x in options.items() if name != "num_splits"}
        self._exact, self._lse = references[0](*inputs, **options)
        self._rounded = references[1](*inputs, **options)

    def verdict(self, tensors: dict[str, Tensor]) -> str:
        """What is wrong with the outputs by the project's rules; empty: nothing."""
        out = reference.check(tensors["out"], self._exact, self._rounded)
        if not out.ok:
            return f"out {out}"
        lse = reference.check_lse(tensors["lse"], self._lse)
        return "" if lse.ok else f"lse {lse}"


def run_sample(subject: Subject, count: int, seed: int, briefly: bool = False) -> Score:
    """Runs so many mutants of a kernel, see `sample_of_all`; briefly: see `Subject.run`."""
    found = [mutant for mutant in subject.mutants(seed) if not mutant.equivalent]
    return Score(run_mutants(subject, sample_of_all(found, count, seed), briefly=briefly))


def main(targets: Sequence[Target]) -> None:
    """Runs a sample of every target's kernel: as many mutants as the first argument of the command
    line says, by default 100.
    """
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    outcomes = []
    for target in targets:
        score = run_sample(subject_of(target), count, seed=1)
        outcomes += score.outcomes
        print(f"{target.kernel}: {score}", flush=True)
        for survivor in score.survivors:
            print(f"  survived: {survivor.change} | {survivor.statement} | {survivor.source}")
    print(f"all: {Score(outcomes)}")
