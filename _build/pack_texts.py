"""Packs the PTX of the images of one .cu file into one file. The texts of two types differ in few
places: together they take little more than half of what they take apart.

The name of the file lists the images: fwd_f16+fwd_bf16.compute_80.ptx.xz. In it a line `// image
NAME` stands before the text of each; python/archflash/sim/_attention.py unpacks it. CMake calls
this once the images are built.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

# Contexts for text instead of machine words, and hash chains. Matches up to 128 characters long
# would make the texts 4% smaller in 1.7 times the time. The dictionary reaches from a kernel to
# the same one for another type.
PACKING = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 6,
        "dict_size": 1 << 25,
        "lc": 4,
        "pb": 0,
        "mf": lzma.MF_HC4,
        "nice_len": 64,
        "depth": 8,
    }
]


def pack(texts: list[Path]) -> bytes:
    """The packed texts of files called IMAGE.compute_XX.ptx."""
    parts = [f"// image {file.name.partition('.')[0]}\n{file.read_text()}" for file in texts]
    return lzma.compress("".join(parts).encode(), filters=PACKING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the packed file")
    parser.add_argument("texts", type=Path, nargs="+", help="IMAGE.compute_XX.ptx of each image")
    arguments = parser.parse_args()
    arguments.output.write_bytes(pack(arguments.texts))


if __name__ == "__main__":
    main()
