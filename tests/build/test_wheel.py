"""One wheel: its name, what it carries and needs, and that attention runs from it elsewhere."""

from __future__ import annotations

import email
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from bench.on_the_spot import images_of

from archflash import _archflash as native
from archflash._packed import members
from tests.kernel_files import groups_of, sources_of

from .conftest import LEFT_OUT, ROOT, pip_wheel

check_wheel: Any = runpy.run_path(str(ROOT / "_build" / "check_wheel.py"))
MEGABYTE = 1 << 20
FOLDERS = {file.parent.parent.name for file in sources_of().values()}


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def extract(wheel: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(name, folder))


def dist_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [p for p in archive.namelist() if p.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


# --- what is built ---


def test_building_gives_one_wheel_for_every_python_from_3_10(wheels: list[Path]) -> None:
    (wheel,) = wheels
    assert re.fullmatch(
        rf"archflash-[\d.]+-cp310-abi3-(manylinux_\d+_\d+|linux)_{platform.machine()}\.whl",
        wheel.name,
    )
    assert re.search(r"^Tag: cp310-abi3-(many)?linux", dist_info(wheel, "WHEEL"), re.MULTILINE)


def test_the_wheel_is_what_is_installed_here(wheel: Path) -> None:
    """What the other tests run is what these tests look at."""
    here = Path(str(native.__file__)).parents[1]
    with zipfile.ZipFile(wheel) as archive:
        other = [
            name
            for name in archive.namelist()
            if name.startswith("archflash/")
            and not ((here / name).exists() and (here / name).read_bytes() == archive.read(name))
        ]
    assert other == [], "install these sources again (make test does)"


def test_the_wheel_is_small(wheel: Path, every_target: None) -> None:
    assert wheel.stat().st_size < 36 * MEGABYTE


def test_the_wheel_carries_the_package_and_its_types(wheel: Path) -> None:
    names = names_in(wheel)
    package = ROOT / "python"
    sources = {str(file.relative_to(package)) for file in package.glob("**/*.py")}
    assert sources <= set(names)
    modules = {"archflash/_archflash.abi3.so", "archflash/_archflash_sim.abi3.so"}
    assert {name for name in names if name.endswith(".so")} == modules
    for name in ("_archflash.pyi", "_archflash_sim.pyi", "py.typed"):
        assert names.count(f"archflash/{name}") == 1


def test_every_file_of_the_wheel_belongs_there(wheel: Path) -> None:
    assert check_wheel["wrong_files"](check_wheel["files_of"](wheel), str(ROOT)) == []


def test_what_does_not_belong_into_a_wheel_is_told() -> None:
    files = {"archflash/x.cu": b"", "archflash/_api.py": b"/here"}
    told = ["archflash/x.cu does not belong there", "archflash/_api.py names /here"]
    assert check_wheel["wrong_files"](files, "/here") == told
    builds = {"a": b"12", "b": b"1", "c": b""}, {"a": b"132", "b": b"1"}
    told = ["a differs in 2 of 2 bytes", "c is in one of them only"]
    assert check_wheel["differences"](*builds) == told


def test_machine_code_that_was_left_out_is_told(wheel: Path) -> None:
    told = check_wheel["left_out"](check_wheel["files_of"](wheel))
    assert {x.rpartition(" ")[2] for x in told} == LEFT_OUT
    files = {"archflash/_kernels/simt/fwd.json": b'{"sm_75": {"a": {"registers": 3}, "b": {}}}'}
    told = check_wheel["left_out"](files)
    assert told == ["archflash/_kernels/simt/fwd.json has no machine code for sm_75"]


def test_the_bill_of_materials_names_every_file_and_licence(wheel: Path) -> None:
    files = check_wheel["files_of"](wheel)
    bill = check_wheel["bill_of_materials"](wheel, files)
    named = {x["name"] for x in bill["components"] if x["type"] == "file"}
    assert named == set(files)
    assert all(x["licenses"] for x in bill["components"] if x["type"] == "library")
    assert bill["metadata"]["component"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_the_wheel_carries_every_kernels_ptx_and_resources(wheel: Path, folder: str) -> None:
    expected = []
    for file in dict.fromkeys(sources_of(folder).values()):
        images = images_of(file)
        packed = f"archflash/_kernels/{folder}/{'+'.join(images)}.ptx.lzma"
        expected += [packed, *(f"archflash/_kernels/{folder}/{image}.json" for image in images)]
        with zipfile.ZipFile(wheel) as archive:
            texts = [name for name, _ in members(archive.read(packed))]
        assert sorted(texts) == sorted(
            f"{x}.compute_{ptx}" for x in images for ptx in groups_of(file)
        )
    given = sorted(name for name in names_in(wheel) if f"_kernels/{folder}/" in name)
    assert given == sorted(expected) != []


def test_the_wheel_carries_kernels_of_the_folders_of_this_build_only(wheel: Path) -> None:
    carried = {name.split("/")[2] for name in names_in(wheel) if "/_kernels/" in name}
    functions = {"copy", "quantize", "merge", "probes"}
    assert carried == FOLDERS == {*native.folder_names(), *functions}


def test_the_wheel_carries_no_sources_tests_or_left_overs(wheel: Path) -> None:
    allowed = (".py", ".pyi", ".so", ".typed", ".ptx.lzma", ".json")
    for name in names_in(wheel):
        if ".dist-info/" not in name:
            assert name.startswith(("archflash/", "archflash_autoload/")), name
            assert name.endswith(allowed), name
            assert "__pycache__" not in name


def test_the_licence_comes_along(wheel: Path) -> None:
    (name,) = [n for n in names_in(wheel) if n.endswith("LICENSE")]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_requires_torch_and_the_binding_backend_only(wheel: Path) -> None:
    metadata = email.message_from_string(dist_info(wheel, "METADATA"))
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(re.split(r"[<>=!~ ]", r)[0] for r in required) == ["nanobind-backend", "torch"]
    assert "torch>=2.6" in required
    assert metadata["Requires-Python"] == ">=3.10"
    assert "archflash = archflash.__main__:main" in dist_info(wheel, "entry_points.txt")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here: install binutils")
def test_the_module_needs_neither_torch_nor_cuda_libraries(wheel: Path, tmp_path: Path) -> None:
    module = extract(wheel, "archflash/_archflash.abi3.so", tmp_path)
    dynamic = subprocess.run(
        ["readelf", "-d", module], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "libc.so.6" in needed
    allowed = r"lib(stdc\+\+|gcc_s|m|c|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.[12]"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here: install binutils")
def test_the_module_exports_its_entry_only(wheel: Path, tmp_path: Path) -> None:
    module = extract(wheel, "archflash/_archflash.abi3.so", tmp_path)
    table = subprocess.run(
        ["readelf", "--dyn-syms", "-W", module], capture_output=True, text=True, check=True
    ).stdout
    exported = re.findall(r"(?:GLOBAL|UNIQUE) DEFAULT +\d+ (\S+)", table)
    assert exported == ["PyInit__archflash"]


def test_no_path_of_the_building_machine_is_in_the_module(wheel: Path, tmp_path: Path) -> None:
    module = extract(wheel, "archflash/_archflash.abi3.so", tmp_path).read_bytes()
    assert str(ROOT).encode() not in module


# --- installed elsewhere ---


def clean_environment() -> dict[str, str]:
    """This process's, without what would show other installations to a Python."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def make_venv(folder: Path, python: str = sys.executable) -> Path:
    """A virtual environment without pip: this Python's pip installs into it. Returns its python."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return folder / "bin" / "python"


def pip_into(python: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *packages]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def site_packages(python: Path) -> Path:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


def lend_installed_packages(python: Path, folder: Path) -> None:
    """Shows a virtual environment what is installed here, torch above all, but nothing of ours.

    Torch is large: it is lent by links, and archflash and its binding backend are installed.
    """
    folder.mkdir()
    for place in map(Path, sys.path):
        if place.name not in ("site-packages", "dist-packages") or not place.is_dir():
            continue
        for entry in place.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(("archflash", "_archflash", "nanobind")) and (
                entry.suffix != ".pth" and not link.exists()
            ):
                link.symlink_to(entry)
    (site_packages(python) / "lent.pth").write_text(f"{folder}\n")


CALL = """
import json, sys
from importlib.metadata import version
import torch, archflash
from archflash import reference
generator = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (7, 9, 9))
out = archflash.attention(q, k, v, causal=True)
expected, _ = reference.attention(q, k, v, causal=True)
report = reference.check(out, expected, reference.baseline(q, k, v, causal=True))
q16 = torch.empty(1, 2, 64, 64).half()
print(json.dumps({
    "file": archflash.__file__, "ok": report.ok, "version": version("archflash"),
    "chosen": archflash.explain(q, q, q, device="RTX 5090").chosen,
    "chosen16": archflash.explain(*[q16] * 3, device="RTX 5090").chosen,
    "images": archflash._archflash.image_names(),
    "backend": __import__("nanobind_backend").__file__,
}))
"""


def test_attention_runs_from_the_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    lend_installed_packages(python, tmp_path / "lent")
    pip_into(python, str(wheel))  # torch is found; the binding backend is fetched
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [python, "-c", CALL],
        cwd=elsewhere,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["file"]).is_relative_to(tmp_path / "venv")
    assert Path(said["backend"]).is_relative_to(tmp_path / "venv")
    assert said["ok"] is True
    assert (said["chosen"], said["chosen16"]) == ("simt", "blackwell_consumer")
    assert said["images"] == native.image_names()
    assert wheel.name.startswith(f"archflash-{said['version']}-")
    script = tmp_path / "venv" / "bin" / "archflash"
    done = subprocess.run(
        [script, "explain", "--device", "B200", "--shape", "1,2,3,8"],
        cwd=elsewhere,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "head dim 8 on B200" in done.stdout


# --- choosing folders ---


@pytest.mark.slow
def test_an_unknown_folder_stops_the_build_and_lists_the_known_ones(tmp_path: Path) -> None:
    """Configured in a folder of its own; it stops before anything is compiled."""
    done = pip_wheel(
        tmp_path / "wheels",
        *("-C", f"build-dir={tmp_path / 'build'}"),
        ARCHFLASH_ARCHS="simt,fermi",
    )
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    found = re.search(r"ARCHFLASH_ARCHS names `fermi`; the folders are: ([\w, ]+), or `all`", said)
    assert found is not None, said
    assert sorted(found[1].split(", ")) == sorted(native.folder_names())
