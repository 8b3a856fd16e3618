"""Generates tests/sim/instructions.csv (each form that the simulator knows, and what stands behind
it), and in docs/simulator.md a summary of it and the table of mutation scores.

``python -m tests.sim.instruction_table`` checks that both are up to date, ``--write`` writes them
anew. What each row says is taken from the simulator's own table and from the tests: the programs
recorded on a card, the third-party PTX, and the calls that a card and the simulator ran.

A form is a family of spellings of an instruction: ``[.a/.b]`` may be missing, ``(.a/.b)`` is one of
them, and ``$int`` is one of a set, which the last rows of the file list. A row of the file has the
spellings of a form behind which one kind of evidence stands, and the bound that they are held to
where their bits are not a card's. A form that rests on the ISA's text alone has one row.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from archflash import _archflash_sim as _native
from archflash import sim

from .mutation.summaries import older_kernels, summaries

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = Path(__file__).with_name("instructions.csv")
DETAILS = ROOT / "docs" / "simulator.md"
THIRD_PARTY = Path(__file__).parent / "third_party.json"
NOT_LOADED = "tcgen05 that does not load"
COLUMNS = ("group", "form", "evidence", "spellings", "bound")
ISA_TEXT, REFUSED, SET = "ISA text", "refused", "set of modifiers"


@dataclass
class Row:
    """One form of the simulator's table.

    Attributes:
        about: the group it is in.
        opcode, modifiers: as in `_archflash_sim.forms`.
        exact: spellings whose results on a card are met bit for bit.
        bounded: spellings held to a bound, and the bound.
        third_party: spellings that third-party programs execute, whose results are right.
        kernels: spellings that whole kernels execute, on a card with the same results.
        protocols: spellings that small kernels of protocols execute, on a card with the same bits.
    """

    about: str
    opcode: str
    modifiers: str
    exact: set[str] = field(default_factory=set)
    bounded: dict[str, str] = field(default_factory=dict)
    third_party: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    protocols: set[str] = field(default_factory=set)

    @property
    def spelling(self) -> str:
        """Like "ld[.volatile/.relaxed].global.$mem": [] may be missing, / means or."""
        text = self.opcode
        for word in self.modifiers.split():
            optional = word.startswith("?")
            names = "/".join("." + name for name in word.lstrip("?").split("|"))
            text += f"[{names}]" if optional else f"({names})" if "/" in names else names
        return text

    @property
    def evidence(self) -> bool:
        """Whether anything but the ISA's text stands behind any spelling of it."""
        return bool(
            self.exact or self.bounded or self.protocols or self.third_party or self.kernels
        )


def rows() -> list[Row]:
    """The simulator's table, in its order."""
    return [Row(*form) for form in _native.forms()]


def row_of(table: Sequence[Row], instruction: str) -> Row:
    """The row of a spelled instruction.

    Raises:
        ValueError: the simulator does not know it.
    """
    index = _native.find_form(instruction)
    if index < 0:
        raise ValueError(f"the simulator has no form for {instruction}")
    return table[index]


def add_vectors(table: Sequence[Row]) -> dict[str, str]:
    """Enters the programs recorded on a card; returns what is known of the card."""
    from .vectors import summary

    for program in summary.checked():
        row = row_of(table, program.instruction)
        if program.tolerance == "exact":
            row.exact.add(program.instruction)
        else:
            row.bounded[program.instruction] = program.tolerance
    for row in table:  # a spelling with several programs is as good as the worst of them
        row.exact -= row.bounded.keys()
    return summary.card()


def add_third_party(table: Sequence[Row]) -> list[str]:
    """Enters what third-party programs execute; returns the programs."""
    programs = json.loads(THIRD_PARTY.read_text()) if THIRD_PARTY.exists() else []
    for program in programs:
        for instruction in program["executed"]:
            row_of(table, instruction).third_party.add(instruction)
    return [program["program"] for program in programs]


def add_kernels(table: Sequence[Row]) -> str:
    """Enters what the recorded whole calls execute; returns the card's name and the date."""
    from .cards.cases import CASES

    about = json.loads((Path(__file__).parent / "cards" / "h200.json").read_text())
    for case in CASES:
        tensors, options = case.call("cpu")
        run = sim.run(
            *tensors,
            implementation=case.implementation,
            device="H200",
            mode="eager",
            race_check=False,
            return_lse=True,
            **options,
        )
        for report in run.reports:
            for instruction in report.opcodes:
                row_of(table, instruction).kernels.add(instruction)
    return f"{about['gpu']}, {about['date']}"


def add_protocols(table: Sequence[Row]) -> str:
    """Enters what the recorded kernels of protocols execute; returns how many, the card, the date.

    Raises:
        ValueError: the simulator's bits are others than the card's.
    """
    from .protocols import test_protocols
    from .protocols.cases import cases
    from .protocols.replay import run

    about = json.loads((test_protocols.FOLDER / "h200.json").read_text())
    recorded = [case for case in cases() if case.name in about["keys"]]
    with np.load(test_protocols.FOLDER / "h200.npz") as outputs:
        for case in recorded:
            report, output = run(case, "lazy")
            if output != outputs[case.name].tobytes():
                raise ValueError(f"{case.name} gives other bits than the card")
            for instruction in report.opcodes:
                row_of(table, instruction).protocols.add(instruction)
    return f"{len(recorded)} small kernels on an {about['gpu']}, {about['date']}"


def lines_of(row: Row) -> list[tuple[str, ...]]:
    """The rows of the file about one form."""
    by_name = {
        "card, exact": row.exact,
        "protocols": row.protocols,
        "third-party": row.third_party,
        "our kernels": row.kernels,
    }
    found = [(name, " ".join(sorted(words)), "") for name, words in by_name.items() if words]
    found += [("card, bound", word, row.bounded[word]) for word in sorted(row.bounded)]
    if not found:
        found = [(REFUSED if row.about == NOT_LOADED else ISA_TEXT, "", "")]
    return [(row.about, row.spelling, *line) for line in found]


def instructions(table: Sequence[Row]) -> str:
    """The text of instructions.csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in table:
        writer.writerows(lines_of(row))
    for key, names in _native.modifier_sets():
        if any(f"${key}" in row.modifiers for row in table):
            words = " ".join(f".{name}" for name in names.split("|"))
            writer.writerow(("modifiers", f"${key}", SET, words, ""))
    return out.getvalue()


def summary() -> tuple[list[Row], str]:
    """The simulator's table with its evidence, and what docs/simulator.md says of it."""
    table = rows()
    card = add_vectors(table)
    programs = add_third_party(table)
    whole = add_kernels(table)
    protocols = add_protocols(table)
    backed = sum(row.evidence for row in table)
    lines = [
        f"There are {len(table)} forms of instructions; for {backed} of them some spelling has "
        "more behind it than the ISA's text.",
        "",
        "| evidence | what stands behind such a spelling |",
        "| --- | --- |",
        f"| card, exact; card, bound | results on an {card['gpu']} ({card['date']}, CUDA "
        f"{card['cuda']}) that are met bit for bit, or within the stated bound "
        "(`tests/sim/vectors`) |",
        f"| protocols | {protocols}, whose outputs are met bit for bit (`tests/sim/protocols`) |",
        f"| third-party | {'; '.join(programs)}: the output matches float64 |",
        f"| our kernels | whole ampere and simt calls whose outputs a card gave too ({whole}, "
        "`tests/sim/cards`) |",
        "| ISA text | nothing but the reading of the PTX ISA, and our own tests of that |",
        "",
        "| tensor cores of capability | 16 bits and tf32 | FP8 mma.sync | FP8 wgmma, tcgen05 | "
        "source |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| from {first // 10}.{first % 10} on | {sums(wide)} | {sums(fp8)} | {sums(fp8_async)} | "
        f"{source} |"
        for first, source, wide, fp8, fp8_async in _native.tensor_cores()
    ]
    return table, "\n".join(lines)


def sums(bytes_and_bits: tuple[int, int]) -> str:
    """How a tensor core adds up, in words."""
    size, bits = bytes_and_bits
    return f"{size} bytes, {bits} bits" if size else ""


def mutation() -> str:
    """What the last run of the mutants of each implementation gave, and of which kernels."""
    lines = [
        "| implementation | mutants run | excused | caught, of those not excused | "
        "caught, of all | kernels | date, commit |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for summary in summaries():
        older = older_kernels(summary)
        if not older:
            kernels = "today's"
        elif len(older) == len(summary["kernels"]):
            kernels = "older ones"
        else:
            kernels = f"older ones: {', '.join(older)}"
        of = "" if summary["of"] is None else f" of {summary['of']}"
        extent = "all" if summary["extent"] == "full" else f"a sample{of}"
        lines.append(
            f"| {summary['implementation']} | {summary['run']}, {extent} | {summary['excused']} | "
            f"{summary['score']:.1%} | {summary['score_if_nothing_were_excused']:.1%} | "
            f"{kernels} | {summary['date']}, {summary['commit']} |"
        )
    return "\n".join(lines)


def with_part(details: str, name: str, part: str) -> str:
    """A document with a generated part between its marks.

    Raises:
        ValueError: it has no place for it.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = details.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no {begin} ... {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 when a file is not up to date."""
    status = 0
    table, about = summary()
    details = with_part(DETAILS.read_text(), "instructions", about)
    for path, now in (
        (INSTRUCTIONS, instructions(table)),
        (DETAILS, with_part(details, "mutation", mutation())),
    ):
        if path.exists() and path.read_text() == now:
            continue
        if list(arguments) == ["--write"]:
            path.write_text(now)
        else:
            print(f"{path} is not up to date: python -m tests.sim.instruction_table --write")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
