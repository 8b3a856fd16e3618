"""bench.training: the same model trains alike through a kernel of archflash and through PyTorch."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from bench import training


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
def test_twenty_steps_on_the_simulator_follow_those_of_pytorch(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    ours, pytorchs, other = (
        training.train(attention, training.TINY, 20, cpu, seed)
        for attention, seed in (
            (training.by_archflash("simt"), 0),
            (training.by_pytorch, 0),
            (training.by_pytorch, 1),
        )
    )
    torch.testing.assert_close(ours, pytorchs, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(other, pytorchs, atol=1e-2)
    assert float(ours[-5:].mean()) < float(ours[:5].mean())


def test_the_committed_curves_end_alike() -> None:
    path = Path(__file__).parents[2] / "bench/results/training-h200.csv"
    last: dict[str, float] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            assert tuple(row) == training.COLUMNS
            last[row["attention"]] = float(row["last_steps_mean"])
    ours, pytorchs, other = last["archflash ampere"], last["torch"], last["torch, other weights"]
    assert abs(ours - pytorchs) < abs(other - pytorchs)
