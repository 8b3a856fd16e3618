"""PTX that we did not write: an attention kernel compiled by Triton runs and is right."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import reference, sim

pytestmark = pytest.mark.rest
ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "third-party"  # where `make test-rest` installs it
TABLE = Path(__file__).parent / "third_party.json"  # what ran, for the instruction table
KEYS = 64  # of a tile


def pinned() -> str:
    """The version that the Makefile installs."""
    match = re.search(r"^TRITON := triton==(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    return match[1].strip()


@dataclass(frozen=True)
class Variant:
    """A kernel of triton_attention.py as it is compiled.

    Attributes:
        capability: 10 * major + minor.
        target: of Triton's PTX.
        d: head dimension.
        rows: queries of a tile.
        specialised: None for the kernel that takes pointers, else whether warps have roles.
        causal: which it is compiled as.
        unfenced: whether TMA overwrites what tcgen05.alloc wrote, with no fence.proxy.async between
            that the ISA asks for. What Triton leaves out is reported; the values are right.
    """

    capability: int
    target: str
    d: int = 64
    rows: int = 64
    specialised: bool | None = None
    causal: tuple[bool, ...] = (False, True)
    unfenced: bool = False

    def constants(self, causal: bool) -> dict[str, object]:
        found: dict[str, object] = {"D": self.d, "BLOCK_Q": self.rows, "BLOCK_K": KEYS}
        found["CAUSAL"] = causal
        return found if self.specialised is None else found | {"SPECIALISED": self.specialised}


# cp.async and mma.sync; wgmma; mma.sync again; tcgen05 with M 64 and 128, without and with TMA and
# roles.
VARIANTS = {
    "sm_80": Variant(80, "sm_80"),
    "sm_90": Variant(90, "sm_90a"),
    "sm_120": Variant(120, "sm_120a"),
    "sm_90-tma": Variant(90, "sm_90a", specialised=False, causal=(True,)),
    "sm_120-tma": Variant(120, "sm_120a", specialised=False, causal=(True,)),
    "sm_100-d64-q64": Variant(100, "sm_100a"),
    "sm_100-d128": Variant(100, "sm_100a", d=128, rows=128, causal=(True,)),
    "sm_100-tma-d64": Variant(
        100, "sm_100a", rows=128, specialised=False, causal=(True,), unfenced=True
    ),
    "sm_100-roles-d64": Variant(100, "sm_100a", rows=128, specialised=True),
    "sm_100-roles-d128": Variant(100, "sm_100a", d=128, rows=128, specialised=True, causal=(True,)),
}
KINDS = [(name, causal) for name, variant in VARIANTS.items() for causal in variant.causal]
CAPABILITIES = sorted({variant.capability for variant in VARIANTS.values()})
Kernels = dict[tuple[str, bool], dict[str, Any]]  # by variant and whether it is causal


def _python(arguments: list[str], cache: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "TRITON_CACHE_DIR": cache}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def why_not() -> str:
    """Why Triton of that version is not at hand; empty: it is."""
    version = _python(["-c", "import triton; print(triton.__version__)"], "").stdout.strip()
    if version == pinned():
        return ""
    here = version or "no Triton"
    return f"Triton {pinned()} is not in {FOLDER} (found: {here}): make test-rest installs it"


def compiled(capability: int, constants: list[dict[str, object]]) -> list[dict[str, Any]]:
    """The kernels with these constants: "ptx", name ("kernel"), "warps", "shared" bytes."""
    return compiled_by("triton_attention.py", str(capability), *map(json.dumps, constants))


def compiled_by(script: str, *arguments: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        result = _python([str(Path(__file__).parent / script), *arguments], cache)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        # Triton relies, without asking for it, on dynamic shared memory that begins at 1024, as it
        # does on a card.
        row["ptx"] = re.sub(r"(\.extern \.shared \.align) 16", r"\1 1024", row["ptx"])
    return rows


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels; of several pytest workers the first compiles them, the others read its file."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the run's, of which each worker has a folder
    file = folder / "triton.json"
    with (folder / "triton.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps([row for c in CAPABILITIES for row in compiled_for(c)]))
    keys = [key for capability in CAPABILITIES for key in kinds_of(capability)]
    return dict(zip(keys, json.loads(file.read_text()), strict=True))


def kinds_of(capability: int) -> list[tuple[str, bool]]:
    return [kind for kind in KINDS if VARIANTS[kind[0]].capability == capability]


def compiled_for(capability: int) -> list[dict[str, Any]]:
    constants = [VARIANTS[name].constants(causal) for name, causal in kinds_of(capability)]
    return compiled(capability, constants)


Launched = Callable[[str, bool, int, int, str], tuple[Tensor, sim.Report]]


@pytest.fixture(scope="module")
def launched(triton: Kernels) -> Launched:
    """Launches a variant, causal or not, on so many queries and keys in a mode; each launch runs
    once, whichever tests look at it.
    """

    @cache
    def program(name: str, causal: bool) -> sim.Program:
        return sim.load(triton[name, causal]["ptx"])

    @cache
    def launch(name: str, causal: bool, nq: int, nk: int, mode: str) -> tuple[Tensor, sim.Report]:
        variant = VARIANTS[name]
        tensors = inputs(nq, nk, variant.d)
        kernel = triton[name, causal]
        return attend(variant, program(name, causal), kernel, tensors, mode, check=False)

    return launch


@cache
def expected(nq: int, nk: int, d: int, causal: bool) -> tuple[Tensor, Tensor]:
    """What float64 gives for a call, and what PyTorch gives in its dtype."""
    tensors = inputs(nq, nk, d)
    out = reference.attention(*tensors, causal=causal, return_lse=False)
    return out, reference.baseline(*tensors, causal=causal)


def attend(
    variant: Variant,
    program: sim.Program,
    kernel: dict[str, Any],
    inputs: list[Tensor],
    mode: str,
    check: bool = True,
    **options: Any,
) -> tuple[Tensor, sim.Report]:
    """Launches the kernel as Triton's own launcher would: its two scratch pointers are null."""
    q, k = inputs[:2]
    heads, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    out = torch.full_like(q, math.nan)
    buffers = [
        *(sim.Buffer(x, writable=False, name=n) for n, x in zip("qkv", inputs, strict=True)),
        sim.Buffer(out, initialised=False, name="out"),
    ]
    arguments: list[Any] = list(buffers)
    if variant.specialised is not None:
        arguments = []
        for buffer, meta in zip(buffers, kernel["maps"], strict=True):
            tensor = buffer.tensor[0]
            # The arguments have a tensor map, and then the sizes and strides once more.
            arguments += [
                sim.TensorMap(
                    tensor,
                    meta["block_size"][::-1],
                    (0, 32, 64, 128)[meta["swizzle"]],
                    writable=buffer.writable,
                    initialised=buffer.initialised,
                    name=buffer.name,
                ),
                *tensor.shape,
                bytes(4),  # to a multiple of 8
                *(step.to_bytes(8, "little") for step in tensor.stride()),
            ]
    arguments += [nq, nk, math.log2(math.e) / math.sqrt(variant.d)]
    report = sim.launch(
        program,
        kernel["kernel"],
        [
            *arguments,
            bytes(4),  # to a multiple of 8
            bytes(16),
        ],
        grid=(-(-nq // variant.rows), heads),
        block=(32 * kernel["warps"],),
        shared_bytes=kernel["shared"],
        mode=mode,
        seed=1,
        check=check,
        **options,
    )
    return out, report


def inputs(nq: int, nk: int, d: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(nq)
    return [torch.randn(1, 2, n, d, generator=generator).half() for n in (nq, nk, nk)]


def check_errors(variant: Variant, report: sim.Report) -> None:
    assert bool(report.errors) == variant.unfenced, report
    for finding in report.errors:
        assert finding.kind == "proxy", finding
        assert "tcgen05.alloc" in finding.message


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize(
    ("name", "causal"), KINDS, ids=[f"{n}-{'causal' if c else 'full'}" for n, c in KINDS]
)
def test_attention_compiled_by_triton_matches_float64(
    launched: Launched, name: str, causal: bool, mode: str
) -> None:
    variant = VARIANTS[name]
    for nq, nk in ((64, 192), (100, 150)):
        out, report = launched(name, causal, nq, nk, mode)
        result = reference.check(out, *expected(nq, nk, variant.d, causal))
        assert result.ok, result
        check_errors(variant, report)
        for family, capability in (("wgmma", 90), ("tcgen05.mma", 100)):
            used = any(opcode.startswith(family) for opcode in report.opcodes)
            assert used == (variant.capability == capability)
        assert report.instructions["matrix"] > 0
        assert report.instructions["async_copy"] > 0


def test_attention_with_tcgen05_does_not_rely_on_the_order_of_issue(launched: Launched) -> None:
    for name, variant in VARIANTS.items():
        if variant.capability != 100:
            continue
        out, report = launched(name, True, 100, 150, "shuffled")
        assert "tcgen05-order" not in {finding.kind for finding in report.findings}
        result = reference.check(out, *expected(100, 150, variant.d, True))
        assert result.ok, result


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_the_instruction_table_says_of_triton_is_what_ran(
    triton: Kernels, launched: Launched, capability: int
) -> None:
    executed: set[str] = set()
    for (name, causal), kernel in triton.items():
        variant = VARIANTS[name]
        if variant.capability != capability:
            continue
        assert sim.load(kernel["ptx"]).target == variant.target
        _, report = launched(name, causal, 100, 150, "eager")
        check_errors(variant, report)
        executed |= set(report.opcodes)
    row = {
        "program": f"Triton {pinned()}, attention forward, sm_{capability}",
        "executed": sorted(executed),
    }
    written = json.loads(TABLE.read_text()) if TABLE.exists() else []
    assert row in written, f"{TABLE} should hold\n{json.dumps(row)}"


# None of these may be left out. All instructions of an opcode are left out at once.
NEEDED = {
    "sm_80": ("cp.async.wait_group", "bar.sync"),
    "sm_90": ("cp.async.wait_group", "wgmma.wait_group", "fence.proxy.async", "bar.sync"),
    "sm_100-d128": (
        "cp.async.wait_group",
        "fence.proxy.async",
        "bar.sync",
        "tcgen05.wait::st",
        "@%p\\d+ tcgen05.commit",
        "@%p\\d+ tcgen05.dealloc",
    ),
    "sm_100-roles-d64": ("tcgen05.wait::st", "@%p\\d+ tcgen05.commit", "@%p\\d+ tcgen05.dealloc"),
}


@pytest.mark.parametrize(
    ("name", "opcode"), [(name, opcode) for name, opcodes in NEEDED.items() for opcode in opcodes]
)
def test_attention_compiled_by_triton_needs_its_waits_and_fences(
    triton: Kernels, name: str, opcode: str
) -> None:
    variant, kernel = VARIANTS[name], triton[name, True]
    without = re.sub(rf"^\s*{opcode}.*;", "", kernel["ptx"], flags=re.MULTILINE)
    assert without != kernel["ptx"]
    assert not variant.unfenced
    tensors = inputs(128, 333, variant.d)
    _, report = attend(variant, sim.load(without), kernel, tensors, "eager", check=False)
    assert report.errors


# ---- Products with block scales ----

M, N, K = 32, 32, 128
SCALED = [("e4m3", "e4m3", 32), ("e5m2", "e4m3", 32), ("e2m1", "e2m1", 32), ("e2m1", "e2m1", 16)]


def operand(kind: str, rows: int, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random elements and scales as Triton reads them, and their values in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, K), generator=generator, dtype=torch.uint8)
    if kind == "e2m1":
        codes %= 16
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        values = numbers[codes.long() % 8] * (1 - 2.0 * (codes >= 8))
        stored = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes &= 0xBF  # neither NaN nor infinity
        stored = codes
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        values = codes.view(dtype).double()
    scales = torch.randint(40, 72, (rows, K // group), generator=generator, dtype=torch.uint8)
    if group == 16:
        factors = scales.view(torch.float8_e4m3fn).double()
    else:
        scales += 70
        factors = torch.exp2(scales.double() - 127)
    return stored.contiguous(), scales, values * factors.repeat_interleave(group, 1)


def test_products_with_block_scales_compiled_by_triton_match_float64() -> None:
    if reason := why_not():
        pytest.skip(reason)
    constants = [
        {"M": M, "N": N, "K": K, "A": a, "B": b, "PACK": 2 if a == "e2m1" else 1, "GROUP": group}
        for a, b, group in SCALED
    ]
    executed: set[str] = set()
    kernels = compiled_by("triton_scaled.py", *map(json.dumps, constants))
    for (a_kind, b_kind, group), kernel in zip(SCALED, kernels, strict=True):
        a, a_scales, a_values = operand(a_kind, M, group, 1)
        b, b_scales, b_values = operand(b_kind, N, group, 2)
        out = torch.full((M, N), math.nan)
        report = sim.launch(
            sim.load(kernel["ptx"]),
            kernel["kernel"],
            [a, a_scales, b, b_scales, out, bytes(16)],
            block=(32 * kernel["warps"],),
            shared_bytes=kernel["shared"],
            device="RTX 5090",
        )
        magnitude = a_values.abs() @ b_values.abs().T
        assert ((out - a_values @ b_values.T).abs() <= 2.0**-20 * magnitude).all()
        executed |= set(report.opcodes)
    row = {
        "program": f"Triton {pinned()}, products with block scales, sm_120",
        "executed": sorted(executed),
    }
    assert row in json.loads(TABLE.read_text()), f"{TABLE} should hold\n{json.dumps(row)}"
    assert sum("block_scale" in opcode for opcode in executed) == len(SCALED)
