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


# Capability -> the target of Triton's PTX: cp.async and mma.sync, wgmma, mma.sync again.
TARGETS = {80: "sm_80", 90: "sm_90a", 120: "sm_120a"}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[bool, dict[str, Any]]]:
    """The kernel by capability and whether it is causal."""
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
    kernels = {}
    for capability in TARGETS:
        result = subprocess.run(
            [sys.executable, script, str(capability), *constants],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        for row in rows:
            # Triton counts on dynamic shared memory to begin at 1024, where a card has it begin,
            # without asking for it.
            row["ptx"] = re.sub(r"(\.extern \.shared \.align) 16", r"\1 1024", row["ptx"])
        kernels[capability] = dict(zip(kinds, rows, strict=True))
    return kernels


@pytest.fixture
def compiled(triton: dict[int, dict[bool, dict[str, Any]]]) -> dict[bool, dict[str, Any]]:
    """The kernel for compute capability 8.0, by whether it is causal."""
    return triton[80]


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
@pytest.mark.parametrize("capability", TARGETS)
def test_attention_compiled_by_triton_matches_float64(
    triton: dict[int, dict[bool, dict[str, Any]]], capability: int, causal: bool, mode: str
) -> None:
    kernel = triton[capability][causal]
    program = sim.load(kernel["ptx"])
    assert program.target == TARGETS[capability]
    for nq, nk in ((64, 192), (100, 150)):
        tensors = inputs(nq, nk)
        out, report = attend(program, kernel, tensors, mode)
        expected = reference.attention(*tensors, causal=causal, return_lse=False)
        result = reference.check(out, expected, reference.baseline(*tensors, causal=causal))
        assert result.ok, result
        assert not report.errors
        assert any(name.startswith("wgmma") for name in report.opcodes) == (capability == 90)
        assert report.instructions["matrix"] > 0
        assert report.instructions["async_copy"] > 0


@pytest.mark.parametrize("capability", TARGETS)
def test_what_the_instruction_table_says_of_triton_is_what_ran(
    triton: dict[int, dict[bool, dict[str, Any]]], capability: int
) -> None:
    executed: set[str] = set()
    for kernel in triton[capability].values():
        _, report = attend(sim.load(kernel["ptx"]), kernel, inputs(100, 150), "eager")
        executed |= set(report.opcodes)
    row = {
        "program": f"Triton {pinned()}, attention forward, sm_{capability}",
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


def test_wgmma_compiled_by_triton_needs_its_waits_and_fences(
    triton: dict[int, dict[bool, dict[str, Any]]],
) -> None:
    kernel = triton[90][True]
    for opcode in ("cp.async.wait_group", "wgmma.wait_group", "fence.proxy.async", "bar.sync"):
        without = re.sub(rf"^\s*{re.escape(opcode)}.*;", "", kernel["ptx"], flags=re.MULTILINE)
        assert without != kernel["ptx"]
        _, report = attend(sim.load(without), kernel, inputs(128, 333), "eager", check=False)
        assert report.errors, opcode
