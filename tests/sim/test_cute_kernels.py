"""Kernels for Blackwell that others wrote, compiled by CuTe DSL with no GPU, run and are right:
CUTLASS's attention, its products of matrices by a CTA and by pairs, and FlashAttention-4 by pairs.

Optional: ARCHFLASH_CUTE_PYTHON names a Python that has nvidia-cutlass-dsl 4.7.0, and
ARCHFLASH_CUTLASS a checkout of https://github.com/NVIDIA/cutlass, tag v4.7.0. FlashAttention-4 is
tested where that Python has flash-attn-4 4.0.0b36 as well (PyPI; torch may be the CPU build).
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _archflash_sim as _native
from archflash import reference, sim
from archflash.sim._launch import Bindings, Buffer, run_kernel

HERE = Path(__file__).parent
NEEDED = ("ARCHFLASH_CUTE_PYTHON", "ARCHFLASH_CUTLASS")
DSL = "4.7.0"
FLASH_ATTENTION_4 = "4.0.0b36"
OUTPUTS = ("out", "lse")
MODES = ("lazy", "eager", "random", "priority")
TABLE = HERE / "third_party.json"  # what ran, for the instruction table
MAP_BYTES = 128
# Fields of word 2 of a map: the rank less 1 in bits 4-6, the type in bits 7-10, the swizzle in bits
# 13-14; bits 20-23 differ with the strides, and are taken for what L2 fetches at once.
MAP_KIND, MAP_OTHER = 0x00040102, 0x00F06EF0
MAP_TYPES = {6: "f16", 7: "f32", 10: "bf16"}

pytestmark = pytest.mark.skipif(
    any(name not in os.environ for name in NEEDED), reason=f"{' and '.join(NEEDED)} are not set"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "cute_driver.c"], check=True
    )
    return library


def record(problem: dict[str, Any], driver: Path, folder: Path) -> dict[str, Any]:
    """The launch of cute_kernels.py's `problem`."""
    result = subprocess.run(
        [
            os.environ["ARCHFLASH_CUTE_PYTHON"],
            HERE / "cute_kernels.py",
            os.environ["ARCHFLASH_CUTLASS"],
            folder,
            json.dumps(problem),
        ],
        env=os.environ | {"LD_PRELOAD": str(driver)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    launch: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return launch


def tensor_map(raw: bytes, address: int) -> bytes:
    """The simulator's map for a tensor at `address` in the place of a driver's.

    The compiler's host code writes the 64 bytes that a GPU reads by itself. Their format is not
    documented: these are the places of what is known of this kernel's tensors, and all else has to
    be zero.
    """
    (kind,) = struct.unpack_from("<I", raw, 8)
    assert kind & ~MAP_OTHER == MAP_KIND, hex(kind)
    rank = (kind >> 4 & 7) + 1
    strides = [16 * s for s in struct.unpack_from(f"<{rank - 1}I", raw, 12)]
    dims = [n + 1 for n in struct.unpack_from(f"<{rank}I", raw, 32)]
    box = [n + 1 for n in raw[55 : 55 + rank]]
    assert not any(raw[52:55] + raw[55 + rank : 64])
    steps = [1] * rank
    return _native.encode_tensor_map(
        address, MAP_TYPES[kind >> 7 & 15], dims, strides, box, steps, kind >> 13 & 3, False
    )


def parameters(launch: dict[str, Any], addresses: dict[str, int]) -> bytes:
    """The recorded parameters with simulated addresses for those of the host."""
    places = {launch["places"][name]: address for name, address in addresses.items()}
    block = b""
    for text, align in zip(launch["parameters"], launch["aligns"], strict=True):
        piece = bytes.fromhex(text)
        (first,) = struct.unpack_from("<Q", piece.ljust(8, b"\0"))
        if len(piece) == MAP_BYTES:
            piece = tensor_map(piece, places[first])
        elif first in places:
            piece = struct.pack("<Q", places[first]) + piece[8:]
        block += b"\0" * (-len(block) % align) + piece
    return block


def run(launch: dict[str, Any], tensors: dict[str, Tensor], mode: str) -> sim.Report:
    """Runs a recorded launch on tensors, of which it writes OUTPUTS."""
    for name in tensors.keys() & OUTPUTS:
        tensors[name].fill_(math.nan)
    memory = _native.Memory()
    buffers = [
        Buffer(tensor, name in OUTPUTS, name not in OUTPUTS, name)
        for name, tensor in tensors.items()
    ]
    addresses = dict(zip(tensors, Bindings(memory, buffers).addresses, strict=True))
    report = run_kernel(
        sim.load(launch["ptx"]),
        launch["kernel"],
        parameters(launch, addresses),
        memory,
        grid=launch["grid"],
        block=launch["block"],
        cluster=launch["cluster"],
        shared_bytes=launch["shared"],
        mode=mode,
        seed=1,
        race_check=True,
        threads=0,
    )
    assert not report.errors
    return report


def is_listed(report: sim.Report, program: str) -> bool:
    """Whether the instruction table has what was executed."""
    rows = {row["program"]: row["executed"] for row in json.loads(TABLE.read_text())}
    return set(report.opcodes) <= set(rows[f"CuTe DSL {DSL}, {program}, sm_100"])


def attend(launch: dict[str, Any], causal: bool, program: str) -> list[sim.Report]:
    """Runs a launch of attention on every schedule and compares it with float64."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if name == "lse" else torch.float16
        )
        for name, shape in launch["shapes"].items()
    }
    names = ("q", "k", "v", "out")
    reports = []
    for mode in MODES:
        reports.append(run(launch, tensors, mode))
        # Heads before rows. CUTLASS's heads are two dimensions.
        q, k, v, out = (tensors[name].flatten(2, -2).transpose(1, 2) for name in names)
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        expected, lse = reference.attention(q, k, v, causal=causal, return_lse=True)
        result = reference.check(out, expected, reference.baseline(q, k, v, causal=causal))
        assert result.ok, result
        if "lse" in tensors:
            # Exponentials by polynomials are as exact as weights of 16 bits need.
            torch.testing.assert_close(tensors["lse"].double(), lse, rtol=0, atol=1e-4)
        assert is_listed(reports[-1], program)
    return reports


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_attention_matches_float64(d: int, causal: bool, driver: Path, tmp_path: Path) -> None:
    # 2 heads of queries on one of keys.
    problem = {"d": d, "nq": 300, "nk": 320, "heads": 2, "causal": causal}
    launch = record(problem | {"kind": "attention"}, driver, tmp_path)
    attend(launch, causal, "CUTLASS's attention forward")


# FlashAttention-4 itself takes pairs without a mask at head dimension 128, and always at 256.
PAIRS = {
    "d128-full-static": {"d": 128, "causal": False, "walk": "static"},
    "d128-causal-grid": {"d": 128, "causal": True, "walk": "grid"},
    "d256-full-static": {"d": 256, "causal": False, "walk": "static"},
    "d256-causal-grid": {"d": 256, "causal": True, "walk": "grid"},
}


@pytest.mark.parametrize("name", PAIRS)
def test_flash_attention_4_by_pairs_matches_float64(
    name: str, driver: Path, tmp_path: Path
) -> None:
    find = (
        f"import importlib.metadata as m; assert m.version('flash-attn-4') == '{FLASH_ATTENTION_4}'"
    )
    if subprocess.run([os.environ["ARCHFLASH_CUTE_PYTHON"], "-c", find], check=False).returncode:
        pytest.skip(
            f"{os.environ['ARCHFLASH_CUTE_PYTHON']} has no flash-attn-4 {FLASH_ATTENTION_4}"
        )
    problem = {"kind": "FlashAttention-4", "nq": 300, "nk": 320, "heads": 2} | PAIRS[name]
    launch = record(problem, driver, tmp_path)
    assert launch["cluster"] == [2, 1, 1]
    program = f"flash-attn-4 {FLASH_ATTENTION_4}'s attention forward by pairs"
    for report in attend(launch, problem["causal"], program):
        opcodes = " ".join(report.opcodes)
        assert "tcgen05.mma.cta_group::2" in opcodes
        assert "tcgen05.mma.cta_group::1" not in opcodes


PRODUCTS = {
    "one CTA, M 64": {"tile": (64, 128), "cluster": (1, 1), "a_k": True, "b_k": False},
    "one CTA, M 128, multicast": {"tile": (128, 64), "cluster": (2, 2), "a_k": False, "b_k": True},
    "pair, M 128, multicast": {"tile": (128, 64), "cluster": (2, 2), "a_k": False, "b_k": False},
    "pair, M 256": {"tile": (256, 128), "cluster": (2, 1), "a_k": True, "b_k": True},
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_exact(name: str, driver: Path, tmp_path: Path) -> None:
    options = PRODUCTS[name]
    dtype = torch.bfloat16 if options["a_k"] else torch.float16
    problem = {"kind": "product", "m": 200, "n": 120, "k": 104, "dtype": str(dtype).split(".")[1]}
    launch = record(problem | options | {"pair": name.startswith("pair")}, driver, tmp_path)
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, by_rows: bool) -> Tensor:
        shape = (rows, columns) if by_rows else (columns, rows)
        values = torch.randint(-4, 5, shape, generator=generator).to(dtype)
        return (values if by_rows else values.T)[..., None]

    a, b = matrix(200, 104, options["a_k"]), matrix(120, 104, options["b_k"])
    for mode in MODES:
        out = torch.zeros(200, 120, 1)
        report = run(launch, {"a": a, "b": b, "out": out}, mode)
        assert torch.equal(out[..., 0].double(), a[..., 0].double() @ b[..., 0].double().T)
        assert is_listed(report, "CUTLASS's matrix product")
        group = 1 + name.startswith("pair")
        assert any(o.startswith(f"tcgen05.mma.cta_group::{group}") for o in report.opcodes)
