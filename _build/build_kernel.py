"""Builds one image: CUDA -> PTX -> machine code. CMake calls it for each image of each
src/<folder>/kernels/*.cu: those that the file's line `// images:` names, else one called like it.

A file with several images is compiled with two macros that say the type in which the image's name
ends (src/common/instantiate.cuh). Where it says `// one text`, the compiler makes the PTX for bf16
only, and that for fp16 is the same with the other type (text_for_f16): tests/build compares them.
So it does with what `// 80 as 90` says: the text for 8.0 is made from that for 9.0 (text_for_80).

All machine code is assembled from PTX texts that are kept: the wheel carries them, and the
simulator runs them. `compile` writes IMAGE.compute_XX.ptx for each text and then IMAGE.texts, which
says that they are there; `assemble` writes IMAGE.sm_XX.cubin from a text, and beside it
IMAGE.sm_XX.json with the registers, spills, shared and stack bytes of each kernel. pack_images.py
packs them.

ARCHFLASH_KERNEL_CACHE may name a folder where compiled texts and machine code are kept between
builds: a kernel whose preprocessed source is unchanged is then not compiled again, and a PTX text
that differs in line information only is not assembled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

COMPILER_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Werror", "all-warnings"]
# For the first the compiler makes the text that it makes for the second, but for its `.target`:
# tests/build compares them. So it is not asked again.
SAME_TEXT_AS = {"110f": "100f"}
# What a text for 9.0 has of launches that start early (common/ptx/grid_dependency.cuh).
OF_LAUNCHES = re.compile(
    r"^\t// begin inline asm\n\tgriddepcontrol\.\w+;\n\t// end inline asm\n", re.MULTILINE
)
# How the texts for bf16 and for fp16 name the type: in instructions, and in mangled names.
NAMES_OF_TYPE = {"bf16": "f16", "DTypeE2E": "DTypeE1E"}
# How they make a float of half of a register, once the type is renamed: common/ptx/f32_of_half.cuh.
# These begin with what is searched for fast: a text has 11 million letters.
FLOATS_OF_BF16 = {
    "low": re.compile(r"shl\.b32 (\S+), (\S+), 16;  // low f16"),
    "high": re.compile(r"and\.b32 (\S+), (\S+), 0xFFFF0000;  // high f16"),
}
FLOAT_OF_F16 = r"{{.reg .b16 low, high; mov.b32 {{low, high}}, \2; cvt.f32.f16 \1, {};}}"
# The bits by which the instruction descriptors of their products differ (matrix_descriptor.h).
DESCRIPTOR_OF_BF16 = re.compile(r"mov\.b32 (\S+), (\d+);  // operands f16")
TYPE_BITS_OF_BF16 = 1 << 7 | 1 << 10


def run(command: list[str]) -> str:
    """Runs a tool of the toolkit; returns what it printed, or stops the build with it."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@cache
def version_of(tool: Path) -> str:
    return run([str(tool), "--version"])


def kept(parts: list[str], make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
    """What `make` returns, the bytes of a file and what the tool printed, from the cache folder if
    it was made before from the same parts.
    """
    folder = os.environ.get("ARCHFLASH_KERNEL_CACHE")
    if not folder:
        return make()
    entry = Path(folder) / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if not entry.is_file():
        made, printed = make()
        entry.parent.mkdir(parents=True, exist_ok=True)
        new = entry.with_suffix(f".{os.getpid()}")
        new.write_bytes(json.dumps(printed).encode() + b"\n" + made)
        new.replace(entry)  # at once: another build never reads half an entry
    printed_line, _, made = entry.read_bytes().partition(b"\n")
    return made, json.loads(printed_line)


def targets_of_groups(groups: list[str]) -> list[tuple[str, list[str]]]:
    """ "80:80,90,ptx" -> ("80", ["80", "90", "ptx"])."""
    return [(group.partition(":")[0], group.partition(":")[2].split(",")) for group in groups]


def macros_of(source: Path, image: str) -> list[str]:
    """What tells src/common/instantiate.cuh the type of an image; nothing if it is the only one."""
    if image == source.stem:
        return []
    word = image.rpartition("_")[2]
    return [f"ARCHFLASH_DTYPE={word.upper()}", f"ARCHFLASH_DTYPE_WORD={word}"]


def compile_to_ptx(
    toolkit: Path, source: Path, source_root: Path, macros: list[str], virtual: str, to: Path
) -> str:
    """The PTX text of a .cu file for compute_VIRTUAL, its paths made neutral."""
    nvcc = toolkit / "nvcc"
    flags = [*COMPILER_FLAGS, f"-arch=compute_{virtual}", "-I", str(source_root)]
    flags += [f"-D{name}" for name in macros]

    # Not ptxas, which checks what it assembles later: nvcc has it say its command instead.
    unchecked = ["--ptxas-prefix", "echo"]

    def make() -> tuple[bytes, str]:
        run([str(nvcc), *flags, *unchecked, "-ptx", "-o", str(to), str(source)])
        return neutral_paths(to.read_text(), source_root).encode(), ""

    if not os.environ.get("ARCHFLASH_KERNEL_CACHE"):
        return make()[0].decode()
    preprocessed = run([str(nvcc), *flags, "-E", str(source)])
    text = preprocessed.replace(str(source_root), "src")  # line markers hold paths
    made, _ = kept([version_of(nvcc), *COMPILER_FLAGS, virtual, source.stem, text], make)
    return made.decode()


def text_for_f16(ptx: str) -> str:
    """The PTX text of a `// one text` file for fp16, made from that for bf16. Where it says which
    source line an instruction is of, the lines are those for bf16.
    """
    for bf16, f16 in NAMES_OF_TYPE.items():
        ptx = ptx.replace(bf16, f16)
    for half, of_bf16 in FLOATS_OF_BF16.items():
        ptx = of_bf16.sub(FLOAT_OF_F16.format(half), ptx)

    def descriptor_of_f16(match: re.Match[str]) -> str:
        descriptor = int(match[2]) & ~TYPE_BITS_OF_BF16
        return f"mov.b32 {match[1]}, {descriptor};  // operands f16"

    return DESCRIPTOR_OF_BF16.sub(descriptor_of_f16, ptx)


def text_for_80(ptx: str) -> str:
    """The PTX text of a `// 80 as 90` file for compute_80, made from that for compute_90."""
    return OF_LAUNCHES.sub("", ptx).replace("\n.target sm_90\n", "\n.target sm_80\n", 1)


def assemble(ptxas: Path, ptx_file: Path, target: str, lineinfo: bool, to: Path) -> str:
    """Writes the machine code of a PTX file for sm_TARGET; returns ptxas's report."""
    debug = "--generate-line-info" if lineinfo else "--suppress-debug-info"
    flags = ["-O3", "-v", f"-arch=sm_{target}", debug]

    text = ptx_file.read_text()
    if not lineinfo:  # it leaves no trace in the machine code, and takes the assembler's time
        text = without_lines(text)

    def make() -> tuple[bytes, str]:
        source = to.with_name(f"{to.name}.ptx")
        source.write_text(text)
        report = run([str(ptxas), *flags, "-o", str(to), str(source)])
        source.unlink()
        return to.read_bytes(), report

    made, report = kept([version_of(ptxas), *flags, text], make)
    to.write_bytes(made)
    return report


def without_lines(ptx: str) -> str:
    """A PTX text without the statements that say which source line an instruction is of, and the
    names of functions that these point to. Those have a hash of the source in them.
    """
    names = r"^\s*\.section\s+\.debug_str\s*\{[^}]*\}\n"
    return re.sub(rf"^\s*\.(loc|file)\s[^\n]*\n|{names}", "", ptx, flags=re.MULTILINE)


def neutral_paths(ptx: str, source_root: Path) -> str:
    """Makes `.file` lines the same on every machine: paths relative to src/ or cuda/, no times and
    sizes.
    """

    def neutral(match: re.Match[str]) -> str:
        path = Path(match[2])
        if path.is_relative_to(source_root):
            name = path.relative_to(source_root).as_posix()
        else:
            name = "cuda/" + path.name
        return f'.file\t{match[1]} "{name}"'

    return re.sub(r'^\s*\.file\s+(\d+)\s+"([^"]+)"[^\n]*', neutral, ptx, flags=re.MULTILINE)


def parse_resources(report: str) -> dict[str, dict[str, int]]:
    """ptxas -v's report -> {kernel: {registers, spill_store_bytes, spill_load_bytes, stack_bytes,
    shared_bytes}}.
    """
    resources: dict[str, dict[str, int]] = {}
    kernel = ""
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
            resources[kernel] = {"shared_bytes": 0}
        if not kernel:
            continue
        for key, pattern in (
            ("stack_bytes", r"(\d+) bytes stack frame"),
            ("spill_store_bytes", r"(\d+) bytes spill stores"),
            ("spill_load_bytes", r"(\d+) bytes spill loads"),
            ("registers", r"Used (\d+) registers"),
            ("shared_bytes", r"(\d+) bytes smem"),
        ):
            if match := re.search(pattern, line):
                resources[kernel][key] = int(match[1])
    return resources


def compile_texts(arguments: argparse.Namespace) -> None:
    """Writes the PTX texts of an image."""
    source: Path = arguments.source
    image = arguments.image or source.stem
    macros = [*arguments.define, *macros_of(source, image)]
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    texts: dict[str | None, str] = {}
    older = {"80": "90"} if arguments.as_90 else {}
    virtuals = [virtual for virtual, _ in targets_of_groups(arguments.groups)]
    # What others are made from comes first.
    for virtual in sorted(virtuals, key=lambda virtual: older.get(virtual) in virtuals):
        ptx_file = output / f"{image}.compute_{virtual}.ptx"
        same = SAME_TEXT_AS.get(virtual)
        if arguments.one_text_with:
            made = output / f"{arguments.one_text_with}.compute_{virtual}.ptx"
            text = text_for_f16(made.read_text())
        elif same in texts:
            text = texts[same].replace(f"\n.target sm_{same}\n", f"\n.target sm_{virtual}\n", 1)
        elif older.get(virtual) in texts:
            text = text_for_80(texts["90"])
        else:
            text = compile_to_ptx(
                arguments.toolkit, source, arguments.source_root, macros, virtual, ptx_file
            )
        texts[virtual] = text
        ptx_file.write_text(text)
    (output / f"{image}.texts").touch()


def assemble_text(arguments: argparse.Namespace) -> None:
    """Writes the machine code of a text, and what the assembler reports of it."""
    cubin: Path = arguments.output
    report = assemble(arguments.ptxas, arguments.ptx, arguments.target, arguments.lineinfo, cubin)
    cubin.with_suffix(".json").write_text(json.dumps(parse_resources(report)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    compiling = commands.add_parser("compile", help="CUDA to PTX")
    compiling.set_defaults(run=compile_texts)
    compiling.add_argument("--source", type=Path, required=True, help="the .cu file")
    compiling.add_argument("--image", help="its name; without it the name of the .cu file")
    compiling.add_argument(
        "--one-text-with", metavar="IMAGE", help="the image for bf16 whose texts are there already"
    )
    compiling.add_argument(
        "--80-as-90",
        dest="as_90",
        action="store_true",
        help="make the text for 8.0 from that for 9.0",
    )
    compiling.add_argument(  # absolute, as the compiler names files: see neutral_paths()
        "--source-root", type=lambda path: Path(path).resolve(), required=True,
        help="src/, the include path",
    )  # fmt: skip
    compiling.add_argument("--output", type=Path, required=True, help="folder for the results")
    compiling.add_argument("--toolkit", type=Path, required=True, help="folder with nvcc")
    compiling.add_argument("--define", action="append", default=[], help="a macro for the compiler")
    compiling.add_argument(
        "groups", nargs="+", help="PTX:TARGET,TARGET... for example 80:80,90,100,120,ptx"
    )
    assembling = commands.add_parser("assemble", help="PTX to machine code")
    assembling.set_defaults(run=assemble_text)
    assembling.add_argument("--ptx", type=Path, required=True, help="the text")
    assembling.add_argument("--output", type=Path, required=True, help="the .cubin")
    assembling.add_argument("--target", required=True, help="for example 90a")
    assembling.add_argument("--ptxas", type=Path, required=True, help="the assembler")
    assembling.add_argument(
        "--lineinfo",
        action="store_true",
        help="keep line information in the machine code (profiling)",
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
