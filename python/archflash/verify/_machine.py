"""What torch says of a GPU: `python -m archflash.verify._machine INDEX` prints it as JSON.

It is asked in a process of its own, which ends: a context on the GPU takes memory, and in the
compute mode "exclusive process" keeps all others out.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import torch

LIMIT_S = 180
ALONE = "exclusive process"  # of the compute modes
_MODES = {0: "default", 2: "prohibited", 3: ALONE}
_ATTRIBUTE_COMPUTE_MODE = 20  # of cuda.h


def compute_mode(index: int) -> str:
    """The compute mode of a CUDA device, "unknown" where the driver does not say."""
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    device = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDeviceGetAttribute(ctypes.byref(mode), _ATTRIBUTE_COMPUTE_MODE, device)
    return _MODES.get(mode.value, "unknown")


def describe(index: int) -> dict[str, str]:
    """Facts of a CUDA device, by name."""
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "free_bytes": str(free), "memory_bytes": str(total), "cudnn": str(cudnn),
        "sms": str(properties.multi_processor_count), "l2_bytes": str(properties.L2_cache_size),
        "compute_mode": compute_mode(index),
    }  # fmt: skip


def ask(index: int) -> dict[str, str]:
    """`describe` of another process.

    Raises:
        ValueError: torch cannot use the GPU; the message is what it says.
    """
    command = [sys.executable, "-m", "archflash.verify._machine", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"torch does not open cuda:{index} within {LIMIT_S} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(
            f"torch {torch.__version__} cannot use cuda:{index} (install one with CUDA for it): "
            f"{said}"
        )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(describe(int(sys.argv[1]))))
