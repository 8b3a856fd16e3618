"""Where the installed package has the PTX and the resources of its kernels. An editable install has
them in another folder than its Python sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
