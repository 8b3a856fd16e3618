"""The soak of tests/soak runs, and says what it has found; a GPU runs it for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.soak import __main__ as soak
from tests.soak.kinds import Known, Worker


@pytest.mark.slow
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


@pytest.mark.slow
def test_growth_says_where_it_comes_from() -> None:
    before = soak.Memory.now()
    kept = [bytearray(1 << 16) for _ in range(500)], [[] for _ in range(5000)]  # 33 MB
    grown = soak.Memory.now().since(before)
    assert 30 < grown.malloc < 60
    assert 4500 < grown.objects < 5500  # others may have come and gone
    assert "in use" in str(grown)
    del kept


def test_pieces_of_an_hour_add_up(tmp_path: Path) -> None:
    assert soak.DONE.findall(soak.DOCUMENT.read_text()) == [soak.done(soak.H200)]
    file, document, run = (tmp_path / name for name in ("all.csv", "page.md", "run.csv"))
    line = "2026-11-29,abc,NVIDIA H200,2.11,32,{},all,{},0,off,3\n"
    header = ",".join(soak.COLUMNS) + "\n"
    file.write_text(header + line.format(85, 2000))
    of_kind = "2026-11-29,abc,NVIDIA H200,2.11,32,,cache,7,,,\n"
    run.write_text(header + line.format(1000, 53094) + of_kind)
    document.write_text("H200: 85 s, 2,000 calls: the same bits")
    soak.add(run, file, document)
    assert document.read_text() == "H200: 1,085 s, 55,094 calls: the same bits"
    run.write_text("date,kind\n")
    with pytest.raises(SystemExit, match="other columns"):
        soak.add(run, file, document)
