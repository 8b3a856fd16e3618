"""Packs the images of one .cu file: for each target an archive of their machine code, which the
native module carries, and one of all their PTX texts, which lies in the wheel for the simulator and
for GPUs that no machine code is for. It also writes IMAGE.json, the resources of an image by target
and kernel; those of a target that the build has left out (ARCHFLASH_MACHINE_CODE) are not known.
CMake calls this once the images are built.

Kernels for two types differ in few places, so an archive of two images takes little more than half
of what they take apart; and so do texts for two compute_XX. The names of the files list the images:
fwd_f16+fwd_bf16.sm_90.lzma, fwd_f16+fwd_bf16.ptx.lzma. In them a line `NAME BYTES` stands before
the code of an image, called fwd_f16, or before a text, called fwd_f16.compute_80
(python/archflash/_packed.py reads them).
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from pathlib import Path
from typing import Any

from build_kernel import targets_of_groups

# A dictionary that reaches from a kernel to the same one for another type, and hash chains: trees
# and longer matches would make the files 4% smaller in twice the time. What is not for others to
# install, because targets are left out, is packed in a quarter of the time to twice the size.
PACKING = {
    "id": lzma.FILTER_LZMA1,
    "preset": 6,
    "dict_size": 1 << 25,
    "mf": lzma.MF_HC4,
    "nice_len": 64,
    "depth": 8,
}
QUICK_PACKING = {"id": lzma.FILTER_LZMA1, "preset": 0, "dict_size": 1 << 25}
TEXT = {"lc": 4, "pb": 0}
MACHINE_CODE = {"lc": 0, "lp": 4, "pb": 4}  # an instruction has 16 bytes


def archive(files: dict[str, Path], packing: dict[str, Any]) -> bytes:
    """The packed contents of files, with their names in the archive."""
    codes = {name: file.read_bytes() for name, file in files.items()}
    parts = [f"{name} {len(code)}\n".encode() + code for name, code in codes.items()]
    return lzma.compress(b"".join(parts), lzma.FORMAT_ALONE, filters=[packing])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the images were built")
    parser.add_argument("--images", nargs="+", required=True, help="those of the file")
    parser.add_argument("--groups", nargs="+", required=True, help="as for build_kernel.py")
    parser.add_argument("--left-out", nargs="*", default=[], help="targets without machine code")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    names = "+".join(arguments.images)
    packing = QUICK_PACKING if arguments.left_out else PACKING
    texts: dict[str, Path] = {}
    resources: dict[str, dict[str, Any]] = {image: {} for image in arguments.images}
    for virtual, targets in targets_of_groups(arguments.groups):
        for image in arguments.images:
            name = f"{image}.compute_{virtual}"
            texts[name] = folder / f"{name}.ptx"
        for target in filter("ptx".__ne__, targets):
            for image in arguments.images:
                if target in arguments.left_out:
                    text = texts[f"{image}.compute_{virtual}"].read_text()
                    of_kernels = {name: {} for name in re.findall(r"\.entry (\w+)", text)}
                else:
                    of_kernels = json.loads((folder / f"{image}.sm_{target}.json").read_text())
                resources[image][f"sm_{target}"] = of_kernels
            if target not in arguments.left_out:
                # The last one first: it is for bf16, and those behind it take longer to unpack.
                cubins = {x: folder / f"{x}.sm_{target}.cubin" for x in reversed(arguments.images)}
                packed = archive(cubins, packing | MACHINE_CODE)
                (folder / f"{names}.sm_{target}.lzma").write_bytes(packed)
    (folder / f"{names}.ptx.lzma").write_bytes(archive(texts, packing | TEXT))
    for image, of_targets in resources.items():
        text = json.dumps(of_targets, indent=1, sort_keys=True) + "\n"
        (folder / f"{image}.json").write_text(text)


if __name__ == "__main__":
    main()
