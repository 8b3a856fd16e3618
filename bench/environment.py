"""What a result row says about where it was measured: commit, GPU, driver, versions, clock."""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"


def git_state(
    repository: Path = REPOSITORY,
    environ: Mapping[str, str] = os.environ,
    results: Path | None = None,
) -> tuple[str, str]:
    """The commit that is measured and whether files differ from it.

    Args:
        repository: folder of the checkout.
        environ: environment variables. A GPU machine may get the files without their history:
            ARCHFLASH_COMMIT and ARCHFLASH_DIRTY ("0" or "1") then say what git cannot.
        results: a file of results outside bench/results; it need not exist.

    Returns:
        The commit and "0" or "1"; "unknown" for what neither git nor the environment says.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(repository), *arguments],
                capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A copy that lies inside another repository must not report that repository's commit.
    top = git("rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == repository.resolve():
        commit = git("rev-parse", "--short=12", "HEAD")
        # Result files do not count as changes, because every run changes them.
        without = [":(exclude)bench/results"]
        if results is not None and results.resolve().is_relative_to(repository.resolve()):
            path = results.resolve().relative_to(repository.resolve())
            without.append(f":(exclude,literal){path.as_posix()}")
        changes = git("status", "--porcelain", "--", ".", *without)
        if commit and changes is not None:
            return commit, "1" if changes else "0"
    return environ.get("ARCHFLASH_COMMIT", UNKNOWN), environ.get("ARCHFLASH_DIRTY", UNKNOWN)


def gpu_slug(name: str) -> str:
    """File name of a GPU: "h100" for "NVIDIA H100 80GB HBM3", "rtx-5090" for a GeForce one."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    noise = re.compile(r"nvidia|geforce|tesla|graphics|device|\d+gb|hbm\d*e?|")
    return "-".join(word for word in words if not noise.fullmatch(word)) or "gpu"


def new_run_id(slug: str, now: datetime.datetime) -> str:
    """An identifier that sorts by time. Its random end keeps two runs in one second apart."""
    return f"{now:%Y%m%dT%H%M%SZ}-{slug}-{secrets.token_hex(2)}"


class Nvml:
    """Reads driver version, SM clock and energy through the driver's own library; it sets nothing.

    Args:
        uuid: "GPU-..." of the device to be read; None for the first one.
    """

    def __init__(self, uuid: str | None) -> None:
        self._device: ctypes.c_void_p | None = None
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        device = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != 0:
            return
        status = -1
        if uuid is not None:
            name = ctypes.c_char_p(uuid.encode())
            status = self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device))
        if status != 0:
            status = self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        if status == 0:
            self._device = device

    def sm_clock_mhz(self) -> int | None:
        """SM clock at this moment in MHz; None where it cannot be read."""
        if self._device is None:
            return None
        sm_clock_kind = 1  # NVML_CLOCK_SM
        value = ctypes.c_uint()
        status = self._library.nvmlDeviceGetClockInfo(
            self._device, sm_clock_kind, ctypes.byref(value)
        )
        return int(value.value) if status == 0 else None

    def energy_j(self) -> float | None:
        """Energy in joules that the GPU took since its driver was loaded; None where unknown."""
        if self._device is None:
            return None
        millijoules = ctypes.c_ulonglong()
        status = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._device, ctypes.byref(millijoules)
        )
        return millijoules.value / 1e3 if status == 0 else None

    def driver_version(self) -> str:
        """Driver version such as "580.159.04", or "unknown"."""
        if self._device is not None:
            text = ctypes.create_string_buffer(96)
            if self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
                return text.value.decode()
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return UNKNOWN
        lines = done.stdout.split()
        return lines[0] if done.returncode == 0 and lines else UNKNOWN


def why_no_gpu() -> str | None:
    """A sentence when nothing can be measured here, else None."""
    try:
        import torch
    except ImportError as error:
        return f"benchmarks need torch: {error}"
    if not torch.cuda.is_available():
        return "benchmarks need an NVIDIA GPU that torch can use, and torch.cuda finds none"
    return None


def why_no_archflash() -> str | None:
    """A sentence when the package is not installed in this Python, else None."""
    try:
        import archflash  # noqa: F401
    except ImportError as error:
        return f"benchmarks need archflash installed in this Python (pip install .): {error}"
    return None


def measures_nothing() -> bool:
    """Whether nothing can be measured here; says why."""
    problem = why_no_gpu() or why_no_archflash()
    if problem:
        print(problem, file=sys.stderr)
    return problem is not None


def run_facts(nvml: Nvml) -> dict[str, str]:
    """The columns that all rows of one run share.

    Args:
        nvml: reader of the driver version.

    Returns:
        run_id, date (UTC), commit, dirty, gpu, driver, cuda and torch.
    """
    import torch

    gpu = torch.cuda.get_device_name()
    now = datetime.datetime.now(datetime.timezone.utc)
    commit, dirty = git_state()
    return {
        "run_id": new_run_id(gpu_slug(gpu), now),
        "date": f"{now:%Y-%m-%d}",
        "commit": commit,
        "dirty": dirty,
        "gpu": gpu,
        "driver": nvml.driver_version(),
        "cuda": torch.version.cuda or UNKNOWN,
        "torch": torch.__version__,
    }


def open_nvml() -> Nvml:
    """An Nvml reader for torch's current device."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is None:
        return Nvml(None)
    text = str(uuid)
    return Nvml(text if text.startswith("GPU-") else f"GPU-{text}")
