"""Builds the wheel for aarch64 on another Linux, from the kernels of this machine's finished build:

    PYTHONPATH=TOOLS python _build/aarch64.py FOLDER     # make wheel-aarch64

TOOLS is a folder that install_tools.py made. The wheel's own code is compiled anew; kernels and
types are the same for every processor. It needs a cross compiler, which it installs with apt-get
where it may, and fetches CUDA's runtime library for aarch64 from PyPI (2 MB).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = "aarch64-linux-gnu-g++"
PACKAGES = ["g++-aarch64-linux-gnu", "libc6-dev-arm64-cross"]  # Debian's and Ubuntu's
CUDA_PACKAGES = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*"]
PLATFORMS = ["manylinux_2_28_aarch64", "manylinux2014_aarch64"]
FOLDER = Path("build") / "aarch64"
TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_ASM_COMPILER aarch64-linux-gnu-gcc)
"""


def need_programs(programs: list[str], packages: list[str]) -> None:
    """Installs Debian packages if programs are missing; stops and names them where it cannot."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        print(f"== installing {' '.join(packages)}", flush=True)
        subprocess.run(["apt-get", "-qq", "update"])
        command = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages]
        subprocess.run(command, stdout=subprocess.DEVNULL)
        missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        sys.exit(
            f"{', '.join(missing)} not found. Install the packages {' '.join(packages)} (Debian, "
            "Ubuntu), or those of your distribution with these programs, and run this again."
        )


def install_for_aarch64(folder: Path, packages: list[str], python: str) -> None:
    """Lays PyPI's wheels for aarch64 into a new folder. Their dependencies are to be named, too."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for name in PLATFORMS:
        command += ["--platform", name]
    subprocess.run([*command, *packages], check=True)


def main() -> None:
    builds = sorted(Path("build").glob(f"cp310-abi3-*linux*_{platform.machine()}"))
    if len(sys.argv) != 2 or not builds:
        sys.exit(
            "usage: python _build/aarch64.py FOLDER, after a build of this machine's wheel "
            f"(build/cp310-abi3-linux_{platform.machine()}): make wheel-aarch64 does both"
        )
    need_programs([COMPILER], PACKAGES)
    FOLDER.mkdir(parents=True, exist_ok=True)
    toolchain = FOLDER / "toolchain.cmake"
    toolchain.write_text(TOOLCHAIN)
    cuda = FOLDER / "cuda"
    install_for_aarch64(cuda, CUDA_PACKAGES, "3.10")
    environment = os.environ | {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain.absolute()),
        "CUDAToolkit_ROOT": str((cuda / "nvidia" / "cu13").absolute()),
        "ARCHFLASH_KERNELS_OF": str(builds[-1].absolute()),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",  # names the wheel
    }
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", sys.argv[1], "."], env=environment, check=True)
    for wheel in Path(sys.argv[1]).glob("*_aarch64.whl"):
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
