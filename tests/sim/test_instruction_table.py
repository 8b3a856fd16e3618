"""sim/README.md: its instruction table is what the simulator and the tests say; it names every kind
of finding.
"""

from __future__ import annotations

import re

import pytest

from archflash import LaunchError, sim
from archflash import _archflash_sim as native

from . import instruction_table
from .instruction_table import README, ROOT, row_of, rows
from .ptx import program


def test_the_readme_is_up_to_date() -> None:
    readme = README.read_text()
    now = instruction_table.filled(readme)
    assert readme == now, "run: python -m tests.sim.instruction_table --write"


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
    first_cells = re.findall(r"^\| `(.*?)` \|(?:[^|\n]*\|){6}$", README.read_text(), re.M)
    assert first_cells == [row.spelling for row in rows()]


def test_what_is_said_to_be_refused_is_refused() -> None:
    limits = README.read_text().partition("## Limits")[2].partition("## Instructions")[0]
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
    explained = set(re.findall(r"^\| `([a-z-]+)` \| (?:error|lint)", README.read_text(), re.M))
    assert explained == kinds


def test_every_file_of_the_picture_exists() -> None:
    picture = README.read_text().partition("## Parts")[2].partition("## Use")[0]
    rooms = set(re.findall(r"\b([a-z]+)/", picture))
    assert rooms == {path.name for path in (ROOT / "sim").iterdir() if path.is_dir()}
    names = set(re.findall(r"\b([a-z_0-9]+\.(?:h|cpp))\b", picture))
    assert len(names) > 10
    assert names <= {path.name for path in (ROOT / "sim").rglob("*.*")}


def test_the_examples_of_the_readme_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
