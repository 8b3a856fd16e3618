"""The sample kernels of protocols as kernels that are mutated: what a mutant gives must be the same
to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import sim

from ..protocols.cases import Case, cases, sample_cases
from ..protocols.replay import launch
from .runner import Subject

KERNELS = (
    "pipeline-120f", "wgmma-shared", "wgmma-registers", "multicast", "cluster-exchange",
    "store-async",
)  # fmt: skip


class _Trial:
    """One launch of a case."""

    same_bits = True

    def __init__(self, case: Case) -> None:
        self.name = case.name
        self._case = case
        self._expected: Tensor | None = None

    def run(
        self, program: sim.Program, mode: str, seed: int, race: bool, limit: int
    ) -> tuple[sim.Report, list[Tensor]]:
        report, output = launch(
            self._case,
            program,
            mode=mode,
            seed=seed,
            race_check=race,
            threads=1,
            max_instructions=limit,
            check=False,
        )
        return report, [output]

    def verdict(self, outputs: list[Tensor]) -> str:
        """The first outputs that come are the unchanged kernel's."""
        if self._expected is None:
            self._expected = outputs[0]
        wrong = int((outputs[0] != self._expected).sum())
        return f"{wrong} wrong elements" if wrong else ""


def subjects() -> list[Subject]:
    """The kernels with what they give unchanged."""
    torch.manual_seed(0)
    named = {case.name: case for case in [*cases(), *sample_cases()]}
    return [
        Subject(
            f"protocol_{name}",
            "test",
            named[name].text,
            named[name].block,
            [_Trial(named[name])],
            protocols=True,
        )
        for name in KERNELS
    ]
