"""Where the installed package has the PTX and the resources of its kernels, and what their sources
are built for. An editable install has them in another folder than its Python sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.on_the_spot import SOURCES, images_of

import archflash
from archflash._packed import members

KERNELS = next(
    folder for path in archflash.__path__ if (folder := Path(path) / "_kernels").is_dir()
)


def ptx_texts(folder: str = "*") -> Iterator[tuple[str, str, str]]:
    """(image, target, PTX) of all kernels that are installed, or of those of a folder."""
    for file in sorted(KERNELS.glob(f"{folder}/*.ptx.lzma")):
        for name, text in members(file.read_bytes()):
            image, _, target = name.partition(".")
            yield f"{file.parent.name}/{image}", target, text.decode()


def sources_of(folder: str = "*") -> dict[str, Path]:
    """The .cu file of each image of a folder, or of all: {"simt/fwd_f32": Path(...)}."""
    files = sorted(SOURCES.glob(f"{folder}/kernels/*.cu"))
    return {f"{x.parent.parent.name}/{image}": x for x in files for image in images_of(x)}


def own_groups_of(file: Path) -> str | None:
    """What stands behind `// targets:` in a .cu file."""
    found = re.search(r"^// targets: (.+)$", file.read_text(), re.MULTILINE)
    return found[1] if found else None


def groups_of(file: Path) -> dict[str, list[str]]:
    """What a .cu file is built for, by the PTX text: {"80": ["80", "ptx"], "90": ["90", "100"]}.
    Its own line says that, or the one of its folder in CMakeLists.txt.
    """
    folder = file.parent.parent.name
    commands = (SOURCES.parent / "CMakeLists.txt").read_text()
    of_folder = re.search(
        rf"^archflash_add_\w+\((?:\w+ )?{folder} (.*:.*?)\)", commands, re.MULTILINE
    )
    assert of_folder, folder
    words = (own_groups_of(file) or of_folder[1]).split()
    groups = [word.split(":") for word in words if ":" in word]
    return {text: targets.split(",") for text, targets in groups}
