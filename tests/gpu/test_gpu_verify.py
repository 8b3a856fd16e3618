"""`archflash verify` on a GPU: it finds what is planted, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from bench import on_the_spot

from archflash import __main__ as program
from archflash import _dispatch, _user_tables
from archflash.verify import _machine, _probes, _run
from archflash.verify._setup import Setup, kernels_on

from . import planted_faults

pytestmark = pytest.mark.gpu
NVCC = on_the_spot.find_nvcc()


def make_setup() -> Setup:
    device = _dispatch.query_device(0)
    free, _ = torch.cuda.mem_get_info()
    kernels = kernels_on(device.capability)
    return Setup(device.name, "cuda:0", device.capability, free, False, kernels)


@pytest.mark.parametrize("probe", _probes.PROBES, ids=[probe.name for probe in _probes.PROBES])
def test_a_probe_gives_the_bits_of_the_simulator(probe: _probes.Probe) -> None:
    setup = make_setup()
    if not _probes.runs_on(probe, setup.capability):
        pytest.skip(f"no code of {probe.image} for this GPU")
    _probes.check(probe, setup)


@pytest.mark.slow
def test_a_short_run_is_right_and_keeps_its_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path))
    _user_tables.entries.cache_clear()
    # Other tests may use the same GPU: less memory is asked for, and nothing need be fast.
    ask = _machine.ask
    monkeypatch.setattr(_machine, "ask", lambda index: ask(index) | {"free_bytes": str(4 << 30)})
    monkeypatch.setattr(_run, "compiles_first", lambda setup: True)
    monkeypatch.setattr(_run, "START_LIMIT", 900)
    send = tmp_path / "sent.tar.gz"
    only = "probes|functions|simt"
    assert program.main(["verify", "--only", only, "--send", str(send)]) == 0
    said = capsys.readouterr().out
    assert "proved   simt: " in said
    assert "proved   simt backward: " in said
    (entry,) = json.loads((tmp_path / "proofs.json").read_text())["entries"]
    assert entry["proved"] == [["simt", "backward"], ["simt", "forward"]]
    assert send.stat().st_size > 0
    _user_tables.entries.cache_clear()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
def test_every_planted_fault_is_found_by_name(tmp_path: Path) -> None:
    assert NVCC is not None
    setup = make_setup()
    if setup.capability != (9, 0):
        pytest.skip("the faults are planted in kernels for 9.0")
    planted_faults.compile_all(NVCC, tmp_path, os.cpu_count() or 1)
    for fault, rows in planted_faults.find_all(tmp_path, setup):
        said = [(row.item, row.status, row.detail, row.where) for row in rows if row.status != "ok"]
        assert planted_faults.first_bad(fault, rows), (fault.name, said)
