"""The device of a call: a GPU as the driver describes it, or the one that is simulated."""

from __future__ import annotations

import os
from functools import cache

from archflash import _archflash as _native
from archflash import _user_tables
from archflash._errors import ForcedImplementationError

MINIMUM_DRIVER = 580  # the driver that CUDA 13.0 needs, whose runtime is in the wheel
_SIM_DEVICE_VARIABLE = "ARCHFLASH_SIM_DEVICE"


@cache
def driver_problem() -> str | None:
    """Why CUDA cannot be used here, as a sentence that says what to do; None if it can be used."""
    status = _native.driver_status()
    if status.usable:
        return None
    if "too old" in status.problem:
        version = _user_tables.driver_version()
        return f"driver {version} is older than {MINIMUM_DRIVER}: update it"
    return str(status.problem)


@cache
def query_device(index: int) -> _native.Device:
    """The CUDA device with this index, as the driver describes it. The driver is asked only once.

    Raises:
        ValueError: there is no such device.
    """
    count = _native.driver_status().device_count
    if not 0 <= index < count:
        raise ValueError(f"there is no device cuda:{index} here: cuda:0 to cuda:{count - 1} are")
    return _native.query_device(index)


def device_of(problem: _native.Problem, index: int) -> tuple[_native.Device | None, str | None]:
    """The device of a problem's tensors (None for the CPU), and the reason why no kernel can run
    there, if there is one.
    """
    if not problem.on_cuda:
        return None, None
    obstacle = driver_problem()
    return (query_device(index), None) if obstacle is None else (_unasked_device(), obstacle)


def _unasked_device() -> _native.Device:
    """A device that stands for a GPU which archflash's CUDA runtime cannot describe."""
    unknown = (
        "major",
        "minor",
        "sm_count",
        "shared_per_block",
        "shared_per_sm",
        "l2_bytes",
        "registers_per_sm",
        "threads_per_sm",
    )
    return _native.Device.from_dict({"name": "an NVIDIA GPU", **dict.fromkeys(unknown, 0)})


def simulated_device(name: str) -> _native.Device:
    """The GPU that the simulator stands for: the one that ARCHFLASH_SIM_DEVICE names, otherwise the
    home device of the implementation.

    Raises:
        ForcedImplementationError: ARCHFLASH_SIM_DEVICE names no GPU of the table.
    """
    asked = os.environ.get(_SIM_DEVICE_VARIABLE)
    known = _native.find_known_device(asked or _native.describe(name).home_device)
    if known is None:
        names = ", ".join(row.device.name for row in _native.known_devices())
        raise ForcedImplementationError(
            f"{_SIM_DEVICE_VARIABLE}={asked} is no GPU in the table of known ones: {names}"
        )
    return known.device
