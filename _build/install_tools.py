"""Installs into a folder what the build backend asks for, as pip does in an isolated build:
``python _build/install_tools.py FOLDER``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def required(project: str) -> list[str]:
    """The requirements in [build-system] of a pyproject.toml. Python 3.10 has no tomllib."""
    match = re.search(r"^requires = (\[.*\])$", project, flags=re.MULTILINE)
    if match is None:
        raise ValueError("pyproject.toml has no line `requires = [...]`")
    packages: list[str] = json.loads(match[1])
    return packages


def install(packages: list[str], folder: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *packages]
    subprocess.run(command, check=True)


def main() -> None:
    packages, folder = required(PROJECT.read_text()), sys.argv[1]
    install(packages, folder)
    sys.path.insert(0, folder)
    import archflash_backend  # imports scikit-build-core

    more = archflash_backend.get_requires_for_build_wheel()
    if more:  # a folder takes one installation
        shutil.rmtree(folder)
        install([*packages, *more], folder)


if __name__ == "__main__":
    main()
