"""Makes a CUDA build of torch importable where NVIDIA's libraries are missing, to test with it on a
CPU: `python tests/unit/stub_cuda.py FOLDER`, after
`pip install --no-deps --target FOLDER torch==...`.

Each library that torch needs and does not bring becomes an empty shell beside torch's own, in which
every function says that there is no device.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice
_OF_CUDA = re.compile(r"\b((?:__cuda|cu|nccl|nv)\w+)(?:@(\S+))?")
_LIBRARY = re.compile(r"\[(lib(?:cu|nccl|nv)[^\]]*)\]")


def main(folder: str) -> None:
    libraries = sorted(Path(folder, "torch", "lib").glob("*.so*"))
    # caffe2_nvrtc alone needs libcuda and nvrtc; nothing loads it on a CPU, and archflash must not
    # find a shell in the place of the driver.
    libraries = [path for path in libraries if path.name != "libcaffe2_nvrtc.so"]
    needed = set(_LIBRARY.findall(_output("readelf", "-dW", *libraries)))
    references = set(_OF_CUDA.findall(_output("nm", "-D", "--undefined-only", *libraries)))
    for name in sorted(needed - {path.name for path in libraries}):
        _make_shell(libraries[0].with_name(name), references, needed)


def _make_shell(path: Path, references: set[tuple[str, str]], needed: set[str]) -> None:
    """A library with every function that is wanted of it, or of a library that is not named."""
    versions: dict[str, list[str]] = {path.name: []}
    for function, version in sorted(references):
        if version in {"", path.name} or version not in needed:
            versions.setdefault(version or path.name, []).append(function)
    functions = itertools.chain(*versions.values())
    source = "".join(f"long {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in functions)
    script = path.with_suffix(".versions")
    script.write_text("".join(f"{v} {{ {';'.join([*n, ''])} }};\n" for v, n in versions.items()))
    link = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name},--version-script={script}"]
    subprocess.run(
        ["gcc", "-w", "-x", "c", "-", *link, "-o", path], input=source, text=True, check=True
    )
    script.unlink()


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
