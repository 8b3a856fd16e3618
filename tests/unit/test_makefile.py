"""What make runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("xdist", "workers"), [(True, ["-n", "6"]), (False, [])])
def test_the_gpu_tests_run_in_six_workers_where_xdist_is_installed(
    tmp_path: Path, xdist: bool, workers: list[str]
) -> None:
    if xdist:
        (tmp_path / "xdist.py").touch()
    python = tmp_path / "python"  # says what it is asked to run; -S: without what is installed
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n'
        'echo "$@"\n'
    )
    python.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--silent", "test-gpu", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.stdout.split() == ["-m", "pytest", "tests/gpu", *workers], done.stderr
