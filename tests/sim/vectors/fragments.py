"""Fragments of mma.sync as matrices, by PTX's figures, written out afresh."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .inputs import Words
from .programs import ELEMENT_BITS, MatrixShape, Program

Floats = npt.NDArray[np.float64]


def element(kind: str, word: Words, index: int) -> Floats:
    """Floating-point element ``index`` of packed registers, as float64."""
    bits = ELEMENT_BITS[kind]
    code: Words = word >> np.uint64(bits * index) & np.uint64((1 << bits) - 1)
    if kind in ("e4m3", "e5m2"):
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
        values: Floats = torch.from_numpy(code.astype(np.uint8)).view(dtype).double().numpy()
        return values
    if kind == "f16":
        return code.astype(np.uint16).view(np.float16).astype(np.float64)
    word = {"bf16": code << np.uint64(16), "tf32": code & np.uint64(0xFFFFE000)}.get(kind, code)
    return word.astype(np.uint32).view(np.float32).astype(np.float64)


def gather(kind: str, registers: list[Words], rows: int, columns: int, which: str) -> Floats:
    """Registers of a fragment as matrices (warps, rows, columns), by PTX's figures."""
    per_register = max(1, 32 // ELEMENT_BITS[kind])
    warps = registers[0].size // 32
    matrix = np.full((warps, rows, columns), np.nan)
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4
    for j, register in enumerate(registers):
        for i in range(per_register):
            values = element(kind, register, i).reshape(warps, 32)
            if which == "A":
                row = group + 8 * (j % (rows // 8))
                column = thread * per_register + i + 4 * per_register * (j // (rows // 8))
            elif which == "B":
                row = thread * per_register + i + 4 * per_register * j
                column = group
            elif per_register == 2:  # C of .f16: both columns of a row in one register
                row, column = group + 8 * j, 2 * thread + i
            else:
                row, column = group + 8 * (j // 2), 2 * thread + j % 2
            matrix[:, row, column] = values
    return matrix


def shape_of(program: Program) -> MatrixShape:
    parts = program.name.split(".")
    m, rest = parts[3][1:].split("n")
    n, k = rest.split("k")
    types = [part for part in parts[6:] if part in ELEMENT_BITS]
    return MatrixShape(int(m), int(n), int(k), *types)
