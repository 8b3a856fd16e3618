"""The extension file alone, in every other Python here: it loads and plans, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from archflash import _archflash as native
from archflash._api import find_device, make_problem

from .test_wheel import make_venv, pip_into

OLDEST = (3, 10)


def version_of(python: Path) -> tuple[int, ...] | None:
    """(3, 12), or None where that is no working CPython with venv."""
    code = (
        "import sys, venv\n"
        "gil = getattr(sys, '_is_gil_enabled', lambda: True)()\n"
        "print(*sys.version_info[:2]) if sys.implementation.name == 'cpython' and gil else None"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 and done.stdout else None


def other_pythons() -> dict[str, Path]:
    """One Python of each minor version from the oldest supported on, this one's excepted."""
    names = [f"python3.{minor}" for minor in range(10, 20)]
    on_path = [Path(place) for name in names if (place := shutil.which(name))]
    managed = Path.home().glob(".pyenv/versions/*/bin/python3")
    found: dict[str, Path] = {}
    for python in [*on_path, *sorted(managed)]:
        version = version_of(python)
        if version and version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(".".join(map(str, version)), python)
    return found


PYTHONS = other_pythons()

LOAD_AND_PLAN = """
import importlib.machinery, importlib.util, json, sys
file, problem, devices = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
assert importlib.util.find_spec("torch") is None
loader = importlib.machinery.ExtensionFileLoader("_archflash", file)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_archflash", loader))
loader.exec_module(module)
problem = module.Problem.from_dict(problem)
plans = {}
for name in devices:
    answer = module.plan("simt", problem, module.find_known_device(name).device)
    plans[name] = answer if isinstance(answer, list) else answer.to_dict()
print(json.dumps({"version": list(sys.version_info[:2]), "plans": plans}))
"""


@pytest.mark.parametrize(
    "version",
    list(PYTHONS) or [pytest.param("", marks=pytest.mark.skip(reason="no second Python here"))],
)
def test_another_python_loads_the_extension_and_plans(version: str, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", str(PYTHONS[version]))
    pip_into(python, "nanobind-backend>=1.0,<2")
    q = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16, device="meta")
    problem = make_problem(q, q, q, causal=True, return_lse=True).as_if_on_cuda()
    devices = ["T4", "A100", "H200", "B200", "RTX 5090", "Jetson Thor"]
    arguments = [str(native.__file__), json.dumps(problem.to_dict()), json.dumps(devices)]
    done = subprocess.run(
        [python, "-I", "-c", LOAD_AND_PLAN, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert ".".join(map(str, said["version"])) == version
    for name in devices:
        expected = native.plan("simt", problem, find_device(name))
        assert isinstance(expected, native.LaunchPlan)
        assert said["plans"][name] == expected.to_dict()
