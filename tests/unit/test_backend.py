"""The build backend finds a compiler or asks for one; the parsers of the kernel build."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BUILD_FOLDER = Path(__file__).parents[2] / "_build"
CUDA_PACKAGES = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*"]
TOOLKIT_VARIABLE = "CUDAToolkit_ROOT"
PTXAS_VARIABLE = "ARCHFLASH_PTXAS"
COMPILER_VARIABLES = (
    "CUDACXX", TOOLKIT_VARIABLE, "CUDA_HOME", "CUDA_PATH", "ARCHFLASH_CUDA", PTXAS_VARIABLE,
)  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BUILD_FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeSkbuild(ModuleType):
    """Stands for scikit_build_core.build, which build environments have: records its calls."""

    __all__ = ()

    def __init__(self) -> None:
        super().__init__("scikit_build_core.build")
        self.calls: list[tuple[Any, ...]] = []
        self.toolkit: str | None = None
        self.build_wheel = partial(self.build, "wheel")
        self.build_editable = partial(self.build, "editable")

    def get_requires_for_build_wheel(self, config: object = None) -> list[str]:
        return ["ninja>=1.5"]

    def get_requires_for_build_editable(self, config: object = None) -> list[str]:
        return ["ninja>=1.5", "editable"]

    def build(self, kind: str, *arguments: object) -> str:
        self.calls.append((kind, *arguments))
        self.toolkit = os.environ.get(TOOLKIT_VARIABLE)
        return f"archflash-{kind}.whl"


@pytest.fixture
def skbuild(monkeypatch: pytest.MonkeyPatch) -> FakeSkbuild:
    package, build = ModuleType("scikit_build_core"), FakeSkbuild()
    package.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    return build


@pytest.fixture
def backend(skbuild: FakeSkbuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The backend on a system without CUDA, in an empty folder."""
    for variable in COMPILER_VARIABLES:
        monkeypatch.setenv(variable, "")  # what the backend itself sets is undone after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv(PTXAS_VARIABLE, "toolkit")  # no download from PyPI
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.chdir(tmp_path)
    module = load("archflash_backend")
    # The test must not find this machine's own CUDA in its default folder.
    real = module.shutil.which
    monkeypatch.setattr(
        module.shutil,
        "which",
        lambda name: None if str(name).startswith("/usr/local/cuda") else real(name),
    )
    return module


def make_nvcc(folder: Path, version: str, top: Path | None = None, *, name: str = "nvcc") -> Path:
    """Writes a script that prints what nvcc (or ptxas) of a version prints."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / name
    lines = ["#!/bin/sh"]
    if top:
        lines.append(f'case "$1" in --dryrun) echo "#\\$ TOP={top}" >&2; exit 0;; esac')
    lines.append(f'echo "nvcc: NVIDIA (R) Cuda compiler driver, release {version}, V{version}.88"')
    nvcc.write_text("\n".join(lines) + "\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


# --- finding a compiler ---


def test_compilers_from_13_0_on_are_tried_in_the_documented_order(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {
        "CUDACXX": "14.1", "CUDAToolkit_ROOT": "12.9", "CUDA_HOME": "13.0", "CUDA_PATH": "9.2",
        "PATH": "13.1",
    }  # fmt: skip
    found = {}
    for variable, version in versions.items():
        found[variable] = make_nvcc(tmp_path / variable / "bin", version)
        folder = {"CUDACXX": found[variable], "PATH": found[variable].parent}
        monkeypatch.setenv(variable, str(folder.get(variable, tmp_path / variable)))
    tried = [backend.find_system_nvcc()]
    for variable in versions:
        monkeypatch.delenv(variable)
        tried.append(backend.find_system_nvcc())
    home, path = found["CUDA_HOME"], found["PATH"]
    assert tried == [found["CUDACXX"], home, home, path, path, None]
    monkeypatch.setenv("CUDACXX", str(home))
    monkeypatch.setenv("ARCHFLASH_CUDA", "wheel")  # asks for the packages
    assert backend.find_system_nvcc() is None
    assert backend.get_requires_for_build_wheel()[-1:] == CUDA_PACKAGES


# --- the newer assembler ---


class FakePip:
    """Stands in for pip: puts a ptxas of a version into its --target folder, or fails."""

    def __init__(self, backend: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.asked: list[str] = []
        self._version = version
        self._run = backend.subprocess.run
        monkeypatch.delenv(PTXAS_VARIABLE)
        monkeypatch.setattr(backend.subprocess, "run", self)

    def __call__(self, command: list[Any], **options: Any) -> Any:
        if command[1:3] != ["-m", "pip"]:
            return self._run(command, **options)
        self.asked.append(command[-1])
        assert "--no-deps" in command
        if self._version:
            target = Path(command[command.index("--target") + 1])
            make_nvcc(target / "nvidia" / "cu13" / "bin", self._version, name="ptxas")
        return subprocess.CompletedProcess(command, 0, "", "ERROR: no network\n")


@pytest.mark.parametrize("version", ["13.5", "", "13.0"], ids=["newer", "nothing", "older"])
def test_a_newer_assembler_comes_from_pypi_once_or_the_build_says_what_it_takes(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], version: str,
) -> None:  # fmt: skip
    pip = FakePip(backend, monkeypatch, version)
    own = make_nvcc(tmp_path / "cuda" / "bin", "13.0", name="ptxas")
    if version == "13.5":
        expected = tmp_path / "build" / "ptxas" / "nvidia" / "cu13" / "bin" / "ptxas"
        assert [backend.newer_ptxas(tmp_path / "cuda") for _ in range(2)] == [expected] * 2
        assert pip.asked == [backend.PTXAS_PACKAGE]
        return
    assert backend.newer_ptxas(tmp_path / "cuda") == own
    said = capsys.readouterr().err
    assert backend.PTXAS_PACKAGE in said
    assert "no network" in said
    assert str(own) in said


def test_an_assembler_can_be_named(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = make_nvcc(tmp_path / "cuda" / "bin", "13.0", name="ptxas")
    assert backend.newer_ptxas(tmp_path / "cuda") == own  # the variable says "toolkit"
    other = make_nvcc(tmp_path / "other", "13.2", name="ptxas")
    monkeypatch.setenv(PTXAS_VARIABLE, str(other))
    assert backend.newer_ptxas(tmp_path / "cuda") == other
    monkeypatch.setenv(PTXAS_VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match=r"no ptxas >= 13\.0.*'toolkit'"):
        backend.newer_ptxas(tmp_path / "cuda")


# --- the hooks ---


@pytest.mark.parametrize(("kind", "more"), [("wheel", []), ("editable", ["editable"])])
def test_builds_are_delegated_with_the_toolkit_named_and_else_require_one(
    backend: ModuleType, skbuild: FakeSkbuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    kind: str, more: list[str],
) -> None:  # fmt: skip
    required = getattr(backend, f"get_requires_for_build_{kind}")
    assert required() == ["ninja>=1.5", *more, *CUDA_PACKAGES]
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path / "cuda" / "bin", "13.0")))
    assert required() == ["ninja>=1.5", *more]
    assert getattr(backend, f"build_{kind}")("out", {"a": "b"}, "metadata").endswith(".whl")
    assert skbuild.calls == [(kind, "out", {"a": "b"}, "metadata")]
    assert skbuild.toolkit == str(tmp_path / "cuda")
    assert os.environ[PTXAS_VARIABLE] == str(tmp_path / "cuda" / "bin" / "ptxas")


def test_without_any_compiler_the_build_says_what_to_install(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(RuntimeError, match=r"nvcc >= 13\.0.*build isolation, or install CUDA 13"):
        backend.build_wheel("out")


def test_without_a_system_compiler_the_wheels_are_laid_out_as_a_toolkit(
    backend: ModuleType, skbuild: FakeSkbuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "site" / "nvidia" / "cu13"
    programs = ["nvcc", "nvcc.profile", "ptxas"]
    libraries = ["lib/libcudart.so.13", "lib/libcudart_static.a"]
    files = [f"bin/{name}" for name in programs] + ["include/cuda.h", "nvvm/bin/cicc", *libraries]
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(file)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), str(tmp_path / "site")])
    tree = tmp_path / "build" / "cuda-toolkit"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "left-over").write_text("of an earlier build")
    backend.build_wheel("out")
    assert skbuild.toolkit == str(tree)
    assert backend.link_wheel_toolkit(root, tree) == tree  # the tree is there already
    # nvcc looks for its companions beside the path that it was started by, so bin must be no link.
    assert not (tree / "bin").is_symlink()
    assert sorted(file.name for file in (tree / "bin").iterdir()) == programs
    for path in files:
        assert (tree / path.replace("lib/", "lib64/")).read_text() == path
    assert (tree / "lib64/libcudart.so").read_text() == "lib/libcudart.so.13"


# --- the kernel build ---


@pytest.fixture(scope="module")
def build_kernel() -> ModuleType:
    return load("build_kernel")


def test_paths_in_ptx_are_the_same_on_every_machine(build_kernel: ModuleType) -> None:
    ptx = (
        '\t.file\t1 "/home/me/archflash/src/simt/attention_fwd.cuh", 1699999999, 20123\n'
        '.file\t2 "/opt/cuda/include/sm_30_intrinsics.hpp"\n'
        '\t.file 3 "/home/me/archflash/src/common/device/host_device.h"\n'
        "\t.loc\t1 12 5\n"
        '\tld.param.u64 \t%rd1, [file_"/not/a/path"];\n'
    )
    assert build_kernel.neutral_paths(ptx, Path("/home/me/archflash/src")) == (
        '.file\t1 "simt/attention_fwd.cuh"\n'
        '.file\t2 "cuda/sm_30_intrinsics.hpp"\n'
        '.file\t3 "common/device/host_device.h"\n'
        "\t.loc\t1 12 5\n"
        '\tld.param.u64 \t%rd1, [file_"/not/a/path"];\n'
    )


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 49152 bytes smem
ptxas info    : Compile time = 512.3 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    72 bytes stack frame, 68 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 72 bytes cumulative stack size
"""


def test_resources_are_read_from_the_assemblers_report(build_kernel: ModuleType) -> None:
    found = build_kernel.parse_resources(REPORT)
    names = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes")
    assert found == {
        "first": dict(zip(names, (128, 0, 0, 0, 49152), strict=True)),
        "second": dict(zip(names, (255, 68, 64, 72, 0), strict=True)),
    }
    assert build_kernel.parse_resources("ptxas info    : 0 bytes gmem\n") == {}


def test_what_the_cache_folder_keeps_is_not_made_again(
    build_kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[None] = []
    code = b"machine\ncode", "a report\nof two lines"

    def make() -> tuple[bytes, str]:
        runs.append(None)
        return code

    monkeypatch.delenv("ARCHFLASH_KERNEL_CACHE", raising=False)
    for _ in range(2):  # without the variable nothing is kept
        assert build_kernel.kept(["sm_80", "text"], make) == code
    monkeypatch.setenv("ARCHFLASH_KERNEL_CACHE", str(tmp_path / "cache"))
    for parts in (["sm_80", "text"], ["sm_80", "text"], ["sm_90", "text"]):
        assert build_kernel.kept(parts, make) == code
    assert len(runs) == 4


def test_the_text_for_fp16_is_made_of_that_for_bf16() -> None:
    """Names, halves of a register that become floats, and descriptors of products; no others."""
    made = load("build_kernel").text_for_f16(
        "cvt.rn.bf16x2.f32 %r1, %f2, %f1;\n"
        "shl.b32 %f3, %r1, 16;  // low bf16\n"
        "and.b32 %f4, %r1, 0xFFFF0000;  // high bf16\n"
        "mov.b32 %r5, 136316048;  // operands bf16\n"
        "shl.b32 %r6, %r5, 16;\n"
        "mov.b32 %r7, 1168;\n"
    )
    assert made == (
        "cvt.rn.f16x2.f32 %r1, %f2, %f1;\n"
        "{.reg .b16 low, high; mov.b32 {low, high}, %r1; cvt.f32.f16 %f3, low;}\n"
        "{.reg .b16 low, high; mov.b32 {low, high}, %r1; cvt.f32.f16 %f4, high;}\n"
        "mov.b32 %r5, 136314896;  // operands f16\n"
        "shl.b32 %r6, %r5, 16;\n"
        "mov.b32 %r7, 1168;\n"
    )


def test_the_text_for_8_0_is_made_of_that_for_9_0() -> None:
    """Without what belongs to launches that start early, and nothing else."""
    made = load("build_kernel").text_for_80(
        "\n.target sm_90\n"
        "\t// begin inline asm\n\tgriddepcontrol.wait;\n\t// end inline asm\n"
        "\t// begin inline asm\n\tcp.async.commit_group;\n\t// end inline asm\n"
        "\t// begin inline asm\n\tgriddepcontrol.launch_dependents;\n\t// end inline asm\n"
        "\tret;\n"
    )
    assert made == (
        "\n.target sm_80\n"
        "\t// begin inline asm\n\tcp.async.commit_group;\n\t// end inline asm\n"
        "\tret;\n"
    )


def test_the_tools_of_the_build_are_those_that_the_project_and_the_backend_require() -> None:
    tools = load("install_tools")
    packages = tools.required((BUILD_FOLDER.parent / "pyproject.toml").read_text())
    assert [re.split(r"[>=<]", package)[0] for package in packages] == [
        "scikit-build-core", "nanobind", "nanobind-backend", "pip",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has no line"):
        tools.required("[build-system]\nrequires = [\n")
