"""The build backend: scikit-build-core, with a CUDA compiler from PyPI where the system has none.

nvcc >= 13.0 is looked for in CUDACXX, CUDAToolkit_ROOT, CUDA_HOME, CUDA_PATH, PATH and the default
CUDA folder. When none is found, the build asks PyPI for the CUDA 13.0 compiler packages and lays a
tree of links over them that CMake takes for an ordinary toolkit. ARCHFLASH_CUDA=wheel asks for the
packages even when the system has a compiler.

Kernels that need a newer assembler (NEWER_PTXAS in CMakeLists.txt) get the one from PyPI. pip puts
it into the build folder, because two releases of the CUDA packages cannot be installed together.
ARCHFLASH_PTXAS=toolkit uses the toolkit's assembler, and a path names another one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _skbuild
from scikit_build_core.build import *  # noqa: F403  (the hooks that need no compiler)

MINIMUM = (13, 0)
# The metapackage pins every component to one release; nvcc's own package leaves its companions
# unpinned.
CUDA_PACKAGES = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*"]
# Its machine code loads with driver 580, the floor, on an H200 (src/blackwell_consumer/NOTES.md).
PTXAS_PACKAGE = "nvidia-cuda-nvcc==13.5.37"
NEWER_PTXAS = (13, 4)
PTXAS_FOLDER = Path("build") / "ptxas"
LINK_TREE = (
    Path("build") / "cuda-toolkit"
)  # fixed, so that compiler caches see the same path every time


def _release(tool: Path) -> tuple[int, int]:
    """The release of nvcc or ptxas; (0, 0) if it cannot be run."""
    try:
        text = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_system_nvcc() -> Path | None:
    """The first nvcc of at least MINIMUM on this system, or None."""
    if os.environ.get("ARCHFLASH_CUDA") == "wheel":
        return None
    candidates: list[str | None] = [os.environ.get("CUDACXX")]
    for variable in ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        candidates.append(str(Path(root) / "bin" / "nvcc") if root else None)
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found and _release(Path(found)) >= MINIMUM:
            return Path(found)
    return None


def link_wheel_toolkit(wheel_root: Path, tree: Path) -> Path:
    """Lays `tree` over the CUDA wheels in `wheel_root` (site-packages/nvidia/cu13) and returns it.

    nvcc finds its companions relative to its own path, so `bin` is a real folder with a link per
    file; CMake wants lib64 and an unversioned libcudart.so, which the wheels lack.
    """
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "bin").mkdir(parents=True)
    (tree / "lib").mkdir()
    for file in (wheel_root / "bin").iterdir():
        (tree / "bin" / file.name).symlink_to(file)
    for file in (wheel_root / "lib").iterdir():
        (tree / "lib" / file.name).symlink_to(file)
    if not (tree / "lib" / "libcudart.so").exists():
        runtime = sorted((wheel_root / "lib").glob("libcudart.so.*"))
        if runtime:
            (tree / "lib" / "libcudart.so").symlink_to(runtime[-1])
    for folder in ("include", "nvvm"):
        (tree / folder).symlink_to(wheel_root / folder)
    (tree / "lib64").symlink_to("lib")
    return tree


def toolkit_root(nvcc: Path) -> Path:
    """The toolkit that `nvcc` belongs to. nvcc itself is asked, because the file may be a wrapper
    script.
    """
    command = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.+)$", text, flags=re.MULTILINE)
    return Path(match[1]).resolve() if match else nvcc.resolve().parent.parent


def newer_ptxas(toolkit: Path) -> Path:
    """The assembler for kernels that need a newer one than CUDA 13.0's.

    Args:
        toolkit: folder of the CUDA toolkit in use.

    Returns:
        What ARCHFLASH_PTXAS names; else the toolkit's if that is new enough; else PyPI's. If that
        cannot be downloaded, the toolkit's, with a message.

    Raises:
        RuntimeError: ARCHFLASH_PTXAS names no ptxas of at least MINIMUM.
    """
    own = toolkit / "bin" / "ptxas"
    wanted = os.environ.get("ARCHFLASH_PTXAS")
    if wanted == "toolkit":
        return own
    if wanted:
        if _release(Path(wanted)) < MINIMUM:
            needed = ".".join(map(str, MINIMUM))
            raise RuntimeError(
                f"ARCHFLASH_PTXAS={wanted} is no ptxas >= {needed}: name one, or 'toolkit' for "
                "that of the CUDA toolkit in use."
            )
        return Path(wanted)
    if _release(own) >= NEWER_PTXAS:
        return own
    ptxas = PTXAS_FOLDER.absolute() / "nvidia" / "cu13" / "bin" / "ptxas"
    if _release(ptxas) < NEWER_PTXAS:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "1"]
        command += ["--target", str(PTXAS_FOLDER.absolute()), PTXAS_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if _release(ptxas) < NEWER_PTXAS:
            said = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            print(
                f"archflash: {PTXAS_PACKAGE} could not be had ({said}): {own} assembles kernels "
                "for 12.x, whose main loops have up to a fifth more instructions then.",
                file=sys.stderr,
            )
            return own
    return ptxas


def _use_compiler() -> None:
    if _has_kernels():
        return
    nvcc = find_system_nvcc()
    if nvcc:
        root = toolkit_root(nvcc)
    else:
        roots = [Path(entry) / "nvidia" / "cu13" for entry in sys.path]
        wheels = next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)
        if wheels is None:
            needed = ".".join(map(str, MINIMUM))
            raise RuntimeError(
                f"archflash needs nvcc >= {needed} to build. None was found on this system, and "
                f"the packages {CUDA_PACKAGES} are not installed: build with pip's build "
                f"isolation, or install CUDA {needed}."
            )
        root = link_wheel_toolkit(wheels, LINK_TREE.absolute())
    os.environ["CUDAToolkit_ROOT"] = str(root)  # noqa: SIM112  (CMake's spelling)
    os.environ["ARCHFLASH_PTXAS"] = str(newer_ptxas(root))


def _has_kernels() -> bool:
    """Whether kernels come from a finished build (aarch64.py), so that none are compiled."""
    return bool(os.environ.get("ARCHFLASH_KERNELS_OF"))


def _with_compiler(requires: list[str]) -> list[str]:
    return requires if _has_kernels() or find_system_nvcc() else [*requires, *CUDA_PACKAGES]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_compiler(_skbuild.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_compiler(_skbuild.get_requires_for_build_editable(config_settings))


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _use_compiler()
    return _skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _use_compiler()
    return _skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
