"""The simulator's documents: the table of instructions agrees with the simulator and the tests,
every kind of finding is explained, and the examples run.
"""

from __future__ import annotations

import csv
import re

import pytest

from archflash import LaunchError, sim
from archflash import _archflash_sim as native

from . import instruction_table
from .instruction_table import DETAILS, INSTRUCTIONS, ROOT, SET, row_of, rows
from .ptx import program

README = ROOT / "sim" / "README.md"


@pytest.mark.rest  # as `make lint` says it after a build
def test_the_generated_documents_are_up_to_date() -> None:
    assert instruction_table.main([]) == 0, "run: python -m tests.sim.instruction_table --write"


def test_a_spelling_finds_its_form() -> None:
    table = rows()
    assert row_of(table, "add.sat.s32").spelling == "add[.sat].$int"
    assert row_of(table, "mad24.hi.sat.s32").spelling == "mad24(.lo/.hi)[.sat](.u32/.s32)"
    assert row_of(table, "exit").spelling == "exit"
    for wrong in ("", "add", "add.s32.sat", "no_such.u32", "add..s32"):
        assert native.find_form(wrong) == -1
        with pytest.raises(ValueError, match=r"has no form for"):
            row_of(table, wrong)


def test_every_form_is_in_the_table_once() -> None:
    forms = [(row.opcode, row.modifiers) for row in rows()]
    assert len(set(forms)) == len(forms) > 100
    with INSTRUCTIONS.open(newline="") as file:
        written = [line["form"] for line in csv.DictReader(file) if line["evidence"] != SET]
    assert list(dict.fromkeys(written)) == [row.spelling for row in rows()]


def test_what_is_said_to_be_refused_is_refused() -> None:
    limits = DETAILS.read_text().partition("## Limits in detail")[2]
    refused = re.findall(r"^\| `(.*?)` \|", limits, re.M)
    assert len(refused) > 10
    assert [spelling for spelling in refused if native.find_form(spelling) >= 0] == []
    operands = "[%rd0], [%rd1, {%r1, %r2}], %r1, [%rd2]"
    for spelling in refused:
        with pytest.raises(LaunchError, match=r"PTX line \d+:"):
            sim.load(program(f"{spelling} {operands};"))


def test_every_kind_of_finding_is_explained() -> None:
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "sim").rglob("*.cpp")))
    kinds = set(re.findall(r'Fault\{\s*"([a-z-]+)"', sources))
    kinds |= set(re.findall(r'\bkind = "([a-z-]+)"', sources))
    for chosen in re.findall(r"\bconst kind = ([^;]*);", sources):
        kinds |= set(re.findall(r'"([a-z-]+)"', chosen))
    kinds |= {
        kind
        for call in re.findall(r"report\(([^;]*Severity::[^;]*);", sources)
        for kind in re.findall(r'"([a-z-]+)",', call)[:1]
    }
    assert {"race", "deadlock", "shuffle", "misaligned", "pending-copy", "uninitialised"} <= kinds
    explained = set(re.findall(r"^\| `([a-z-]+)` \| (?:error|lint)", DETAILS.read_text(), re.M))
    assert explained == kinds


def test_the_picture_shows_every_room() -> None:
    picture = README.read_text().partition("## The way through the rooms")[2]
    picture = picture.partition("What is new belongs here")[0]
    shown = set(re.findall(r"^ *(?:\|-- |`-- )?([a-z]+)/ ", picture, re.M))
    assert shown == {path.name for path in (ROOT / "sim").iterdir() if path.is_dir()}
    files = set(re.findall(r"\b([a-z_0-9]+\.(?:h|cpp))\b", picture))
    assert len(files) > 10
    assert files <= {path.name for path in (ROOT / "sim").rglob("*.*")}
