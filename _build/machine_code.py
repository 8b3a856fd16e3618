"""Prints the targets whose machine code `make` builds, for ARCHFLASH_MACHINE_CODE: those that this
machine's GPUs load, or without a GPU one that the tests read. `make test-rest` builds all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# The target that takes the least time to build, because few folders have code of their own for it.
SAMPLE = ("89",)


def known_targets() -> list[str]:
    """All that CMakeLists.txt builds kernels for."""
    text = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
    lines = re.findall(r"^archflash_add_\w+\((.*)\)", text, re.MULTILINE)
    groups = [word.partition(":")[2].split(",") for line in lines for word in line.split()]
    return sorted({target for group in groups for target in group} - {"", "ptx"})


def loads_on(target: str, major: int, minor: int) -> bool:
    """Whether a GPU of a compute capability loads the machine code (src/runtime/targets.h)."""
    number, suffix = int(target.rstrip("af")), target.lstrip("0123456789")
    if suffix == "a":
        return number == 10 * major + minor
    return number // 10 == major and number % 10 <= minor


def capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of this machine's GPUs, as the driver's tool names them."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"^(\d+)\.(\d)$", done.stdout, re.MULTILINE)
    return sorted({(int(major), int(minor)) for major, minor in found})


def chosen(gpus: list[tuple[int, int]]) -> list[str]:
    """The targets for GPUs of these compute capabilities."""
    loaded = [x for x in known_targets() if any(loads_on(x, *gpu) for gpu in gpus)]
    return loaded or list(SAMPLE)


if __name__ == "__main__":
    sys.stdout.write(",".join(chosen(capabilities())) + "\n")
