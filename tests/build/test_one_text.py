"""`// one text` in a .cu file: the build makes the PTX for fp16 from that for bf16, so the two must
be the same but for the name of the type and how a number becomes a float. `// 80 as 90`: it makes
that for 8.0 from that for 9.0, which must be the same but for what belongs to launches that start
early. They are compared before the compiler optimises them, which takes a quarter of the time; what
it makes of two texts that are the same then is the same, but for what such statements keep apart.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from _build import build_kernel
from bench import on_the_spot
from bench.on_the_spot import SOURCES

from archflash import _archflash as native

NVCC = on_the_spot.find_nvcc()


def files_that_say(line: str) -> list[Path]:
    return [x for x in sorted(SOURCES.glob("*/kernels/*.cu")) if f"\n{line}\n" in x.read_text()]


FILES = files_that_say("// one text")
OF_TWO_TARGETS = files_that_say("// 80 as 90")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not found")


def named(file: Path) -> str:
    return f"{file.parent.parent.name}/{file.stem}"


def text_for(file: Path, word: str, folder: Path, target: str = "") -> str:
    """The PTX text of a file for one type and a target, its first one by default, not optimised,
    without the names of functions, in which the compiler abbreviates the type and has a hash of the
    source.
    """
    image = f"{file.stem}_{word}"
    target = target or native.targets(named(file) + f"_{word}")[0].name.replace("sm_", "compute_")
    macros = [f"-D{macro}" for macro in build_kernel.macros_of(file, image)]
    to = folder / f"{image}.ptx"
    command = [
        str(NVCC), "-std=c++20", "-Xcicc", "-O0", f"-arch={target}", "-I", str(SOURCES), *macros,
        "-ptx", "-o", str(to), str(file),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return re.sub(r"\b_Z\w+", "_Z", to.read_text())


def statements(text: str) -> list[str]:
    """Those of a text in alphabetical order, without numbers of registers, labels and variables."""
    numbers = r"(%SPL?(?:\+|, )|%[a-z]+|\$L__BB|depot\d+\[)[\d_]+"
    return sorted(re.sub(numbers, r"\1", text).splitlines())


@pytest.mark.rest
@needs_nvcc
@pytest.mark.parametrize("file", FILES, ids=named)
def test_the_compiler_makes_one_text_for_both_types(file: Path, tmp_path: Path) -> None:
    of_bf16, of_f16 = (text_for(file, word, tmp_path) for word in ("bf16", "f16"))
    assert ".bf16" in of_bf16 or "bf16x2" in of_bf16
    # Not `==` within assert: pytest would take minutes to say where they differ.
    same = build_kernel.text_for_f16(of_bf16) == of_f16
    assert same, f"{named(file)}.cu makes another text for fp16: leave out its line `// one text`"


@pytest.mark.rest
@needs_nvcc
@pytest.mark.parametrize("file", OF_TWO_TARGETS, ids=named)
def test_the_compiler_makes_one_text_for_8_0_and_9_0(file: Path, tmp_path: Path) -> None:
    """Statements may be in another order, and variables elsewhere."""
    of_80, of_90 = (text_for(file, "bf16", tmp_path, f"compute_{x}") for x in (80, 90))
    assert "griddepcontrol" in of_90
    same = statements(build_kernel.text_for_80(of_90)) == statements(of_80)
    assert same, f"{named(file)}.cu makes another text for 8.0: leave out its line `// 80 as 90`"


@pytest.mark.rest
@needs_nvcc
def test_a_file_whose_texts_differ_is_noticed(tmp_path: Path) -> None:
    file = SOURCES / "ampere" / "kernels" / "mla.cu"
    assert file not in FILES
    of_bf16, of_f16 = (text_for(file, word, tmp_path) for word in ("bf16", "f16"))
    assert build_kernel.text_for_f16(of_bf16) != of_f16
