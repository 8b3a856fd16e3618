"""The command for the first day with a card: its jobs, its record, and all of it simulated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import on_the_spot
from bench.day_one import __main__ as command
from bench.day_one import jobs, machine, record
from bench.day_one.setup import PARTS, Job, Setup
from bench.results import COLUMNS, Row
from bench.switches import variants

BOTH = ("float16", "bfloat16")
FACTS = {"implementation": "blackwell_dc", "simulated": "0", "commit": "abc", "gpu": "NVIDIA B200",
         "driver": "580.1", "torch": "2.11.0", "dirty": "0"}  # fmt: skip


def names(part: str, simulate: bool = False, implementation: str = "blackwell_dc") -> list[str]:
    made = jobs.make_jobs(implementation, BOTH, simulate)
    return [job.name for job in made if job.part == part]


def test_jobs_check_before_they_time_and_cover_every_switch() -> None:
    made = jobs.make_jobs("blackwell_dc", BOTH, False)
    assert tuple(dict.fromkeys(job.part for job in made)) == PARTS
    assert len({(job.part, job.name) for job in made}) == len(made)
    # Each setting is checked before any is timed, those of pairs first of all.
    pairs = [x.name for x in variants.SETTINGS if x.switch == "pairs"]
    others = [x.name for x in variants.SETTINGS if x.switch != "pairs"]
    assert names("pairs")[: 1 + len(pairs)] == ["launch", *pairs]
    switches = names("switches")
    assert switches[: len(others) + 1] == [*others, variants.GRADIENTS]
    assert len(switches) > len(others)
    for part in ("switches", "walks", "waits"):
        assert not names(part, implementation="ampere")


# --- the record ---


def test_a_record_knows_what_is_done_and_what_must_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    rows = [
        record.make_row("switches", "a", "note", "is right"),
        record.make_row("switches", "a", "ok", seconds=1.0),
        record.make_row("switches", "b", "failed", "two\nlines", 2.0),
        record.make_row("peers", "b", "ok", seconds=3.0),
    ]
    record.append(path, rows[:2])
    record.append(path, rows[2:])
    loaded = record.load(path)
    assert loaded == rows
    assert loaded[2]["detail"] == "two lines"
    assert record.status_of_jobs(loaded) == {
        ("switches", "a"): "ok", ("switches", "b"): "failed", ("peers", "b"): "ok",
    }  # fmt: skip
    again = [*loaded, record.make_row("switches", "b", "ok", seconds=1.0)]
    assert record.status_of_jobs(again)["switches", "b"] == "ok"
    for name in ("commit", "dirty", "gpu", "simulated"):  # only the same run continues it
        assert record.difference(FACTS, dict(FACTS)) is None
        assert name in (record.difference(FACTS, FACTS | {name: "other"}) or "")
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ValueError, match="no record"):
        record.load(path)


# --- processes ---


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)"
    )
    status, said = command.run_process([sys.executable, "-c", parent], 1.5)
    assert status is None
    assert said == "begun\n"
    import time

    time.sleep(2.5)
    assert not mark.exists()


ROW = json.dumps({"row": {"x": "1"}}) + "\n"
END = json.dumps({"status": "failed", "detail": "it is wrong"}) + "\n"


@pytest.mark.parametrize(
    ("wrote", "exit_status", "rows", "status", "detail"),
    [
        (ROW + END, 1, 1, "failed", "it is wrong"),
        (ROW + ROW, -11, 2, "crashed", "exit status -11: said"),
        (ROW + ROW[:-4], -11, 1, "crashed", "exit status -11: said"),
        (ROW + END[:-4], None, 1, "timeout", "no end after 7 s: said"),
        (None, None, 0, "timeout", "no end after 7 s: said"),
    ],
)
def test_a_process_that_dies_leaves_what_it_knew(
    wrote: str | None, exit_status: int | None, rows: int, status: str, detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run_process(arguments: list[str], limit_s: float) -> tuple[int | None, str]:
        assert limit_s == 7.0
        if wrote is not None:
            Path(arguments[arguments.index("--answer") + 1]).write_text(wrote)
        return exit_status, "said"

    def nothing(setup: Setup) -> Iterator[Row]:
        yield from ()

    monkeypatch.setattr(command, "run_process", run_process)
    *known, last = command.run_job(Job("peers", "a", 7.0, nothing), Setup("blackwell_dc", True))
    assert known == [{"x": "1"}] * rows
    assert (last["status"], last["detail"], last["item"]) == (status, detail, "a")


# --- the command ---


@pytest.mark.slow
def test_without_the_card_it_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11):
        pytest.skip("this is such a card")
    path = tmp_path / "day.csv"
    assert command.main(["--output", str(path)]) == 2
    said = capsys.readouterr().err
    assert "needs a GPU of compute capability 10.0 to 10.9, 11.0 to 11.9" in said
    assert "--simulate" in said
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.skipif(on_the_spot.find_nvcc() is None, reason="nvcc is not found")
@pytest.mark.rest
def test_the_simulated_day_ends_well_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.csv"
    only = "first calls bf16 d64|pairs: launch|split_p|peers: fp16"
    arguments = ["--simulate", "--output", str(path), "--only", only]
    assert command.main(arguments) == 0, capsys.readouterr().out
    rows = record.load(path)
    assert set(record.status_of_jobs(rows).values()) == {"ok"}
    assert {row["part"] for row in rows} == {
        "environment", "correctness", "pairs", "switches", "peers",
    }  # fmt: skip
    simulated = [row for row in rows if row["status"] == "simulated"]
    assert "blackwell_dc" in {row["implementation"] for row in simulated}
    assert all(row["max_err"] and not row["p50_us"] for row in simulated)
    assert any("warp-instructions" in row["detail"] for row in rows)
    capsys.readouterr()
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.count("done before") == 4


def test_two_hangs_in_correctness_end_the_day_and_other_failures_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "environment": ("ok", json.dumps(FACTS | {"dtypes": "bfloat16"})),
        "correctness": ("timeout", "no end"),
        "lazy_rescale=off": ("timeout", "no end"),
        "split_p=off": ("ok", ""),
        "persistent=off": ("ok", ""),
        "launch": ("failed", "wrong"),
    }
    asked, setups = [], []

    def ask(arguments: list[str], limit_s: float) -> tuple[list[Row], str, str]:
        asked.append(arguments[1])
        if "--setup" in arguments:
            setups.append(json.loads(arguments[arguments.index("--setup") + 1]))
        return [], *next(answers[name] for name in answers if name in arguments)

    monkeypatch.setattr(command, "ask", ask)
    monkeypatch.setattr(machine, "why_no_nvcc", lambda chosen: "")
    path = tmp_path / "day.csv"
    only = ["--output", str(path), "--only"]
    assert command.main([*only, "first calls|split_p"]) == 1
    assert asked.count("correctness") == 2
    assert "switches" not in asked
    (*_, last) = record.load(path)
    assert (last["status"], "--continue goes on" in last["detail"]) == ("note", True)
    assert command.main([*only, "first calls|split_p", "--continue"]) == 1
    assert "switches" in asked
    assert json.loads(record.load(path)[0]["detail"])["gpu"] == FACTS["gpu"]  # the same record

    path.unlink()
    arguments = [*only, "lazy_rescale|split_p"]
    assert command.main(arguments) == 1
    assert record.status_of_jobs(record.load(path)) == {
        ("switches", "lazy_rescale=off"): "timeout", ("switches", "split_p=off"): "ok",
    }  # fmt: skip
    assert setups[-1]["without"] == ["lazy_rescale=off"]  # what failed is not timed
    assert setups[-1]["pairs"]
    # The second start tries what failed again. Now it ends well.
    answers["lazy_rescale=off"] = ("ok", "")
    tried = len(setups)
    assert command.main(arguments) == 0
    assert len(setups) == tried + 1
    # Where pairs of CTAs failed, the jobs that follow are told.
    assert command.main([*only, "pairs: launch|persistent"]) == 1
    assert not setups[-1]["pairs"]
    # A file of another card is not continued.
    answers["environment"] = ("ok", json.dumps(FACTS | {"dtypes": "", "gpu": "NVIDIA B300"}))
    assert command.main([*only, "split_p"]) == 2
