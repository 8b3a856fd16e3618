"""The soak of tests/soak runs, and says what it has found; a GPU runs it for longer."""

from __future__ import annotations

import random

import pytest
import torch
from tests.soak import __main__ as soak
from tests.soak.kinds import Known, Worker


def test_a_second_of_it_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "--seconds", "1", "--threads", "3"])
    threads = torch.get_num_threads()
    try:
        assert soak.main() == 0, capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)
    assert "3 threads, 1 s" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
def test_other_bits_are_told() -> None:
    known = Known("cpu")
    name = random.Random(0).choice(list(known.calls))
    known.right[name][0].flatten()[0] += 1
    assert known.differences() == [f"at the end {name} has other bits"]
    worker = Worker(known, 0)
    known.calls = {name: known.calls[name]}
    assert worker.run("known") == f"other bits of {name}"
