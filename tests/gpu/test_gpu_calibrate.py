"""`archflash calibrate` on a real GPU, for seconds enough where other tests use it, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import archflash
from archflash import _calibrated, _dispatch, _user_tables
from archflash.__main__ import main
from archflash._call_times import BOTH, FORWARD

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_dispatch: None) -> Iterator[None]:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path))
    _calibrated.read_again()
    yield
    _calibrated.read_again()


def test_a_few_seconds_give_a_table_of_right_kernels_that_calls_go_by(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["calibrate", "--seconds", "20"]) == 0
    said = capfd.readouterr()
    table = _calibrated.table_of(_dispatch.query_device(0))
    assert table is not None, said
    assert table.wrong == {}
    assert {passes for passes, _ in table.host_us} == {FORWARD, BOTH}
    assert sum(len(family.calls) for family in table.families.values()) >= 8
    assert all(len(family.fits) >= 2 for family in table.families.values())
    q, k, v = (torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    decision = archflash.explain(q, k, v)
    assert "`archflash calibrate` on this " in decision.why
    out = archflash.attention(q, k, v)
    expected = archflash.reference.attention(q, k, v, return_lse=False)
    base = archflash.reference.baseline(q, k, v)
    assert archflash.reference.check(out, expected, base).ok


def test_bench_times_every_candidate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.csv"
    arguments = ["--shape", "1,8,512,64", "--causal", "--gradients", "--csv", str(file)]
    assert main(["bench", *arguments]) == 0
    out = capfd.readouterr().out
    assert "WRONG" not in out
    assert " *" in out
    assert len(file.read_text().splitlines()) >= 3
