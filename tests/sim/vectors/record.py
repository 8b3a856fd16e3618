"""Records the silicon vectors on this machine's GPU: ``python3 -m tests.sim.vectors.record``.

Needs NumPy and the CUDA driver, nothing else. Writes into ``--output``:

* ``<gpu>.npz``: the first elements of every program's outputs, to be committed;
* ``<gpu>.json``: the GPU, the driver, the date and, per program, a hash of its text, of its inputs
  and of all of its outputs, to be committed;
* ``full-<gpu>.npz``: more of every output, for finding out where a difference comes from;
* ``table-<gpu>-<function>.npz``: an approximate function over whole binades, as differences from
  the correctly rounded result.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .. import json_rows
from .inputs import Words
from .programs import BLOCK, FAMILIES, Program, programs

FULL_ELEMENTS = 2048
HASH_DIGITS = 16
NAMES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Gpu:
    """The first GPU of this machine, through the CUDA driver."""

    def __init__(self) -> None:
        """Raises RuntimeError if there is no driver or no GPU."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no CUDA driver: {error}") from error
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, device)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.name = name.value.decode()
        self.cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code != 0:
            message = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(message))
            text = message.value.decode() if message.value else "unknown error"
            raise RuntimeError(f"{function}: error {code}, {text}")

    def run(self, program: Program, values: list[Words]) -> list[npt.NDArray[np.generic]]:
        """Runs a program over input buffers; returns its output buffers as raw bits."""
        log = ctypes.create_string_buffer(8192)
        # CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
        options = (ctypes.c_int * 2)(5, 6)
        option_values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = ctypes.c_void_p()
        try:
            text = program.ptx().encode()
            self._call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, option_values)
        except RuntimeError as error:
            words = log.value.decode(errors="replace")
            raise RuntimeError(f"{program.family}/{program.name}: {error}\n{words}") from error
        kernel = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, b"vector")
        count = values[0].size
        buffers: list[ctypes.c_uint64] = []
        for operand, value in zip(program.reads, values, strict=True):
            raw = np.ascontiguousarray(value.astype(NAMES[operand.bits]))
            buffers.append(self._allocate(raw.nbytes))
            self._call("cuMemcpyHtoD_v2", buffers[-1], _pointer(raw), ctypes.c_size_t(raw.nbytes))
        outputs = [np.zeros(count, dtype=NAMES[operand.bits]) for operand in program.writes]
        for output in outputs:
            buffers.append(self._allocate(output.nbytes))
        parameters = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        grid = (count // BLOCK, 1, 1, BLOCK, 1, 1)
        self._call("cuLaunchKernel", kernel, *grid, 0, None, parameters, None)
        self._call("cuCtxSynchronize")
        for output, buffer in zip(outputs, buffers[len(values) :], strict=True):
            size = ctypes.c_size_t(output.nbytes)
            self._call("cuMemcpyDtoH_v2", _pointer(output), buffer, size)
        for buffer in buffers:
            self._call("cuMemFree_v2", buffer)
        self._call("cuModuleUnload", module)
        return list(outputs)

    def _allocate(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def outputs_hash(outputs: list[npt.NDArray[np.generic]]) -> str:
    """A hash of whole output buffers, each as little-endian bytes of its own width."""
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(np.ascontiguousarray(output).tobytes())
    return digest.hexdigest()[:HASH_DIGITS]


def text_hash(program: Program) -> str:
    """A hash of a program's PTX."""
    return hashlib.sha256(program.ptx().encode()).hexdigest()[:HASH_DIGITS]


def inputs_hash(program: Program, values: list[Words]) -> str:
    """A hash of a program's inputs: data recorded from other inputs must not be compared."""
    return outputs_hash(
        [
            value.astype(NAMES[operand.bits])
            for value, operand in zip(values, program.reads, strict=True)
        ]
    )


def _driver_version() -> str:
    """The version of the kernel driver, from its management library; empty where there is none."""
    version = ctypes.create_string_buffer(96)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(version, len(version)):
        return ""
    return version.value.decode()


# ---- Whole binades of the approximate functions -------------------------------------------------

Reference = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]

BINADE = 1 << 23
# instruction, the correctly rounded function, [(first input's bits, step in bits, count)]
TABLES: list[tuple[str, Reference, list[tuple[int, int, int]]]] = [
    (
        "ex2.approx.ftz.f32",
        np.exp2,
        [
            (0x3F800000, 1, BINADE),  # [1, 2): every fraction of 23 bits
            (0x3F000000, 1, BINADE),  # [1/2, 1): one bit more
            (0xBF800000, 1, BINADE),  # (-2, -1]
            (0xBF000000, 1, BINADE),  # (-1, -1/2]
            (0x3E800000, 16, BINADE // 16),
            (0xBE800000, 16, BINADE // 16),
            (0x3D000000, 64, BINADE // 64),
            (0x3A000000, 64, BINADE // 64),
            (0x40000000, 16, BINADE // 16),
            (0x42800000, 64, BINADE // 64),
            (0xC2F80000, 64, BINADE // 64),
        ],
    ),
    ("rcp.approx.ftz.f32", np.reciprocal, [(0x3F800000, 1, BINADE)]),
    ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x), [(0x3F800000, 1, 2 * BINADE)]),
    (
        "lg2.approx.ftz.f32",
        np.log2,
        [(0x3F800000, 1, BINADE), (0x3F000000, 4, BINADE // 4), (0x40000000, 16, BINADE // 16)],
    ),
    ("tanh.approx.f32", np.tanh, [(0x3C000000, 256, 6 * BINADE // 256)]),
]


def _elementwise(instruction: str, bits: Words) -> tuple[Program, list[Words]]:
    (program,) = (p for p in programs("approx") if p.name == instruction)
    return program, [bits]


def record_tables(gpu: Gpu, output: Path, label: str) -> None:
    """Writes differences, in units of the float's bits, from the correctly rounded results."""
    for instruction, function, ranges in TABLES:
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for start, step, count in ranges:
            bits = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(step)
            result = gpu.run(*_elementwise(instruction, bits))[0].astype(np.int64)
            value = bits.astype(np.uint32).view(np.float32).astype(np.float64)
            exact = function(value).astype(np.float32).view(np.uint32).astype(np.int64)
            difference = result - exact
            largest = int(np.abs(difference).max())
            kind = np.int8 if largest < 1 << 7 else np.int16 if largest < 1 << 15 else np.int64
            arrays[f"{instruction} {start:#010x} {step} {count}"] = difference.astype(kind)
            print(f"{instruction} from {start:#010x} step {step}: {count}, at most {largest}")
        name = instruction.split(".")[0]
        _save(output / f"table-{label}-{name}.npz", arrays)


def record_programs(gpu: Gpu, output: Path, label: str, families: list[str]) -> int:
    """Runs every program; returns how many failed. Failures are printed and left out."""
    explicit: dict[str, npt.NDArray[np.generic]] = {}
    full: dict[str, npt.NDArray[np.generic]] = {}
    entries: dict[str, str] = {}
    failed = 0
    for family in families:
        started = time.perf_counter()
        group = programs(family)
        for program in group:
            key = program.key
            values = [program.input(index) for index in range(len(program.reads))]
            try:
                outputs = gpu.run(program, values)
                again = gpu.run(program, values)
            except RuntimeError as error:
                print(f"FAILED {error}", file=sys.stderr)
                failed += 1
                continue
            if outputs_hash(outputs) != outputs_hash(again):
                print(f"FAILED {key}: two runs differ", file=sys.stderr)
                failed += 1
                continue
            for index, result in enumerate(outputs):
                explicit[f"{key}/{index}"] = result[: program.explicit]
                full[f"{key}/{index}"] = result[:FULL_ELEMENTS]
            hashes = (text_hash(program), inputs_hash(program, values), outputs_hash(outputs))
            entries[key] = " ".join(hashes)
        print(f"{family}: {len(group)} programs, {time.perf_counter() - started:.1f} s", flush=True)
    # One array per width, in the order of `entries`: many small ones compress badly.
    _save(output / f"{label}.npz", _by_width(explicit))
    _save(output / f"full-{label}.npz", _by_width(full))
    about = {
        "gpu": gpu.name,
        "cuda": gpu.cuda,
        "driver": _driver_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "programs": entries,
    }
    (output / f"{label}.json").write_text(json_rows.dump(about))
    return failed


def _save(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    np.savez_compressed(path, **cast(dict[str, Any], arrays))


def _by_width(arrays: dict[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
    """Outputs of one width in one array, in the order of their programs."""
    widths = sorted({array.dtype.itemsize for array in arrays.values()})
    return {
        f"u{8 * width}": np.concatenate(
            [array for array in arrays.values() if array.dtype.itemsize == width]
        )
        for width in widths
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="only these")
    parser.add_argument("--no-tables", action="store_true", help="leave out the whole binades")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    gpu = Gpu()
    label = gpu.name.replace("NVIDIA ", "").split()[0].lower()
    print(f"{gpu.name}, CUDA {gpu.cuda}, driver {_driver_version()}", flush=True)
    failed = record_programs(gpu, options.output, label, options.family or list(FAMILIES))
    if not options.no_tables:
        record_tables(gpu, options.output, label)
    print(f"{failed} programs failed" if failed else "all programs ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
