"""The page of the ladders, and what is shown of measured rungs."""

from __future__ import annotations

import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.ladder import page, rungs
from bench.ladder.__main__ import main
from bench.ladder.definitions import BY_NAME, FOLDER, LADDERS
from bench.on_the_spot import find_nvcc
from bench.results import append_rows, make_row

from archflash.__main__ import main as archflash_main

ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "run_id": "1", "date": "2026-01-01", "commit": "0", "dirty": "0", "gpu": "NVIDIA T1000",
    "driver": "1", "cuda": "13.0", "torch": "2.11",
}  # fmt: skip


def test_the_page_and_its_plots_are_what_results_and_counters_say() -> None:
    text = (ROOT / "docs" / "ladders.md").read_text()
    assert text == page.render_page(), "python -m bench.ladder --write"
    for ladder in LADDERS:
        assert f"## The ladder {ladder.name}:" in text
        plot = (ROOT / "docs" / f"ladder-{ladder.name}.svg").read_text()
        hint = f"python -m bench.ladder {ladder.name} --write"
        assert plot == page.plot(ladder, page.load_counters(ladder)), hint


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)
def test_every_source_is_a_rung_and_every_rung_has_a_source(ladder) -> None:
    sources = {path.stem for path in (FOLDER / ladder.name).glob("*.cu")}
    assert sources == {rung.name for rung in ladder.rungs}
    assert all(rung.bought and rung.idea for rung in ladder.rungs)


def rows(run: str, speed: float):
    ladder = BY_NAME["ampere"]
    case = ladder.cases()[0]
    for number, rung in enumerate(ladder.rungs):
        yield make_row(
            FACTS | {"run_id": run}, case, implementation=page.row_name(ladder, rung), version="",
            features="", clocks_mhz="1", samples_us=[case.flops() / 1e6 / (speed + number)],
            max_err=0.0, host_us=1.0,
        )  # fmt: skip


def test_measured_rungs_appear_on_the_page_and_in_the_plot(tmp_path: Path) -> None:
    ladder = BY_NAME["ampere"]
    append_rows(tmp_path / "ladder-t1000.csv", [*rows("1", 500.0), *rows("2", 600.0)])
    text = page.render(ladder, tmp_path)
    (line,) = [x for x in text.splitlines() if x.startswith("| 03_cp_async") and "602.0" in x]
    assert "175.1" in line  # beside the published speed
    assert "502.0" not in text  # only the last run
    assert "NVIDIA T1000" in text
    assert "fp16 16x16 8192 d128" in text
    picture = page.plot(ladder, {}, tmp_path)
    xml.etree.ElementTree.fromstring(picture)
    assert ">602.0<" in picture
    assert ">175.1<" in picture


def test_rungs_refuse_what_they_do_not_serve() -> None:
    ladder = BY_NAME["ampere"]
    q = torch.empty(1, 2, 256, 128, dtype=torch.float16)
    assert rungs.why_not(ladder, q, q, q, False) is None
    for other in (q.bfloat16(), q[..., :64], q[:, :, :200], q.transpose(1, 2)):
        assert rungs.why_not(ladder, other, other, other, False)
    assert rungs.why_not(ladder, q, q, q, True) == "the rungs have no mask"


def test_without_nvcc_the_command_says_what_it_needs(monkeypatch, capsys) -> None:
    monkeypatch.setattr("bench.ladder.__main__.find_nvcc", lambda: None)
    assert main(["ampere"]) == 2
    assert "nvcc is not found: it compiles the rungs" in capsys.readouterr().err


def test_a_gpu_that_is_too_old_or_too_new_is_refused_with_the_reason() -> None:
    ladder = BY_NAME["blackwell_consumer"]
    assert ladder.why_no_gpu((12, 0)) is None
    assert "9.0 or newer; this GPU has 8.6" in (ladder.why_no_gpu((8, 6)) or "")
    hopper = BY_NAME["hopper"]
    assert hopper.why_no_gpu((9, 0)) is None
    assert "need compute capability 9.0; this GPU has 12.0" in (hopper.why_no_gpu((12, 0)) or "")
    assert hopper.architecture(9, 0) == "sm_90a"
    assert ladder.architecture(12, 0) == "sm_120"


# --- archflash ladder ---


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found: it compiles the rungs")
def test_the_command_prints_a_ladder_and_draws_it(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(ROOT)
    picture = ["--simulate", "--plot", str(tmp_path / "simt.svg")]
    assert archflash_main(["ladder", "simt", *picture]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for rung in BY_NAME["simt"].rungs:
        (line,) = [line for line in out.splitlines() if line.startswith(rung.name)]
        assert rung.idea in line
        assert " yes " in line
    assert "4_vectorised" in (tmp_path / "simt.svg").read_text()
