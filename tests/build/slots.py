"""Writes tests/build/slots.csv: what the main loops of every forward kernel issue, counted in the
machine code of the wheel.

``python -m tests.build.slots`` says whether the table is up to date, ``--write`` writes it anew.
Run it after a change of a kernel. It needs the installed package, and cuobjdump and nvdisasm of
PyPI or of CUDA. A test compares the table where the same ptxas has assembled the kernels. Nothing
in it was timed.

A row is one loop of one warp, which goes round once for each block of keys. Two rows of one kind
are two loops, such as one for blocks with a mask and one for blocks without. ``slots`` are the
instructions on the way round that does all the work with the fewest of them: without masks, rare
branches and second tries of waits, and without loops inside, such as copies by threads. The columns
behind it say what is among them. ``shortest`` is the shortest way round, which may skip the block,
or leave O as it is (rescaling). The loops are

- attention: products by mma.sync or wgmma and the softmax between them,
- products: tcgen05 products, or on CUDA cores those by FFMA,
- softmax: exponentials of a block, in warps that do nothing else,
- rescaling: O of one or two tiles times the factor by which the row max has risen,
- loads: TMA.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from archflash import _archflash as native

from .conftest import find_tool
from .machine_code import KINDS, assembler_of, instructions_of, kinds, main_loops, words_of

TABLE = Path(__file__).with_name("slots.csv")
FORWARD = re.compile("_attention_fwd_|_approximate_(?!stats|convert)")
# Kernels that differ from those of another dtype in a few instructions, which issue as often.
TWINS = re.compile("_f16_|_e5m2_|^simt_.*_bf16_")
COLUMNS = ("folder", "target", "ptxas", "kernel", "loop", "slots", *KINDS, "shortest")


def home_target(folder: str) -> str:
    """The target whose code a folder's home GPU runs."""
    known = native.find_known_device(native.describe(folder).home_device)
    assert known is not None
    device = known.device
    names = [target.name for target in native.targets(folder)]
    name = native.pick_target(names, device.capability)
    assert name is not None
    return name


def has_rows(kernel: str) -> bool:
    return FORWARD.search(kernel) is not None and not TWINS.search(kernel)


def rows(tool: Path, cubin: bytes) -> Iterator[list[str]]:
    """The rows of an image's kernels, without the columns of their folder."""
    if not any(map(has_rows, words_of(cubin))):
        return
    for kernel, texts in sorted(instructions_of(tool, cubin).items()):
        if not has_rows(kernel):
            continue
        for loop in main_loops(texts):
            among = kinds(loop.way)
            numbers = [len(loop.way), *(among[kind] for kind in KINDS), loop.shortest]
            name = FORWARD.split(kernel)[1]
            yield [name, loop.work.name, *(str(n) if n else "" for n in numbers)]


def section(folder: str, tool: Path, images: Sequence[str]) -> list[list[str]]:
    """The rows of the table about one folder.

    Args:
        folder: the implementation.
        tool: cuobjdump.
        images: those of the folder.
    """
    target = home_target(folder)
    about = [folder, target, assemblers(folder, images)]
    cubins = (native.code_of(image, target) for image in sorted(images))
    return [about + row for cubin in cubins for row in rows(tool, cubin)]


def assemblers(folder: str, images: Sequence[str]) -> str:
    """The releases of ptxas that assembled a folder's images."""
    target = home_target(folder)
    releases = {assembler_of(native.code_of(image, target)) for image in images}
    return " ".join(f"{major}.{minor}" for major, minor in sorted(releases))


def sections(table: str) -> dict[str, list[list[str]]]:
    """The rows of the written table by folder.

    Raises:
        ValueError: its columns are others.
    """
    head, *lines = csv.reader(io.StringIO(table))
    if head != list(COLUMNS):
        raise ValueError(f"{TABLE} has the columns {head}")
    found: dict[str, list[list[str]]] = {}
    for line in lines:
        found.setdefault(line[0], []).append(line)
    return found


def folders() -> dict[str, list[str]]:
    """The images of each implementation in this build that have code for its home target."""
    found: dict[str, list[str]] = {
        name: [] for name in native.folder_names() if native.targets(name)
    }
    for image in native.image_names():
        folder = image.partition("/")[0]
        if folder in found and home_target(folder) in {t.name for t in native.targets(image)}:
            found[folder].append(image)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    options = parser.parse_args()
    tool = find_tool("cuobjdump")
    if tool is None or find_tool("nvdisasm") is None:
        print("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm", file=sys.stderr)
        return 2
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for folder, images in folders().items():
        writer.writerows(section(folder, tool, images))
    table = out.getvalue()
    if options.write:
        TABLE.write_text(table)
        return 0
    same = TABLE.exists() and TABLE.read_text() == table
    print(f"{TABLE.name} is up to date" if same else f"{TABLE} differs: run with --write")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
