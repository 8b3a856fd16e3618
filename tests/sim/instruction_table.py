"""Generates docs/simulator-instructions.md (each form that the simulator knows, and what stands
behind it) and the table of mutation scores in docs/simulator.md.

``python -m tests.sim.instruction_table`` checks that both are up to date, ``--write`` writes them
anew. What each column says is taken from the simulator's own table and from the tests: the
programs recorded on a card, the third-party PTX, and the calls that a card and the simulator ran.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from archflash import _archflash_sim as _native
from archflash import sim

from .mutation.summaries import older_kernels, summaries

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = ROOT / "docs" / "simulator-instructions.md"
DETAILS = ROOT / "docs" / "simulator.md"
THIRD_PARTY = Path(__file__).parent / "third_party.json"
# Sentences that stand above the tables of some groups of instructions.
NOT_LOADED = "tcgen05 that does not load"
ABOUT = {
    "tcgen05": "No card with tcgen05 has run any of this: it rests on the text of the PTX ISA and "
    "on third-party PTX that gives the right numbers here.",
    NOT_LOADED: "The simulator knows these and refuses them with a sentence that says why.",
}


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


def tensor_cores() -> list[str]:
    """The section about how the tensor cores of each capability add up."""

    def sums(bytes_and_bits: tuple[int, int]) -> str:
        size, bits = bytes_and_bits
        return f"{size} bytes, {bits} bits" if size else ""

    lines = [
        "## How tensor cores add up",
        "",
        "PTX leaves it open. In the simulator it is that of the GPU that a launch is planned for, "
        "or of the PTX's target. One addition takes the products of so many bytes of a row of A "
        "and the accumulator, cuts each off, toward zero, so many bits below the largest exponent "
        "among them, and cuts off their sum. FP8 mma.sync where there is none is what ptxas makes "
        "of it: two products of f16 from zero, then the accumulator.",
        "",
        "| capability | 16 bits and tf32 | FP8 mma.sync | FP8 wgmma, tcgen05 | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| from {first // 10}.{first % 10} on | {sums(wide)} | {sums(fp8)} | {sums(fp8_async)} | "
        f"{source} |"
        for first, source, wide, fp8, fp8_async in _native.tensor_cores()
    ]
    return [*lines, ""]


def cell(words: Collection[str]) -> str:
    """How many spellings; empty for none."""
    return str(len(words)) if words else ""


def instructions() -> str:
    """The text of docs/simulator-instructions.md."""
    table = rows()
    card = add_vectors(table)
    programs = add_third_party(table)
    whole = add_kernels(table)
    protocols = add_protocols(table)
    backed = [row for row in table if row.evidence]
    lines = [
        "# The instructions that the simulator knows",
        "",
        "`python -m tests.sim.instruction_table --write` generates this page from the simulator's "
        "own table and the recorded tests; a test checks that it is up to date.",
        "",
        f"There are {len(table)} forms; for {len(backed)} of them some spelling has more behind it "
        "than the ISA's text. A form's spellings differ in their modifiers: `[.a/.b]` may be "
        "missing, `(.a/.b)` is one of them. The numbers count spellings. The end of the page lists "
        "which they are; a spelling that is not listed there stands on the ISA's text alone.",
        "",
        f"- **card, exact** and **card, bound**: spellings whose results on an {card['gpu']} "
        f"({card['date']}, CUDA {card['cuda']}) the simulator meets bit for bit, or within the "
        "stated bound (tests/sim/vectors).",
        "- **protocols**: spellings executed by kernels of TMA, mbarriers, clusters, wgmma, whose "
        f"outputs are a card's, bit for bit ({protocols}, tests/sim/protocols).",
        "- **third-party**: "
        + (
            f"spellings executed by {'; '.join(programs)}: the output matches float64."
            if programs
            else "no program yet."
        ),
        "- **our kernels**: spellings executed by whole ampere and simt calls whose outputs a card "
        f"gave too ({whole}, tests/sim/cards).",
        "- **ISA text**: nothing but the reading of the PTX ISA, and our own tests of that.",
        "",
    ]
    for about in dict.fromkeys(row.about for row in table):
        lines += [
            f"## {about[0].upper()}{about[1:]}",
            "",
            *([ABOUT[about], ""] if about in ABOUT else []),
            "| form | card, exact | card, bound | protocols | third-party | our kernels | else |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        lines += [
            f"| `{row.spelling}` | {cell(row.exact)} | {cell(row.bounded)} | "
            f"{cell(row.protocols)} | {cell(row.third_party)} | {cell(row.kernels)} | "
            f"{'' if row.evidence else 'refused' if row.about == NOT_LOADED else 'ISA text'} |"
            for row in table
            if row.about == about
        ]
        lines.append("")
    lines += tensor_cores()
    lines += ["## Sets of modifiers", ""]
    lines += [
        f"- `$name`: {', '.join(f'`.{name}`' for name in names.split('|'))}".replace("name", key, 1)
        for key, names in _native.modifier_sets()
        if any(f"${key}" in row.modifiers for row in table)
    ]
    lines += ["", "## Every spelling behind these numbers", ""]
    for row in backed:
        lines.append(f"- `{row.spelling}`")
        for name, words in (
            ("card, exact", sorted(row.exact)),
            ("card, bound", [f"{word} ({row.bounded[word]})" for word in sorted(row.bounded)]),
            ("protocols", sorted(row.protocols)),
            ("third-party", sorted(row.third_party)),
            ("our kernels", sorted(row.kernels)),
        ):
            if words:
                lines.append(f"  - {name}: {', '.join(words)}")
    return "\n".join(lines) + "\n"


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


def with_mutation(details: str) -> str:
    """The text of docs/simulator.md with the mutation scores between their marks.

    Raises:
        ValueError: it has no place for them.
    """
    begin, end = "<!-- mutation -->", "<!-- /mutation -->"
    before, found, rest = details.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no {begin} ... {end}")
    return f"{before}{begin}\n{mutation()}\n{end}{after}"


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 when a document is not up to date."""
    status = 0
    for path, now in (
        (INSTRUCTIONS, instructions()),
        (DETAILS, with_mutation(DETAILS.read_text())),
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
