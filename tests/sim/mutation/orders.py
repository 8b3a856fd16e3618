"""Mutants of what orders CTAs and launches, which only some cards show where it is missing:

    python -m tests.sim.mutation.orders [REGEX]     # of all kernels, or of those

runs all such mutants of every kernel that has targets, and prints how many are caught by kind.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.kernel_files import ptx_texts

from . import backward, gathered, latent, masked, planned, runner
from .mutants import order_of
from .runner import Outcome, Score, Subject
from .statements import kernel_module
from .targets import TARGETS


def subjects(pattern: str) -> Iterator[Callable[[], Subject]]:
    """The kernels with targets that have such statements, each as a function that prepares it."""
    words = r"griddepcontrol|clusterlaunchcontrol|tcgen05\.alloc|acquire\.(gpu|cluster)|wait_group;"
    found = {
        kernel
        for _, _, text in ptx_texts()
        for kernel in re.findall(r"\.entry (\w+)\(", text)
        if re.search(words, kernel_module(text, kernel))
    }
    for target in TARGETS:
        if target.kernel in found and re.search(pattern, target.kernel):
            yield partial(runner.subject_of, target)
    others = (*backward.TARGETS, *masked.TARGETS, *latent.TARGETS, *gathered.TARGETS)
    for other in others:
        if other.kernel in found and re.search(pattern, other.kernel):
            yield partial(planned.subject_of, other)


def main() -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for prepare in subjects(sys.argv[1] if len(sys.argv) > 1 else ""):
        subject = prepare()
        chosen = [mutant for mutant in subject.mutants(0) if order_of(mutant.change)]
        score = Score(runner.run_mutants(subject, chosen))
        print(f"{subject.name}: {score}", flush=True)
        for survivor in score.survivors:
            print(f"  survived: {survivor.change} | {survivor.source}", flush=True)
        for outcome in score.outcomes:
            outcomes[order_of(outcome.change)].append(outcome)
    for kind, each in outcomes.items():
        print(f"{kind}: {Score(each)}")


if __name__ == "__main__":
    main()
