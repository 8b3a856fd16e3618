"""The simulator's arithmetic alone: ``sim/numerics``, called through ctypes.

A small library (direct.cpp and that folder) is compiled where its sources have changed; each call
runs one instruction, named by its PTX text, over arrays.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = (
    *sorted((REPOSITORY / "sim" / "numerics").glob("*.cpp")),
    REPOSITORY / "tests" / "sim" / "vectors" / "direct.cpp",
)

FOLDER = REPOSITORY / "build" / "direct"

Words = npt.NDArray[np.uint64]


def compiled() -> Path:
    """The library. Of processes that want it at the same time one compiles it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or set CXX")
    command = [compiler, "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{REPOSITORY}", *(str(source) for source in SOURCES)]
    key = hashlib.sha256("\0".join(command).encode())
    for file in (*SOURCES, *sorted((REPOSITORY / "sim").glob("*/*.h"))):
        key.update(file.read_bytes())
    library = FOLDER / f"{key.hexdigest()}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for old in FOLDER.glob("*.so"):
                old.unlink()
            new = library.with_suffix(".new")
            done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            new.replace(library)
    return library


class Direct:
    """The compiled library. Operands are arrays of raw bits, one value in an element."""

    def __init__(self) -> None:
        """Raises RuntimeError with the compiler's words if it cannot be compiled."""
        self._library = ctypes.CDLL(str(compiled()))

    def set_avx2(self, enabled: bool) -> bool:
        """Chooses between AVX2 and baseline code; returns whether AVX2 is in use now."""
        self._library.direct_set_avx2(int(enabled))
        return bool(self._library.direct_uses_avx2())

    def set_capability(self, capability: tuple[int, int]) -> None:
        """Chooses the card whose tensor cores add up; at first it is one of 9.0."""
        major, minor = capability
        self._library.direct_set_capability(10 * major + minor)

    def run(self, instruction: str, *operands: npt.ArrayLike) -> Words:
        """One instruction on arrays of equal length. Raises KeyError for an unknown one."""
        inputs = [np.ascontiguousarray(operand, dtype=np.uint64) for operand in operands]
        output = np.empty_like(inputs[0])
        failed = self._library.direct_run(
            instruction.encode(),
            ctypes.c_int64(output.size),
            _pointers(inputs),
            len(inputs),
            ctypes.c_void_p(output.ctypes.data),
        )
        if failed:
            raise KeyError(instruction)
        return output

    def mma(self, instruction: str, inputs: list[Words], output_count: int) -> list[Words]:
        """mma.sync: ``inputs`` are A's, B's and C's registers, each (warps * 32,)."""
        return self._warps(self._library.direct_mma, instruction, inputs, output_count)

    def warp(self, instruction: str, inputs: list[Words]) -> Words:
        """The warp-wide form of one of the hottest instructions, each operand (warps * 32,)."""
        return self._warps(self._library.direct_warp, instruction, inputs, 1)[0]

    def matrix_map(self, name: str, trans: bool, source: Words) -> Words:
        """ldmatrix, stmatrix or movmatrix of one 8 x 8 matrix: 32 words in, 32 words out."""
        words = np.ascontiguousarray(source, dtype=np.uint32)
        result = np.zeros(32, dtype=np.uint32)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (words, result))
        if words.size != 32 or self._library.direct_matrix_map(name.encode(), trans, *pointers):
            raise KeyError(name)
        return result.astype(np.uint64)

    def multiply(
        self,
        types: tuple[str, str],
        shape: tuple[int, int, int],
        a: bytes,
        b: bytes,
        d: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """A dense product of tiles in memory, (m, n) of ``shape`` = (m, n, k), plus ``d``."""
        m, n, k = shape
        result = np.zeros((m, n), dtype=np.float32) if d is None else d.copy()
        self._library.direct_multiply(
            types[0].encode(), types[1].encode(), m, n, k, a, b,
            ctypes.c_void_p(result.ctypes.data), int(d is not None),
        )  # fmt: skip
        return result

    def _warps(
        self,
        function: ctypes._NamedFuncPointer,
        instruction: str,
        inputs: list[Words],
        output_count: int,
    ) -> list[Words]:
        inputs = [np.ascontiguousarray(operand, dtype=np.uint64) for operand in inputs]
        if any(operand.size != inputs[0].size or operand.size % 32 for operand in inputs):
            raise ValueError("operands must be equally many whole warps of 32 lanes")
        outputs = [np.empty_like(inputs[0]) for _ in range(output_count)]
        warps = ctypes.c_int64(inputs[0].size // 32)
        if function(instruction.encode(), warps, _pointers(inputs), _pointers(outputs)):
            raise KeyError(instruction)
        return outputs


def _pointers(arrays: list[Words]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
