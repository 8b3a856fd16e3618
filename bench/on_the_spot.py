"""Kernels that are not in the wheel: nvcc compiles them when needed, and the driver runs them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).resolve().parents[1] / "src"
COMPILER_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Werror", "all-warnings"]
PARAMETER_ALIGN = 64  # bytes; a tensor map needs it, and no other member needs more
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DEFAULT_SHARED = 48 * 1024  # bytes of shared memory that a kernel may have without asking


def find_nvcc() -> str | None:
    """A CUDA compiler of this system, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@cache
def compiled(
    source: Path, nvcc: str, kind: str, architecture: str, definitions: tuple[str, ...] = ()
) -> bytes:
    """Compiles a source file with nvcc.

    Args:
        source: the .cu file.
        nvcc: the compiler.
        kind: "ptx" or "cubin".
        architecture: "compute_90", "sm_120", "sm_100f", ...
        definitions: macros, "NAME=text".

    Returns:
        The bytes of the PTX or cubin file.

    Raises:
        RuntimeError: it does not compile; the message is nvcc's.
    """
    # nvcc reads a comma as the end of one macro and the beginning of the next.
    macros = ["-D" + text.replace(",", "\\,") for text in definitions]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{source.stem}.{kind}"
        done = subprocess.run(
            [
                nvcc, *COMPILER_FLAGS, f"-arch={architecture}", f"-{kind}", "-I", str(SOURCES),
                *macros, "-o", str(out), str(source),
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode != 0:
            said = " ".join([source.stem, *definitions])
            raise RuntimeError(f"{said}: {done.stdout}{done.stderr}")
        return out.read_bytes()


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value of three integers."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Kernel:
    """A kernel of a cubin on torch's current GPU.

    Args:
        image: the cubin.
        name: the kernel's.

    Raises:
        RuntimeError: the driver refuses it.
    """

    def __init__(self, image: bytes, name: str) -> None:
        import torch

        torch.cuda.current_stream().synchronize()  # makes sure that the CUDA context exists
        self._name = name
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._ask("cuModuleLoadData", ctypes.byref(module), image)
        self._function = ctypes.c_void_p()
        self._ask("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        self._shared_limit = DEFAULT_SHARED

    def _ask(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._driver, function)(*arguments):
            raise RuntimeError(f"{self._name}: {function} gave CUresult {status}")

    def launch(self, row: Mapping[str, Any], parameters: bytes) -> None:
        """Launches on torch's current stream.

        Args:
            row: a launch of a plan as a dict: its grid, block, cluster and shared memory are used.
            parameters: the parameter block, with addresses and tensor maps.

        Raises:
            RuntimeError: the driver refuses it.
        """
        import torch

        if row["shared_bytes"] > self._shared_limit:
            self._ask("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, row["shared_bytes"])
            self._shared_limit = row["shared_bytes"]
        cluster = _LaunchAttribute(id=CLUSTER_DIMENSION)
        cluster.value[:3] = row["cluster"]
        config = _LaunchConfig(
            grid=tuple(row["grid"]),
            block=tuple(row["block"]),
            shared_bytes=row["shared_bytes"],
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=ctypes.pointer(cluster),
            attribute_count=int(max(row["cluster"]) > 1),
        )
        # The driver copies the parameters from here, and needs their alignment.
        store = ctypes.create_string_buffer(len(parameters) + PARAMETER_ALIGN)
        start = -(-ctypes.addressof(store) // PARAMETER_ALIGN) * PARAMETER_ALIGN
        ctypes.memmove(start, parameters, len(parameters))
        block = (ctypes.c_void_p * 1)(start)
        self._ask("cuLaunchKernelEx", ctypes.byref(config), self._function, block, None)


def run_plan(
    plan: Any, kernels: Sequence[Kernel | None], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Launches a plan on torch's current stream, some of its kernels compiled on the spot.

    Args:
        plan: an `archflash._archflash.LaunchPlan`.
        kernels: one for each launch; None for a launch that runs the wheel's kernel.
        tensors: CUDA tensors by operand name.

    Raises:
        RuntimeError: the driver refuses a launch.
    """
    from archflash import _archflash as native

    fields = plan.to_dict()
    addresses = [(name, x.data_ptr()) for name, x in tensors.items()]
    for index, (row, kernel) in enumerate(zip(fields["launches"], kernels, strict=True)):
        if kernel is None:
            native.launch(
                native.LaunchPlan.unchecked_from_dict({**fields, "launches": [row]}), dict(tensors)
            )
        else:
            kernel.launch(row, native.bound_parameters(plan, index, addresses))
