"""Runs failing_worker.py with failing_allocations.c in front of its libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(device: str, folder: Path, step: int = 1) -> int:
    """How many allocations were refused, one of each `step`. PyTorch keeps no freed memory of the
    GPU there, so that each of its tensors is an allocation.
    """
    library = folder / "failing_allocations.so"
    source = HERE / "failing_allocations.c"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.failing_worker", device, str(step)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=HERE.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    found = re.search(r"(\d+) allocations refused", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])
