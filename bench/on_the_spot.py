"""Kernels that are not in the wheel: nvcc compiles them when needed, and plans launch them."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from archflash import _archflash as native

SOURCES = Path(__file__).resolve().parents[1] / "src"
COMPILER_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Werror", "all-warnings"]


def find_nvcc() -> str | None:
    """A CUDA compiler of this system, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def images_of(source: Path) -> list[str]:
    """The images that the build makes of a file of src/<folder>/kernels: those that its line
    `// images:` names, or one called like the file.
    """
    named = re.search(r"^// images: (.+)$", source.read_text(), re.MULTILINE)
    return named[1].split() if named else [source.stem]


def text_for(source: Path, image: str) -> str:
    """A file of src/<folder>/kernels for one of its images: with the names for which
    src/common/instantiate.cuh has a macro written out.
    """
    text = source.read_text()
    if image == source.stem:
        return text
    word = image.rpartition("_")[2]
    text = re.sub(r"\bKERNEL\((\w+)\)", rf"\1_{word}", text)
    return re.sub(r"\bKERNEL\((\w+), (\w+)\)", rf"\1_{word}_\2", text)


@cache
def compiled(
    source: Path, nvcc: str, kind: str, architecture: str, definitions: tuple[str, ...] = ()
) -> bytes:
    """Compiles a source file with nvcc.

    Args:
        source: the .cu file.
        nvcc: the compiler.
        kind: "ptx" or "cubin".
        architecture: "compute_90", "sm_120", "sm_100f", ...
        definitions: macros, "NAME=text".

    Returns:
        The bytes of the PTX or cubin file.

    Raises:
        RuntimeError: it does not compile; the message is nvcc's.
    """
    # nvcc reads a comma as the end of one macro and the beginning of the next.
    macros = ["-D" + text.replace(",", "\\,") for text in definitions]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{source.stem}.{kind}"
        done = subprocess.run(
            [
                nvcc, *COMPILER_FLAGS, f"-arch={architecture}", f"-{kind}", "-I", str(SOURCES),
                *macros, "-o", str(out), str(source),
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode != 0:
            said = " ".join([source.stem, *definitions])
            raise RuntimeError(f"{said}: {done.stdout}{done.stderr}")
        return out.read_bytes()


def with_kernel(plan: native.LaunchPlan, kernel: str, code: bytes) -> native.LaunchPlan:
    """Changes a plan so that it launches other code for one of its kernels.

    Args:
        plan: a plan that launches the kernel.
        kernel: the kernel's name in the plan and in the code.
        code: a cubin.
    """
    from archflash import _archflash as native

    image = f"on the spot/{hashlib.sha256(code).hexdigest()}"
    native.add_image(image, code)
    fields = plan.to_dict()
    launches = [
        row | {"image": image} if row["kernel"] == kernel else row for row in fields["launches"]
    ]
    return native.LaunchPlan.unchecked_from_dict(fields | {"launches": launches})
