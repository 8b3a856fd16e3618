"""Runs mutants of a kernel on the simulator and says which are caught."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from archflash import sim
from archflash.sim._attention import (
    bound_parameters,
    find_program,
    place_operands,
    ptx_text,
    resident_ctas,
    starts_early,
)
from archflash.sim._launch import run_kernel

from ..explained import explanation
from ..ptx_hash import module_hash
from ..tags import SOURCES, tags_at
from .excuses import EXCUSES
from .mutants import KINDS, Mutant, mutants, order_of
from .statements import Statement, kernel_module, split
from .targets import TARGETS, Target

# A run that takes so many times the instructions of the kernel's own is an endless loop.
PATIENCE = 8
# (mode, seed, race check) of the runs of a mutant, cheapest first.
_EVERY_MODE = (("lazy", 0, True), ("random", 1, True), ("eager", 0, True), ("priority", 2, True))
SCHEDULES = {
    "sync": _EVERY_MODE,
    "protocol": _EVERY_MODE,
    "predicate": (("eager", 0, False), ("random", 1, True)),
    "constant": (("eager", 0, False), ("random", 1, True)),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        kernel, kind, change: which it was.
        statement: the instruction.
        source: the line of CUDA that it came from: file and text.
        result: "error", "lint", "numbers" (wrong by the error rule), "bits" (others than the
            kernel's own), "excused", "survived", or "no influence": it is proved that no change of
            this constant is seen by any thread, so that it is no mutant.
        detail: what was found, why it is excused.
    """

    kernel: str
    kind: str
    change: str
    statement: str
    source: str
    result: str
    detail: str

    @property
    def caught(self) -> bool:
        return self.result in ("error", "lint", "numbers", "bits")


class Trial(Protocol):
    """Something that a kernel has to get right.

    Attributes:
        name: what it exercises.
        same_bits: whether every run of the unchanged kernel gives the same bits.
    """

    @property
    def name(self) -> str: ...

    @property
    def same_bits(self) -> bool: ...

    def run(
        self, program: sim.Program, mode: str, seed: int, race: bool, limit: int
    ) -> tuple[sim.Report, list[Tensor]]:
        """Launches the kernel, with errors in the report; its outputs."""

    def verdict(self, outputs: list[Tensor]) -> str:
        """What is wrong with the outputs; empty: nothing."""


@dataclass(frozen=True)
class _Baseline:
    trial: Trial
    executed: tuple[int, ...]
    outputs: list[Tensor]
    limit: int
    seconds: float


class Subject:
    """A kernel with what it gives unchanged.

    Attributes:
        name: for reports.
        threads: of a CTA.
        ptx: the hash of its PTX.
        statements: its instructions.
    """

    def __init__(
        self,
        name: str,
        kernel: str,
        text: str,
        threads: int,
        trials: Sequence[Trial],
        protocols: bool = False,
    ) -> None:
        """Raises AssertionError if the unchanged kernel does not pass its own trials.

        Args:
            name: for reports.
            kernel: its entry.
            text: PTX that has it.
            threads: of a CTA.
            trials: what it has to get right.
            protocols: mutants of protocols, too, see `mutants`.
        """
        self.name = name
        self.threads = threads
        self._protocols = protocols
        self._module = kernel_module(text, kernel)
        self.ptx = module_hash(self._module)
        self.statements = split(self._module)
        program = sim.load(self._module)
        loaded = program.instructions(kernel)[: len(self.statements)]
        assert [s.text.split() for s in self.statements] == [
            row["statement"].split() for row in loaded
        ], "instructions are numbered as the simulator numbers them"
        self._sources = [row["source"] for row in sim.load(text).instructions(kernel)]
        ends = [i for i, character in enumerate(self._module) if character == "\n"]
        source_of_line = {
            bisect.bisect_left(ends, statement.begin) + 1: source
            for statement, source in zip(self.statements, self._sources, strict=False)
        }
        # Findings of the unchanged kernel, which are explained: by kind and line of the module.
        self._known: set[tuple[str, int]] = set()
        self._baselines = []
        for trial in trials:
            limit = 1 << 30
            for mode, seed, race in sorted({run for runs in SCHEDULES.values() for run in runs}):
                report, outputs = trial.run(program, mode, seed, race, limit)
                for finding in report.findings:
                    here = dataclasses.replace(finding, source=source_of_line[finding.line])
                    assert explanation(name, here), f"{name}, {trial.name}: {finding}"
                    self._known.add((finding.kind, finding.line))
                verdict = trial.verdict(outputs)
                assert not verdict, f"{name}, {trial.name}: {verdict}"
                if limit != 1 << 30:
                    before = self._baselines[-1]
                    same = all(map(_same_bits, outputs, before.outputs))
                    assert same or not trial.same_bits, "deterministic"
                    continue
                limit = PATIENCE * report.total_instructions + 100_000
                self._baselines.append(
                    _Baseline(trial, report.executed, outputs, limit, report.seconds)
                )
        self._baselines.sort(key=lambda baseline: baseline.seconds)

    def executed(self, statement: int) -> bool:
        """Whether any call executes an instruction."""
        return any(baseline.executed[statement] > 0 for baseline in self._baselines)

    def coverage(self) -> float:
        """The part of the instructions that are executed."""
        return sum(self.executed(s.index) for s in self.statements) / len(self.statements)

    def mutants(self, seed: int) -> list[Mutant]:
        executed = [self.executed(s.index) for s in self.statements]
        return mutants(self.statements, executed, self.threads, seed, protocols=self._protocols)

    def traps(self, statement: Statement) -> bool:
        """Whether a run notices that an instruction became `trap`: that it is executed."""
        trap = Mutant("predicate", statement.index, "trap", statement.begin, statement.end, "trap")
        result, detail = self._judge(trap, SCHEDULES[trap.kind])
        return result == "error" and "trap" in detail

    def run(self, mutant: Mutant, briefly: bool = False) -> Outcome:
        """Runs a mutant until it is caught. briefly: one of which an excuse says that it computes
        the same runs in two kinds of schedules only. In all it takes as long as twenty others.
        """
        statement = self.statements[mutant.statement]
        schedules = SCHEDULES[mutant.kind]
        brief = briefly and self._find_excuse(mutant) != ""
        result, detail = self._judge(mutant, schedules[:2] if brief else schedules)
        source = self.source(mutant.statement)
        if mutant.equivalent:
            assert result == "survived", f"proved equivalent, yet {result}: {detail}"
            result, detail = "no influence", mutant.equivalent
        elif result == "survived" and (excuse := self._find_excuse(mutant)):
            result, detail = "excused", excuse
        text = " ".join(statement.text.split())
        return Outcome(self.name, mutant.kind, mutant.change, text, source, result, detail)

    def _find_excuse(self, mutant: Mutant) -> str:
        calls = {b.trial.name for b in self._baselines if b.executed[mutant.statement] > 0}
        return find_excuse(mutant, self._sources[mutant.statement], self.name, calls)

    def source(self, statement: int) -> str:
        """The line of CUDA that an instruction came from: "file: its text"."""
        return source_text(self._sources[statement])

    def _judge(self, mutant: Mutant, schedules: Sequence[tuple[str, int, bool]]) -> tuple[str, str]:
        module = mutant.apply(self._module)
        assert module.count("\n") == self._module.count("\n"), "findings are known by their lines"
        program = sim.load(module)
        # Where the instruction is not executed nothing is different.
        baselines = [b for b in self._baselines if b.executed[mutant.statement] > 0]
        assert baselines, "a mutant that is not executed says nothing"
        only_bits = ""
        for mode, seed, race in schedules:
            for baseline in baselines:
                report, outputs = baseline.trial.run(program, mode, seed, race, baseline.limit)
                where = f"{baseline.trial.name}, {mode}"
                for severity in ("error", "lint"):
                    for finding in report.findings:
                        known = (finding.kind, finding.line) in self._known
                        if finding.severity == severity and not known:
                            return severity, f"{where}: {finding.kind}: {finding.message}"
                if all(map(_same_bits, outputs, baseline.outputs)):
                    continue
                if verdict := baseline.trial.verdict(outputs):
                    return "numbers", f"{where}: {verdict}"
                if baseline.trial.same_bits:
                    only_bits = only_bits or where
        if only_bits:
            return "bits", only_bits
        return "survived", ""


def source_text(source: str) -> str:
    """ "file: text of the line" for "file:line, inlined at ..."; empty for an empty one.

    What a file of wrappers or somebody else's is inlined at says more: it is only named before it.
    """
    for match in re.finditer(r"([^, ]+):(\d+)", source):
        file, line = SOURCES / match[1], int(match[2])
        if file.exists() and not match[1].startswith("common/ptx/"):
            inner = source[: match.start()].split(":")[0]
            text = f"{match[1]}: {file.read_text().splitlines()[line - 1].strip()}"
            return f"{inner}, in {text}" if inner else text
    return source.split(":")[0]


def find_excuse(mutant: Mutant, source: str, kernel: str, calls: Collection[str]) -> str:
    """Why a surviving mutant computes the same, as the list of excuses has it; empty: no excuse.

    Args:
        mutant: the mutant.
        source: the instruction's: "file:line, inlined at file:line, ...".
        kernel: its name.
        calls: the names of the calls that execute the instruction.
    """
    tags = tags_at(source, "mutants")
    for excuse in EXCUSES:
        if (
            mutant.kind == excuse.kind
            and re.fullmatch(excuse.change, mutant.change)
            and (not excuse.tag or excuse.tag in tags)
            and excuse.kernel in kernel
            and excuse.unless not in calls
        ):
            return excuse.reason
    return ""


@cache
def _unchanged(image: str, capability: tuple[int, int]) -> sim.Program:
    return find_program(image, capability)


class PlannedCall(Protocol):
    """See `Call`. judged: the operands that a run writes and `verdict` judges; same_bits: see
    `Trial`.
    """

    name: str
    same_bits: bool
    plan: Any
    launches: list[dict[str, Any]]
    number: int
    tensors: dict[str, Tensor]
    judged: tuple[str, ...]

    def verdict(self, tensors: dict[str, Tensor]) -> str: ...


class CallTrial:
    """One call of attention or of its backward pass. Launches of other kernels, which are never
    mutated, run too.
    """

    def __init__(self, call: PlannedCall) -> None:
        self.name = call.name
        self.same_bits = call.same_bits
        self._call = call

    def run(
        self, program: sim.Program, mode: str, seed: int, race: bool, limit: int
    ) -> tuple[sim.Report, list[Tensor]]:
        call = self._call
        # New ones, full of NaN, or of bytes 255; the gradient of attn_mask is added to zeros.
        filled = {"workspace": 255, "dmask": 0}
        written = {
            name: torch.full_like(call.tensors[name], filled.get(name, math.nan))
            for name in dict.fromkeys((*call.judged, "workspace"))
            if name in call.tensors
        }
        tensors = call.tensors | written
        memory, addresses = place_operands(call.plan, tensors)
        capability = call.plan.device.capability
        reports = []
        for number, launch in enumerate(call.launches):
            mine = number == call.number
            runs = program if mine else _unchanged(launch["image"], capability)
            reports.append(
                run_kernel(
                    runs,
                    launch["kernel"],
                    bound_parameters(call.plan, number, launch, addresses),
                    memory,
                    grid=launch["grid"],
                    block=launch["block"],
                    cluster=launch["cluster"],
                    shared_bytes=launch["shared_bytes"],
                    mode=mode,
                    seed=seed,
                    race_check=race,
                    threads=1,
                    max_instructions=limit if mine else 1 << 30,
                    capability=capability,
                    shared_limit=call.plan.device.shared_per_block,
                    resident_ctas=resident_ctas(call.plan),
                    starts_early=starts_early(call.launches, number),
                    next_starts_early=starts_early(call.launches, number + 1),
                    strict=True,
                )
            )
            if any(finding.severity == "error" for finding in reports[-1].findings):
                break
        # What a mutant leaves for the launch behind it may be an error there.
        report = reports[min(call.number, len(reports) - 1)]
        errors = [
            f for r in reports if r is not report for f in r.findings if f.severity == "error"
        ]
        report = dataclasses.replace(report, findings=(*report.findings, *errors))
        return report, [written[name] for name in call.judged if name in written]

    def verdict(self, outputs: list[Tensor]) -> str:
        names = [name for name in self._call.judged if name in self._call.tensors]
        return self._call.verdict(dict(zip(names, outputs, strict=True)))


def subject_of(target: Target) -> Subject:
    """An attention kernel with what it gives unchanged."""
    calls = target.calls()
    first = calls[0]
    launch = first.launches[first.number]
    text = ptx_text(launch["image"], first.plan.device.capability)
    trials = [CallTrial(call) for call in calls]
    threads = math.prod(launch["block"])
    return Subject(target.kernel, target.kernel, text, threads, trials)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def run_mutants(subject: Subject, chosen: list[Mutant], briefly: bool = False) -> list[Outcome]:
    """Runs mutants on all cores; briefly: see `Subject.run`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda mutant: subject.run(mutant, briefly), chosen))


def sample(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """All mutants of synchronisation, and others, as many of each kind, up to `count`; any mutants
    where there are more of synchronisation than that.
    """
    chosen = [mutant for mutant in found if mutant.kind == "sync"]
    rng = random.Random(seed)
    if count < len(chosen):
        return sorted(rng.sample(found, count), key=lambda m: (m.statement, m.begin))
    others = {
        kind: [mutant for mutant in found if mutant.kind == kind]
        for kind in KINDS
        if kind != "sync"
    }
    for left, kind in enumerate(sorted(others, key=lambda kind: len(others[kind]))):
        share = max(0, count - len(chosen)) // (len(others) - left)
        chosen += rng.sample(others[kind], min(share, len(others[kind])))
    return sorted(chosen, key=lambda mutant: (mutant.statement, mutant.begin))


def sample_of_all(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of any kind, and all others of ORDERS."""
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return chosen + [x for x in found if order_of(x.change) and x not in chosen]


@dataclass(frozen=True)
class Score:
    """The outcomes of a set of mutants."""

    outcomes: list[Outcome]

    def count(self, *results: str) -> int:
        return sum(outcome.result in results for outcome in self.outcomes)

    @property
    def run(self) -> int:
        """How many were mutants."""
        return len(self.outcomes) - self.count("no influence")

    @property
    def excused(self) -> int:
        return self.count("excused")

    @property
    def caught(self) -> int:
        return sum(outcome.caught for outcome in self.outcomes)

    @property
    def survivors(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.result == "survived"]

    @property
    def value(self) -> float:
        """Caught of those that are not excused."""
        return self.caught / max(1, self.run - self.excused)

    def __str__(self) -> str:
        results = Counter(outcome.result for outcome in self.outcomes)
        shown = ", ".join(f"{count} {result}" for result, count in sorted(results.items()))
        return f"{self.value:.3f} of {self.run - self.excused} mutants ({shown})"

    def to_dict(self) -> dict[str, Any]:
        """The score, and the scores with stricter rules, for the summary."""
        unexcused = self.run - self.excused
        kinds = {
            kind: dict(sorted(Counter(o.result for o in self.outcomes if o.kind == kind).items()))
            for kind in KINDS
        }
        return {
            "run": self.run,
            "score": round(self.value, 4),
            "score_if_nothing_were_excused": round(self.caught / max(1, self.run), 4),
            "score_if_other_bits_did_not_count": round(
                (self.caught - self.count("bits")) / max(1, unexcused), 4
            ),
            "excused": self.excused,
            "constants_without_influence": self.count("no influence"),
            "by_kind": kinds,
        }


def run_subject(subject: Subject, count: int | None, seed: int) -> tuple[Score, int]:
    """Runs `count` mutants of a kernel, by seed; None: all, and what is proved to be none.

    Returns the score and how many mutants there are to choose from.
    """
    found = subject.mutants(seed)
    real = [mutant for mutant in found if not mutant.equivalent]
    chosen = found if count is None else sample(real, count, seed)
    return Score(run_mutants(subject, chosen)), len(real)


def targets_of(implementation: str) -> list[Target]:
    return [target for target in TARGETS if target.implementation == implementation]
