"""The sample kernels of protocols as kernels that are mutated: what a mutant gives must be the same
to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import sim

from ..protocols.cases import Case, cases, sample_cases
from .runner import Subject

KERNELS = (
    "pipeline-120f", "wgmma-shared", "wgmma-registers", "multicast", "cluster-exchange",
    "store-async",
)  # fmt: skip


class _Trial:
    """One launch of a case."""

    def __init__(self, case: Case) -> None:
        self.name = case.name
        self._case = case
        self._expected: Tensor | None = None

    def run(
        self, program: sim.Program, mode: str, seed: int, race: bool, limit: int
    ) -> tuple[sim.Report, list[Tensor]]:
        case = self._case
        arguments = case.arguments()
        report = sim.launch(
            program,
            "test",
            arguments,
            grid=(case.grid,),
            cluster=(case.cluster,),
            block=(case.block,),
            shared_bytes=case.shared_bytes,
            mode=mode,
            seed=seed,
            race_check=race,
            threads=1,
            max_instructions=limit,
            check=False,
        )
        output = arguments[case.output]
        tensor = output.tensor if isinstance(output, sim.TensorMap) else output
        assert isinstance(tensor, Tensor)
        return report, [tensor]

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
