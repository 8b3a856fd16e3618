"""`python -m tests.others` on a folder like FlashAttention's, with tests of every kind of
outcome.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THEIRS = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func

def attend(**call):
    q = torch.randn(1, 5, 2, 8)
    return flash_attn_func(q, q, q, **call)

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", range(20))
def test_right(number, causal):
    assert attend(causal=causal).shape == (1, 5, 2, 8)

def test_wrong():
    assert attend() is None

def test_refused():
    q, cache, table = torch.zeros(1, 1, 2, 8), torch.zeros(1, 16, 2, 8), torch.zeros(1, 1).int()
    flash_attn_varlen_func(
        q[0], cache, cache, torch.tensor([0, 1]).int(), torch.tensor([0, 9]).int(), 1, 9,
        dropout_p=0.5, block_table=table,
    )

@pytest.mark.skip
def test_skipped():
    pass

def test_race_condition():
    raise AssertionError("it is left out by its name")
"""


@pytest.mark.rest  # it starts PyTorch in four processes
def test_all_outcomes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "tests").mkdir(parents=True)
    (tmp_path / "theirs" / "tests" / "test_flash_attn.py").write_text(THEIRS)
    (tmp_path / "theirs" / "COMMIT").write_text("abc123")
    done = subprocess.run(
        [sys.executable, "-m", "tests.others", "--flash-attention", str(tmp_path / "theirs"),
         "--suite", "fa2", "--sample", "7", "--shares", "2", "--csv", str(tmp_path / "counts.csv")],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    with (tmp_path / "counts.csv").open() as file:
        (row,) = csv.DictReader(file)
    names = ("theirs", "passed", "failed", "alone", "refused", "skipped", "left")
    assert [row[name] for name in names] == ["abc123", "7", "1", "0", "1", "1", "0"]
    assert "test_wrong: AssertionError" in done.stdout
    assert "| FlashAttention-2" in done.stdout
