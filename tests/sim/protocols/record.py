"""Runs the cases on this machine's GPU, writes what came out, and compares it with the simulator:
``python3 -m tests.sim.protocols.record --output FOLDER``. Needs a GPU of capability 9.0.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from archflash import sim

from .cases import Case, cases
from .replay import raw_bytes, simulate

TYPES = {  # CUtensorMapDataType
    torch.uint8: 0, torch.int16: 1, torch.int32: 3, torch.float16: 6, torch.float32: 7,
    torch.bfloat16: 9,
}  # fmt: skip
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """Calls functions of the CUDA driver. A call that fails raises RuntimeError."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code != 0:
            message = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(message))
            raise RuntimeError(f"{function}: {message.value!r}")


def encode(driver: Driver, map_: sim.TensorMap, tensor: Tensor) -> bytes:
    """Encodes a tensor map with the driver's own function."""
    raw = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(raw) + 63) // 64 * 64
    dims = list(map_.dims or reversed(tensor.shape))
    rank = len(dims)
    strides = [step * tensor.element_size() for step in reversed(tensor.stride()[:-1])]
    steps = list(map_.element_steps or [1] * rank)
    driver.call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at),
        TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * rank)(*strides, 0),
        (ctypes.c_uint32 * rank)(*map_.box),
        (ctypes.c_uint32 * rank)(*steps),
        0,
        (0, 32, 64, 128).index(map_.swizzle),
        0,
        1 if map_.nan_fill else 0,
    )
    return ctypes.string_at(at, 128)


def run(driver: Driver, case: Case) -> bytes:
    """Runs a case on the GPU and returns the bytes of its output."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), case.text.encode())
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"test")
    driver.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, case.shared_bytes)
    tensors: list[Tensor] = []
    values: list[object] = []
    for argument in case.arguments():
        if isinstance(argument, bytes):
            tensors.append(torch.empty(0))
            values.append(ctypes.create_string_buffer(argument, len(argument)))
            continue
        tensor = argument.tensor if isinstance(argument, sim.TensorMap) else argument
        moved = on_gpu(tensor)
        tensors.append(moved)
        if isinstance(argument, sim.TensorMap):
            map_bytes = encode(driver, argument, moved)
            values.append(ctypes.create_string_buffer(map_bytes, len(map_bytes)))
        else:
            values.append(ctypes.c_uint64(moved.data_ptr()))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))  # type: ignore[arg-type]
    driver.call(
        "cuLaunchKernel", function, case.grid, 1, 1, case.block, 1, 1, case.shared_bytes, None,
        pointers, None,
    )  # fmt: skip
    torch.cuda.synchronize()
    output = tensors[case.output].cpu()
    driver.call("cuModuleUnload", module)
    return raw_bytes(output)


def on_gpu(tensor: Tensor) -> Tensor:
    """Copies a tensor to the GPU with its strides."""
    storage = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda")
    source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.copy_(source)
    empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return empty.set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")
    driver = Driver()
    results, keys, different, failed = {}, {}, [], []
    for case in cases():
        try:
            results[case.name] = np.frombuffer(run(driver, case), dtype=np.uint8)
        except RuntimeError as error:
            failed.append(f"{case.name}: {error}")
            break  # after an error the CUDA context runs nothing more
        keys[case.name] = case.key
        if results[case.name].tobytes() != simulate(case):
            different.append(case.name)
    np.savez_compressed(folder / "h200.npz", **results)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cuda": torch.version.cuda,
        "keys": keys,
    }
    (folder / "h200.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{len(results)} cases; different on the simulator: {different}; failed: {failed}")


if __name__ == "__main__":
    main()
