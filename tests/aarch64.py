"""Tests the wheel for aarch64 with qemu-user on a Debian or Ubuntu of another processor:

    python -m tests.aarch64 FOLDER      # the folder holds the wheel; make test-aarch64

It has the files and kernels of the wheel that is installed here, every known GPU gets the same
plans, and the simulator's instructions and a call of every kernel give the same bits. A Python,
torch and what they need for aarch64 are fetched into build/aarch64 (190 MB, once; 1 GB unpacked) by
apt-get and pip, for which no root is needed.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "_build"))
from aarch64 import FOLDER, install_for_aarch64, need_programs  # noqa: E402

EMULATOR = "qemu-aarch64-static"
DEBIAN = ["python3-minimal", "libpython3-stdlib", "libstdc++6", "libgomp1"]
# The newest torch whose wheel for aarch64 needs no CUDA; and what it and pytest import.
PYPI = [
    "torch==2.10.0", "numpy", "pytest", "nanobind-backend>=1.0,<2", "filelock", "fsspec",
    "iniconfig", "jinja2", "markupsafe", "mpmath", "networkx", "packaging", "pluggy", "pygments",
    "setuptools", "sympy", "typing-extensions",
]  # fmt: skip
TESTS = ["tests/sim/test_same_bits.py", "tests/sim/test_instructions.py"]

WHAT_IS_THERE = """
import hashlib, pathlib, torch, archflash
from archflash import _archflash
folder = pathlib.Path(archflash.__file__).parent
for file in sorted(folder.rglob("*")):
    if file.suffix in (".py", ".pyi", ".json", ".lzma"):
        print(file.relative_to(folder), hashlib.sha256(file.read_bytes()).hexdigest())
for name in _archflash.image_names():
    for target in _archflash.targets(name):
        print(name, target.name, hashlib.sha256(_archflash.code_of(name, target.name)).hexdigest())
for device in (row.device.name for row in _archflash.known_devices()):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        for shape in ((2, 16, 4096, 128), (1, 8, 1, 64)):
            q = torch.empty(shape, dtype=dtype, device="meta")
            answer = archflash.explain(q, q, q, causal=True, device=device)
            print(answer, answer.plan and answer.plan.to_dict())
"""


def system(folder: Path) -> Path:
    """A folder with Python of this distribution, for aarch64."""
    root = folder / "root"
    if root.is_dir():
        return root
    print("== fetching a Python for aarch64 with apt-get (20 MB)", flush=True)
    apt = folder / "apt"
    shutil.rmtree(apt, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    own = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
        "Dir::State": apt / "state", "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache", "Debug::NoLocking": "1",
    }  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in own.items())]
    install = ["install", "-y", "--download-only", "--no-install-recommends", *DEBIAN]
    for step in (["update"], install):
        if subprocess.run([*command, *step], stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(
                "apt-get does not get packages for arm64 from the mirrors of /etc/apt. Debian's "
                "have them; run this on Debian, or in a container debian:12."
            )
    new = folder / "root.new"
    shutil.rmtree(new, ignore_errors=True)
    for package in sorted(apt.glob("cache/archives/*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, new], check=True)
    if not (new / "lib").exists():  # where packages know /usr/lib only
        (new / "lib").symlink_to("usr/lib")
    shutil.rmtree(apt)
    return new.rename(root)


def packages(folder: Path, python: str) -> Path:
    """A folder with torch and pytest for aarch64."""
    site = folder / "site"
    if not site.is_dir():
        print("== fetching torch for aarch64 (160 MB)", flush=True)
        new = folder / "site.new"
        install_for_aarch64(new, PYPI, python)
        new.rename(site)
    return site


def main() -> int:
    (wheel,) = Path(sys.argv[1]).glob("*_aarch64.whl")
    need_programs([EMULATOR, "dpkg-deb"], ["qemu-user-static", "dpkg"])
    folder = ROOT / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    root = system(folder)
    python = (root / "usr" / "bin" / "python3").readlink().name  # python3.11
    site = packages(folder, python.removeprefix("python"))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as installed:
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, installed], check=True)
        emulated = [EMULATOR, "-L", str(root), str(root / "usr" / "bin" / python)]
        environment = os.environ | {
            "PYTHONHOME": str(root / "usr"),
            "PYTHONPATH": os.pathsep.join([installed, str(site)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        here, there = (
            subprocess.run(
                [*command, "-c", WHAT_IS_THERE], env=variables, stdout=subprocess.PIPE, check=True
            ).stdout
            for command, variables in (([sys.executable], None), (emulated, environment))
        )
        if here != there:
            lines = difflib.unified_diff(*(x.decode().splitlines() for x in (here, there)))
            print("not the files, kernels and plans of this machine:", *lines, sep="\n")
            return 1
        print("the same files, kernels and plans as here", flush=True)
        pytest = [*emulated, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        status = subprocess.run(pytest, env=environment, cwd=ROOT).returncode
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
