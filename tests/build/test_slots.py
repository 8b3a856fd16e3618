"""slots.csv is what the machine code says, and the reader of machine code reads it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import slots
from .conftest import built_of
from .machine_code import Flow, main_loops

FOLDERS = slots.folders()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_has_the_slots_of_a_folder(folder: str, cuobjdump: Path, nvdisasm: Path) -> None:
    written = slots.sections(slots.TABLE.read_text()).get(folder)
    assert written, "run python -m tests.build.slots --write"
    assert {row[1] for row in written} == {slots.home_target(folder)}
    built_of([slots.home_target(folder)])
    (ptxas,) = {row[2] for row in written}
    here = slots.assemblers(folder, FOLDERS[folder])
    if ptxas != here:
        pytest.skip(f"ptxas {ptxas} made the table's rows of {folder}, and {here} this build")
    assert slots.section(folder, cuobjdump, FOLDERS[folder]) == written


def test_the_table_has_no_other_folder() -> None:
    assert set(slots.sections(slots.TABLE.read_text())) <= set(slots.native.folder_names())


# --- the reader ---


def code(text: str) -> list[str]:
    """Instructions of a program in which labels are lines that end in a colon."""
    lines = [line.strip() for line in text.strip().splitlines()]
    labels: dict[str, int] = {}
    instructions = []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            instructions.append(line)
    for label, index in labels.items():
        instructions = [x.replace(f" {label}", f" {16 * index:#x}") for x in instructions]
    return instructions


ATTENTION = """
MOV R1, R2
TOP:
SYNCS.PHASECHK.TRYWAIT P0, [R1], R2
@!P0 BRA WAIT
GO:
HMMA.16816.F32 R0, R4, R6, R0
@P1 BRA CLEAR
FSEL R0, R0, R9, P2
FSEL R1, R1, R9, P2
CLEAR:
MUFU.EX2 R0, R0
@P3 BRA NEXT
HMMA.16816.F32 R0, R4, R6, R0
COPY:
LDGSTS.E.BYPASS.128 [R1], [R2]
@P4 BRA COPY
NEXT:
@P5 BRA TOP
EXIT
WAIT:
SYNCS.PHASECHK.TRYWAIT P0, [R1], R2
@!P0 BRA WAIT
BRA GO
"""


def test_the_way_that_does_all_the_work_is_counted() -> None:
    (loop,) = main_loops(code(ATTENTION))
    assert loop.work.name == "attention"
    assert [x.name for x in loop.way] == [
        "SYNCS", "BRA", "HMMA", "BRA", "MUFU", "BRA", "HMMA", "BRA",
    ]  # fmt: skip
    assert loop.shortest == 7  # without the second product


def test_an_inner_loop_stands_for_the_outer_one_that_does_the_same() -> None:
    nested = """
    HMMA.16816.F32 R0, R4, R6, R0
    OUTER:
    UTMALDG.4D [UR0], [UR2]
    INNER:
    UTMALDG.4D [UR0], [UR2]
    @P0 BRA INNER
    @P1 BRA OUTER
    EXIT
    """
    (loop,) = main_loops(code(nested))
    assert loop.work.name == "loads"
    assert [x.name for x in loop.way] == ["UTMALDG", "BRA"]


def test_ffma_is_work_without_tensor_cores_only() -> None:
    lines = ["LOOP:", *["FFMA R0, R1, R2, R0"] * 8, "@P0 BRA LOOP", "EXIT"]
    (loop,) = main_loops(code("\n".join(lines)))
    assert (loop.work.name, len(loop.way)) == ("products", 9)
    assert not main_loops(code("\n".join([*lines[:-1], "HMMA.16816.F32 R0, R4, R6, R0", "EXIT"])))


@pytest.mark.parametrize(
    ("branch", "following"),
    [
        ("BRA 0x30", {3}),
        ("@P0 BRA 0x30", {1, 3}),
        ("BRA.U UP0, 0x30", {1, 3}),
        ("@!UP0 BRA.U 0x30", {1, 3}),
        ("EXIT", set()),
    ],
)
def test_where_a_branch_goes(branch: str, following: set[int]) -> None:
    flow = Flow([branch, "@P1 EXIT", "@P1 EXIT", "EXIT"])
    assert {flow.blocks[block][0].index for block in flow.next[0]} == following
