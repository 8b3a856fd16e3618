"""examples/train.py: a model trains alike through kernels of archflash and through PyTorch."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SIMULATED = "ignore:archflash. tensors are on the CPU"


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples/train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings(SIMULATED)
@pytest.mark.parametrize(
    ("kernel", "dtype", "steps", "tolerance"),
    [("simt", torch.float32, 20, 1e-3), ("ampere", torch.bfloat16, 8, 2e-2)],
)
def test_steps_on_the_simulator_follow_those_of_pytorch(
    training: ModuleType, kernel: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    cpu = torch.device("cpu")
    size = dataclasses.replace(training.TINY, dtype=dtype)
    ours, pytorchs, other = (
        training.train(attention, size, steps, cpu, seed)
        for attention, seed in (
            (training.by_archflash(size, 0.0, kernel), 0),
            (training.by_pytorch(size, 0.0), 0),
            (training.by_pytorch(size, 0.0), 1),
        )
    )
    torch.testing.assert_close(ours, pytorchs, atol=tolerance, rtol=1e-4)
    assert not torch.allclose(other, pytorchs, atol=2 * tolerance)
    assert float(ours[-3:].mean()) < float(ours[:3].mean())


@pytest.mark.filterwarnings(SIMULATED)
def test_dropout_and_the_curves_file(training: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    asked = ["--tiny", "--steps", "4", "--every", "2", "--device", "cpu", "--out", str(path)]
    assert training.main(asked) == 0
    assert training.main([*asked, "--dropout", "0"]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["2", "4", "2", "4"]
    assert rows[0]["last_steps_mean"] != rows[2]["last_steps_mean"]


def test_the_committed_curves_end_alike(training: ModuleType) -> None:
    path = ROOT / "bench/results/training-h200.csv"
    last: dict[str, float] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            assert tuple(row) == training.COLUMNS
            last[row["attention"]] = float(row["last_steps_mean"])
    ours, pytorchs, other = last["archflash ampere"], last["torch"], last["torch, other weights"]
    assert abs(ours - pytorchs) < abs(other - pytorchs)
