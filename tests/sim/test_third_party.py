"""PTX that we did not write: an attention kernel compiled by Triton runs and is right."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import reference, sim

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "third-party"  # where `make test` installs it
TABLE = Path(__file__).parent / "third_party.json"  # what ran, for the instruction table
D, BLOCK = 64, 64


def pinned() -> str:
    """The version that the Makefile installs."""
    match = re.search(r"^TRITON := triton==(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    return match[1].strip()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """The kernel for compute capability 8.0, by whether it is causal."""
    environment = os.environ | {
        "PYTHONPATH": str(FOLDER),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    version = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if version.stdout.strip() != pinned():
        here = version.stdout.strip() or "no Triton"
        pytest.skip(f"Triton {pinned()} is not in {FOLDER} (found: {here}): make test installs it")
    kinds = (False, True)
    constants = [
        json.dumps({"D": D, "BLOCK_Q": BLOCK, "BLOCK_K": BLOCK, "CAUSAL": causal})
        for causal in kinds
    ]
    script = str(Path(__file__).parent / "triton_attention.py")
    result = subprocess.run(
        [sys.executable, script, "80", *constants],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return dict(zip(kinds, map(json.loads, result.stdout.splitlines()), strict=True))


def attend(
    program: sim.Program,
    kernel: dict[str, Any],
    inputs: list[Tensor],
    mode: str,
    check: bool = True,
) -> tuple[Tensor, sim.Report]:
    """Launches the kernel as Triton's own launcher would: its two scratch pointers are null."""
    q, k = inputs[:2]
    heads, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    out = torch.full_like(q, math.nan)
    named = zip("qkv", inputs, strict=True)
    report = sim.launch(
        program,
        kernel["kernel"],
        [
            *(sim.Buffer(x, writable=False, name=name) for name, x in named),
            sim.Buffer(out, initialised=False, name="out"),
            nq,
            nk,
            math.log2(math.e) / math.sqrt(D),
            bytes(4),  # to a multiple of 8
            bytes(16),
        ],
        grid=(-(-nq // BLOCK), heads),
        block=(32 * kernel["warps"],),
        shared_bytes=kernel["shared"],
        mode=mode,
        seed=1,
        check=check,
    )
    return out, report


def inputs(nq: int, nk: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(nq)
    return [torch.randn(1, 2, n, D, generator=generator).half() for n in (nq, nk, nk)]


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_compiled_by_triton_matches_float64(
    compiled: dict[bool, dict[str, Any]], causal: bool, mode: str
) -> None:
    kernel = compiled[causal]
    program = sim.load(kernel["ptx"])
    assert program.target == "sm_80"
    for nq, nk in ((64, 192), (100, 150)):
        tensors = inputs(nq, nk)
        out, report = attend(program, kernel, tensors, mode)
        expected = reference.attention(*tensors, causal=causal, return_lse=False)
        result = reference.check(out, expected, reference.baseline(*tensors, causal=causal))
        assert result.ok, result
        assert report.instructions["matrix"] > 0
        assert report.instructions["async_copy"] > 0


def test_what_the_instruction_table_says_of_triton_is_what_ran(
    compiled: dict[bool, dict[str, Any]],
) -> None:
    executed: set[str] = set()
    for kernel in compiled.values():
        _, report = attend(sim.load(kernel["ptx"]), kernel, inputs(100, 150), "eager")
        executed |= set(report.opcodes)
    row = {
        "program": f"Triton {pinned()}, attention forward, sm_80",
        "executed": sorted(executed),
    }
    written = json.loads(TABLE.read_text()) if TABLE.exists() else []
    assert row in written, f"{TABLE} should hold\n{json.dumps(row)}"


def test_attention_compiled_by_triton_needs_its_waits_and_barriers(
    compiled: dict[bool, dict[str, Any]],
) -> None:
    ptx = compiled[True]["ptx"]
    tensors = inputs(128, 333)
    for opcode in ("cp.async.wait_group", "bar.sync"):
        without = re.sub(rf"^\s*{re.escape(opcode)}.*;", "", ptx, flags=re.MULTILINE)
        assert without != ptx
        _, report = attend(sim.load(without), compiled[True], tensors, "eager", check=False)
        assert report.errors, opcode
