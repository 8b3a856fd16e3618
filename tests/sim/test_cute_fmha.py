"""NVIDIA's own attention kernel for Blackwell, compiled by CuTe DSL with no GPU, runs and is right.

Optional: ARCHFLASH_CUTE_PYTHON names a Python that has nvidia-cutlass-dsl 4.7.0, and
ARCHFLASH_CUTLASS a checkout of https://github.com/NVIDIA/cutlass, tag v4.7.0.
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
TABLE = HERE / "third_party.json"  # what ran, for the instruction table
MAP_BYTES = 128
# 16-bit floating point, 128-byte swizzle, zeros out of bounds. The rank is in bits 4-6; bits 20-23
# differ with the strides, and are taken for what L2 fetches at once.
MAP_KIND, MAP_OTHER = 0x00046302, 0x00F00070

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


@pytest.fixture(scope="module", params=[(64, False), (64, True), (128, False), (128, True)])
def recorded(
    request: pytest.FixtureRequest, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], bool]:
    """A launch and whether it is causal: 2 heads of 300 queries on one of 320 keys."""
    d, causal = request.param
    problem = {"d": d, "nq": 300, "nk": 320, "heads": 2, "causal": causal}
    result = subprocess.run(
        [
            os.environ["ARCHFLASH_CUTE_PYTHON"],
            HERE / "cute_fmha.py",
            os.environ["ARCHFLASH_CUTLASS"],
            tmp_path_factory.mktemp("cute"),
            json.dumps(problem),
        ],
        env=os.environ | {"LD_PRELOAD": str(driver)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), causal


def tensor_map(raw: bytes, address: int) -> bytes:
    """The simulator's map for a tensor at `address` in the place of a driver's.

    The compiler's host code writes the 64 bytes that a GPU reads by itself. Their format is not
    documented: these are the places of what is known of this kernel's tensors, and all else has to
    be zero.
    """
    (kind,) = struct.unpack_from("<I", raw, 8)
    rank = (kind >> 4 & 7) + 1
    assert kind & ~MAP_OTHER == MAP_KIND
    strides = [16 * s for s in struct.unpack_from(f"<{rank - 1}I", raw, 12)]
    dims = [n + 1 for n in struct.unpack_from(f"<{rank}I", raw, 32)]
    box = [n + 1 for n in raw[55 : 55 + rank]]
    assert not any(raw[52:55] + raw[55 + rank : 64])
    return _native.encode_tensor_map(address, "f16", dims, strides, box, [1] * rank, 3, False)


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


def attend(launch: dict[str, Any], text: str, mode: str) -> tuple[list[Tensor], sim.Report]:
    """Runs a recorded launch on fresh tensors; q, k, v, out as (1, heads, n, d), the report."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).half()
        for name, shape in launch["shapes"].items()
    }
    tensors["out"].fill_(math.nan)
    memory = _native.Memory()
    buffers = [Buffer(t, name == "out", name != "out", name) for name, t in tensors.items()]
    addresses = dict(zip(tensors, Bindings(memory, buffers).addresses, strict=True))
    report = run_kernel(
        sim.load(text),
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
    return [t.flatten(2, 3).transpose(1, 2) for t in tensors.values()], report


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
def test_attention_compiled_by_cute_matches_float64(
    recorded: tuple[dict[str, Any], bool], mode: str
) -> None:
    launch, causal = recorded
    (q, k, v, out), report = attend(launch, launch["ptx"], mode)
    k, v = (x.expand(-1, 2, -1, -1) for x in (k, v))
    expected = reference.attention(q, k, v, causal=causal, return_lse=False)
    result = reference.check(out, expected, reference.baseline(q, k, v, causal=causal))
    assert result.ok, result
    assert not report.errors
    assert any(opcode.startswith("tcgen05.mma") for opcode in report.opcodes)
    rows = {row["program"]: row["executed"] for row in json.loads(TABLE.read_text())}
    assert set(report.opcodes) <= set(rows[f"CuTe DSL {DSL}, CUTLASS's attention forward, sm_100"])
