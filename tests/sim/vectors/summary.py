"""Which program compared each instruction form with a card, and how closely.

``python3 -m tests.sim.vectors.summary`` prints this as JSON. It needs NumPy, but not archflash.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from . import silicon
from .programs import FAMILIES, Program, programs


@dataclasses.dataclass(frozen=True)
class Checked:
    """One instruction form in one program.

    Attributes:
        instruction: The form as PTX spells it, with every modifier.
        opcode: The instruction's first part.
        family: The program's family.
        program: The program's key in the recorded data; an instruction may have several programs.
        tolerance: ``exact``, or how far the simulator may be from the card.
        compared: How many results are compared.
    """

    instruction: str
    opcode: str
    family: str
    program: str
    tolerance: str
    compared: int


def card() -> dict[str, str]:
    """What the programs were recorded on: gpu, driver, cuda, date."""
    return silicon.load().about


def checked() -> list[Checked]:
    """What was compared, in the order of programs.py."""
    rows = []
    for program in (program for family in FAMILIES for program in programs(family)):
        # The name of a chain through the carry flag has two instructions. Other names may have a
        # note behind the instruction.
        parts = [part.rstrip(",") for part in program.name.split(" ")]
        names = [part for part in parts if part[0].isalpha() and "." in part]
        rows += [
            Checked(
                instruction=name,
                opcode=name.split(".")[0],
                family=program.family,
                program=program.key,
                tolerance="exact" if program.bound is None else str(program.bound),
                compared=_compared(program),
            )
            for name in names
        ]
    return rows


def _compared(program: Program) -> int:
    count = program.count if program.bound is None else min(program.explicit, program.count)
    return count * len(program.writes)


if __name__ == "__main__":
    json.dump({"card": card(), "checked": [dataclasses.asdict(row) for row in checked()]},
              sys.stdout, indent=1)  # fmt: skip
    print()
