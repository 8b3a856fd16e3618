"""The page of versions that passed."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
from tests import compatibility


def test_the_page_is_what_was_noted() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(compatibility.rows())


@pytest.fixture
def _nothing_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "PASSED", tmp_path / "passed.csv")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    compatibility.PASSED.write_text(",".join(compatibility.COLUMNS) + "\n")


@pytest.mark.usefixtures("_nothing_noted")
def test_a_version_that_passes_again_has_one_row() -> None:
    for version, passed in (("1.10.0", 5), ("1.9.0", 4), ("1.10.0", 7)):
        compatibility.note("torch", version, "all", torch=version, passed=passed, skipped=1)
    lines = compatibility.PAGE.read_text().splitlines()[-2:]
    assert [line.split(" | ")[0] for line in lines] == ["| torch 1.9.0", "| torch 1.10.0"]
    assert " | 7 | 1 | " in lines[1]


@pytest.mark.usefixtures("_nothing_noted")
def test_what_another_process_notes_meanwhile_is_kept() -> None:
    def note(package: str) -> None:
        compatibility.note(package, "1.0", "all", torch="2.11", passed=1)

    with compatibility.PASSED.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        one = threading.Thread(target=note, args=("sglang",))
        one.start()
        one.join(0.1)
        assert one.is_alive()  # it waits, and reads what is written here
        file.write("vllm,1.0,all,2.11,3.12,1,0,2026-11-30\n")
    one.join()
    assert [row["package"] for row in compatibility.rows()] == ["sglang", "vllm"]


def test_the_counts_are_those_of_the_last_line() -> None:
    said = "1 skipped here\n= 12 passed, 3 skipped, 1 warning in 0.50s ="
    assert compatibility.counts(said) == (12, 3)
    assert compatibility.counts("no tests ran in 0.01s") == (0, 0)
