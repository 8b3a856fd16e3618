"""The loop of changing a kernel: compiles one kernel of this checkout, runs a call with it on the
simulator in place of the installed package's, checks the output, and writes the machine code.

    python -m bench.one_kernel --implementation ampere --shape 1,2,128,64 --dtype bfloat16

It takes the arguments of ``archflash sim run``, and needs nvcc. The installed package plans the
call: after a change of tiles, parameters or plan.cpp it has to be built anew. ``--kernel`` names
another kernel of the plan than the first one of attention. The files go to build/one_kernel: the
PTX, the cubin and, where nvdisasm is found, the machine code as text.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _build import build_kernel
from tests.build.conftest import find_tool

from bench.on_the_spot import SOURCES, find_nvcc, images_of

OUTPUT = SOURCES.parent / "build" / "one_kernel"


def source_of(image: str) -> tuple[Path, str]:
    """The .cu file of an image ("folder/name"), and the image's name in its folder."""
    folder, _, name = image.partition("/")
    for source in sorted((SOURCES / folder / "kernels").glob("*.cu")):
        if name in images_of(source):
            return source, name
    raise FileNotFoundError(f"no file of src/{folder}/kernels makes the image {image}")


def only(kernel: str, text: str, image: str) -> str:
    """The text of a .cu file without the instantiations of other kernels than the one named."""
    word = image.rpartition("_")[2]

    def kept(call: re.Match[str]) -> str:
        made = re.match(r"\w+\((?:KERNEL\((\w+)(?:,\s*(\w+))?\)|(\w+))", call[0])
        if made is None:
            return call[0]
        name = made[3] or "_".join(filter(None, (made[1], word, made[2])))
        return call[0] if name == kernel else ""

    return re.sub(r"^ARCHFLASH_\w+\((?:.|\n)*?\)$", kept, text, flags=re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 after an error of the kernel, or when its output breaks the error rule."""
    import archflash
    from archflash import _archflash as native
    from archflash import sim
    from archflash.cli import sim as command
    from archflash.cli.explain import read_call

    parser = argparse.ArgumentParser(prog="python -m bench.one_kernel", description=__doc__)
    command.add_run_arguments(parser)
    parser.add_argument("--kernel", help="which kernel of the plan (default: that of attention)")
    options = parser.parse_args(argv)
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc here: install a CUDA toolkit, or put one's bin into PATH", file=sys.stderr)
        return 2
    call = read_call(options)
    q, k, v = (torch.empty(shape, dtype=call.dtype, device="meta") for shape in call.shapes)
    device = options.device or native.describe(options.implementation).home_device
    forced = options.implementation
    plan = archflash.explain(q, k, v, device=device, implementation=forced, **call.options).plan
    assert plan is not None  # a forced kernel has a plan, or explain raises
    images = {row["kernel"]: row["image"] for row in plan.to_dict()["launches"]}
    kernel = options.kernel or next(name for name in images if "_attention_" in name)
    source, image = source_of(images[kernel])

    OUTPUT.mkdir(parents=True, exist_ok=True)
    short = OUTPUT / source.name
    short.write_text(only(kernel, source.read_text(), image))
    target = re.sub(r".*(sm|compute)_", "", plan.code)
    ptx, cubin = OUTPUT / f"{kernel}.ptx", OUTPUT / f"{kernel}.cubin"
    toolkit, macros = Path(nvcc).resolve().parent, build_kernel.macros_of(source, image)
    text = build_kernel.compile_to_ptx(toolkit, short, SOURCES, macros, target, ptx)
    ptx.write_text(text)
    report = build_kernel.assemble(toolkit / "ptxas", ptx, target, False, cubin)
    print(f"{kernel}, sm_{target}: {build_kernel.parse_resources(report)[kernel]}")
    if nvdisasm := find_tool("nvdisasm"):
        code = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
        cubin.with_suffix(".sass").write_text(code.stdout)
    print("written: " + ", ".join(str(file) for file in sorted(OUTPUT.glob(f"{kernel}.*"))))
    options.program = sim.load(text)
    return command.run(options)


if __name__ == "__main__":
    sys.exit(main())
