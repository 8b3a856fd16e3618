"""What the build tests share: the wheel, NVIDIA's tools where they are at hand, and what to do
where a build has left out machine code.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

from archflash import _archflash as native

ROOT = Path(__file__).parents[2]
# Names the folder that a wheel of these sources was built into. The Makefile sets it, so that
# nothing is built twice; otherwise a wheel is built here.
WHEEL_VARIABLE = "ARCHFLASH_TEST_WHEEL"
# `make test-rest` sets it: then a test that cannot run, because machine code or a tool is missing,
# fails.
ALL_IMAGES = os.environ.get("ARCHFLASH_TEST_ALL_IMAGES") == "1"
LEFT_OUT = frozenset(native.left_out_targets())
NO_CODE = "this build has left out the machine code that it reads: make test-rest has all"


def missing(what: str) -> NoReturn:
    """Skips a test, or fails it in `make test-rest`."""
    if ALL_IMAGES:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def built_of(targets: Iterable[str]) -> list[str]:
    """Those of an image's targets that this build has machine code for. Where there is none, the
    test that asks is skipped.
    """
    asked = sorted(set(targets))
    if asked and LEFT_OUT.issuperset(asked):
        missing(NO_CODE)
    return [name for name in asked if name not in LEFT_OUT]


@pytest.fixture(scope="session")
def every_target() -> None:
    """Skips tests of the wheel as others get it, with machine code for every target."""
    if LEFT_OUT:
        missing(NO_CODE)


def pip_wheel(target: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel . --no-deps`; without isolation where the build requirements are installed, or
    where the Makefile has laid them beside this Python.
    """
    tools = Path(sys.prefix) / "build-tools"
    installed = all(
        importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind", "ninja")
    )
    if not installed and (tools / ".done").exists():
        variables["PYTHONPATH"] = str(tools)
        installed = True
    isolation = ["--no-build-isolation"] if installed else []
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", str(target)]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return subprocess.run(
        [*command, *isolation, *options],
        cwd=ROOT,
        env=os.environ | {"PATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Everything that building leaves in an empty folder."""
    if given := os.environ.get(WHEEL_VARIABLE):
        return sorted((ROOT / given).iterdir())
    target = tmp_path_factory.mktemp("wheel")
    done = pip_wheel(target)
    if done.returncode != 0:
        pytest.fail(f"pip wheel failed:\n{(done.stdout + done.stderr)[-3000:]}", pytrace=False)
    return sorted(target.iterdir())


@pytest.fixture(scope="session")
def wheel(wheels: list[Path]) -> Path:
    return wheels[-1]


def find_tool(name: str) -> Path | None:
    """A CUDA tool: of the PyPI packages beside this Python, else of the system."""
    for folder in map(Path, sys.path):
        packaged = folder / "nvidia" / "cu13" / "bin" / name
        if packaged.is_file():
            return packaged
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    return Path(found) if found else None


@pytest.fixture(scope="session")
def cuobjdump() -> Path:
    tool = find_tool("cuobjdump")
    if tool is None:
        missing("no cuobjdump here: pip install nvidia-cuda-cuobjdump")
    return tool


@pytest.fixture(scope="session")
def nvdisasm() -> Path:
    tool = find_tool("nvdisasm")  # cuobjdump calls it
    if tool is None:
        missing("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    return tool


@pytest.fixture(scope="session")
def ptxas() -> Path:
    tool = find_tool("ptxas")
    if tool is None:
        missing("no ptxas here: it comes with the CUDA toolkit")
    return tool
