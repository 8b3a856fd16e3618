"""Builds that leave out machine code (ARCHFLASH_MACHINE_CODE): what they say of themselves, and
which targets `make` chooses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _registry
from archflash.__main__ import main
from archflash._api import find_device, make_problem
from archflash.cli import verify

LEFT_OUT = native.left_out_targets()
HOMES = {x: native.describe(x).home_device for x in _registry.kernel_names()}


@pytest.fixture(scope="module")
def chooser() -> ModuleType:
    file = Path(__file__).parents[2] / "_build" / "machine_code.py"
    spec = importlib.util.spec_from_file_location("machine_code", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", HOMES)
def test_a_plan_for_a_gpu_of_this_machine_needs_machine_code(name: str) -> None:
    """For any other GPU it is what the simulator runs, from PTX."""
    q = torch.empty(1, 2, 64, 64, dtype=torch.float16, device="meta")
    problem, device = make_problem(q, q, q).as_if_on_cuda(), find_device(HOMES[name])
    elsewhere = native.plan(name, problem, device)
    assert isinstance(elsewhere, native.LaunchPlan)
    here = native.plan(name, problem, device.as_if_present())
    if elsewhere.code in LEFT_OUT:
        assert isinstance(here, list)
        assert here[0].startswith(f"this build has no machine code for {elsewhere.code} (")
        assert "ARCHFLASH_MACHINE_CODE=all" in here[0]
    else:
        assert isinstance(here, native.LaunchPlan)
        assert here.to_dict() == elsewhere.to_dict()


def test_info_names_the_targets_that_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert ("no machine code in this build" in said) == bool(LEFT_OUT)
    for name in LEFT_OUT:
        assert name in said
    built = {x for row in archflash.implementations()[:-1] for x in row.compiled}
    assert set(LEFT_OUT) <= built


def test_verify_asks_for_what_the_gpu_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify._native, "left_out_targets", lambda: ["sm_80", "sm_90", "sm_90a"])
    assert verify.lacking_on((9, 0)) == ["sm_90", "sm_90a"]
    assert verify.lacking_on((8, 6)) == ["sm_80"]
    assert verify.lacking_on((12, 0)) == []


def test_make_builds_what_the_gpus_of_this_machine_load(chooser: ModuleType) -> None:
    """By the rules of src/runtime/targets.h."""
    known = chooser.known_targets()
    every = {x for row in archflash.implementations()[:-1] for x in row.compiled}
    assert {f"sm_{name}" for name in known} == {x for x in every if x.startswith("sm_")}
    devices = [row.device.capability for row in native.known_devices()]
    for gpus in [[], *([x] for x in devices), [(8, 0), (9, 0)]]:
        loaded = [x for x in known if any(native.target(f"sm_{x}").loads_on(gpu) for gpu in gpus)]
        assert chooser.chosen(gpus) == (loaded or list(chooser.SAMPLE))
    assert set(chooser.SAMPLE) < set(known)
