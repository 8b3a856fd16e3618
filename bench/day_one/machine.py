"""The machine of a day: what it is, and why a day cannot begin on it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable

from bench import environment, on_the_spot, timing
from bench.day_one.setup import Job, WrongError

NVCC_VERSION = (13, 0)  # the first compiler that knows the family of 11.0


def describe_environment(implementation: str, simulate: bool) -> dict[str, str]:
    """Describes the machine for the run's file.

    Args:
        implementation: the implementation that is examined.
        simulate: whether to do without a GPU.

    Returns:
        Words by name: the columns of bench/results that rows of a run share, and more.

    Raises:
        WrongError: the day cannot begin here; the message says what is missing.
    """
    if problem := environment.why_no_archflash():
        raise WrongError(problem)
    import torch

    import archflash

    found = {item.name: item for item in archflash.implementations() if item.name != "torch"}
    if implementation not in found:
        raise WrongError(f"--implementation {implementation}: there are {', '.join(found)}")
    ranges = [
        f"{first} and newer" if last is None else f"{first} to {last}"
        for first, last, _ in found[implementation].capabilities
    ]
    needed = ", ".join(dict.fromkeys(ranges))
    needs = f"{implementation} needs a GPU of compute capability {needed}"
    if not found[implementation].compiled:
        raise WrongError(f"{implementation} is not compiled in this build of archflash")
    facts = {
        "implementation": implementation,
        "simulated": str(int(simulate)),
        "dtypes": " ".join(found[implementation].dtypes),
        "python": platform.python_version(),
        "archflash": archflash.__version__,
        "nvcc": _version_of(on_the_spot.find_nvcc()),
    }
    for package in ("triton", "flash-attn-3", "fa3-fwd", "flash-attn-4", "pytest"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "none"
    if simulate:
        return facts | simulated_facts()
    if problem := environment.why_no_gpu():
        raise WrongError(f"{needs}: {problem}. --simulate goes the same way on the simulator")
    capability = torch.cuda.get_device_capability()
    if not _serves(found[implementation].capabilities, capability):
        raise WrongError(
            f"{needs}: this is {torch.cuda.get_device_name()} ({capability[0]}.{capability[1]}). "
            "--simulate goes the same way on the simulator, --implementation names another kernel"
        )
    from archflash.verify import _times

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    nvml = timing.open_nvml()
    return (
        facts
        | environment.run_facts(nvml)
        | {
            "capability": f"{capability[0]}.{capability[1]}",
            "sms": str(properties.multi_processor_count),
            "l2_bytes": str(properties.L2_cache_size),
            "memory_bytes": str(properties.total_memory),
            "clock_mhz": str(nvml.sm_clock_mhz()),
            "power_limit_w": str(
                _times.gpu_state(torch.cuda.current_device()).get("power_limit_w")
            ),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    )


def _serves(
    capabilities: tuple[tuple[str, str | None, str], ...], capability: tuple[int, int]
) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    return any(
        numbers(first) <= capability and (last is None or capability <= numbers(last))
        for first, last, _ in capabilities
    )


def why_no_nvcc(jobs: Iterable[Job]) -> str:
    """Why some of the jobs cannot be done by this machine's compiler, and what to do; "" if all can
    be.
    """
    need = [job for job in jobs if job.needs_nvcc]
    nvcc = on_the_spot.find_nvcc()
    version = re.search(r"cuda_(\d+)\.(\d+)", _version_of(nvcc))
    if not need or (version and (int(version[1]), int(version[2])) >= NVCC_VERSION):
        return ""
    found = "is not found" if nvcc is None else f"of {nvcc} is older ({_version_of(nvcc)})"
    return (
        f"{len(need)} jobs compile switches in their other states, and nvcc "
        f"{'.'.join(map(str, NVCC_VERSION))} or newer {found}: install it (or put it first in "
        "PATH), or leave these jobs out by --only '^(?!switches|walks)'"
    )


def _version_of(nvcc: str | None) -> str:
    if nvcc is None:
        return "none"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else environment.UNKNOWN


def simulated_facts() -> dict[str, str]:
    """The columns that the rows of a simulated run share."""
    import datetime

    import torch

    now = datetime.datetime.now(datetime.timezone.utc)
    commit, dirty = environment.git_state()
    return {
        "run_id": environment.new_run_id("simulated", now), "date": f"{now:%Y-%m-%d}",
        "commit": commit, "dirty": dirty, "gpu": "simulated", "driver": "none", "cuda": "none",
        "torch": torch.__version__,
    }  # fmt: skip
