"""Installs a server's package as PACKAGE.txt says, into a folder of its own and without CUDA:
python -m tests.servers.install PACKAGE FOLDER [--newest]

A recipe's requirements are in three sections: [without requirements] of their own, [with
requirements], and [libraries of] packages of which only the compiled libraries are taken, in the
place of those of the first package. With --newest the versions of the first section and of the last
are those that are released today.
"""

from __future__ import annotations

import argparse
import configparser
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def requirements(package: str, newest: bool) -> dict[str, list[str]]:
    """The requirements of each section."""
    recipe = configparser.ConfigParser(allow_no_value=True, delimiters=("\n",))
    recipe.optionxform = str  # type: ignore[assignment,method-assign]
    recipe.read(HERE / f"{package}.txt")
    sections = {name: list(recipe[name]) for name in recipe.sections()}
    if newest:
        for name in ("without requirements", "libraries of"):
            sections[name] = [line.partition("==")[0] for line in sections.get(name, [])]
    return sections


def pip(target: Path, *args: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target)]
    subprocess.run([*command, *args], check=True)


def install(package: str, folder: Path, newest: bool) -> None:
    sections = requirements(package, newest)
    shutil.rmtree(folder, ignore_errors=True)
    pip(folder, "--no-deps", *sections["without requirements"])
    pip(folder, *sections["with requirements"])
    if sections.get("libraries of"):
        for file in list(folder.joinpath(package).rglob("*.so")):
            file.unlink()
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            other = Path(name)
            pip(other, "--no-deps", *sections["libraries of"])
            for file in other.joinpath(package).rglob("*.so"):
                shutil.move(file, folder / file.relative_to(other))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newest", action="store_true")
    given = parser.parse_args()
    install(given.package, given.folder, given.newest)
