"""Makes PTX of pipeline.cu: ``python -m tests.sim.protocols.samples.compile``.

The PTX is committed, so that the tests need no nvcc. Where nvcc is installed, a test compares the
PTX with the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[3] / "src"
ARCHITECTURES = ("90a", "120f")


def find_nvcc() -> str | None:
    """A CUDA compiler of this system, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def text_file(architecture: str) -> Path:
    """Where the PTX for "90a" or "120f" is kept."""
    return FOLDER / f"pipeline.compute_{architecture}.ptx"


def compiled(nvcc: str, architecture: str) -> str:
    """The PTX that a compiler makes for an architecture.

    Raises:
        RuntimeError: it does not compile; the message is nvcc's.
    """
    # If a sanitizer is preloaded into Python, nvcc must not load it too.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [
            nvcc, "-std=c++20", "-O3", "-Werror", "all-warnings", "-I", str(SOURCES), "-ptx",
            f"-arch=compute_{architecture}", "-o", "-", str(FOLDER / "pipeline.cu"),
        ],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def main() -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is not found: it compiles pipeline.cu")
    for architecture in ARCHITECTURES:
        text_file(architecture).write_text(compiled(nvcc, architecture))


if __name__ == "__main__":
    main()
