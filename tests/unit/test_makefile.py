"""What make and the hooks of git run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def dry_run(target: str, *options: str, always: str = "--always-make") -> str:
    """What `make target` would run if nothing were there."""
    command = ["make", "--dry-run", *filter(None, [always]), target, *options]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_make
def test_tests_with_time_limits_have_the_gpu_to_themselves() -> None:
    others, alone = dry_run("test-gpu").splitlines()
    assert '-m "not alone"' in others
    assert alone.endswith("-m alone")


@needs_make
@pytest.mark.parametrize("target", ["test", "test-fast"])
def test_one_wheel_is_built_installed_and_looked_at(target: str) -> None:
    lines = dry_run(target, "VENV=elsewhere").splitlines()
    built = [line for line in lines if " pip wheel " in line]
    installed = [
        line for line in lines if " install " in line and "build/local-wheel/*.whl" in line
    ]
    assert [line.split()[-3:] for line in built] == [["-w", "build/local-wheel", "."]]
    assert ["--force-reinstall" in line for line in installed] == [True, False]
    assert len([line for line in lines if line.endswith(" --group test")]) == 1
    assert not any(line.endswith(" .") for line in lines if line not in built)
    assert lines[-1].startswith("ARCHFLASH_TEST_WHEEL=build/local-wheel ")


@needs_make
def test_a_deleted_wheel_is_built_again(tmp_path: Path) -> None:
    venv, wheels = tmp_path / "venv", tmp_path / "wheels"
    for name in ("created", "torch", "build-tools/.done", "packages", "built", "installed"):
        (venv / name).parent.mkdir(parents=True, exist_ok=True)
        (venv / name).touch()
    wheels.mkdir()
    (wheels / "archflash.whl").touch()
    options = (f"VENV={venv}", f"WHEELS={wheels}")
    assert "pip" not in dry_run(f"{venv}/installed", *options, always="")
    (wheels / "archflash.whl").unlink()
    commands = dry_run(f"{venv}/installed", *options, always="")
    assert f" wheel -q --no-deps --no-build-isolation -w {wheels} ." in commands
    assert f" install -q --no-deps --force-reinstall {wheels}/*.whl" in commands


@needs_make
def test_kernels_compile_while_packages_are_fetched() -> None:
    commands = dry_run("elsewhere/built", "VENV=elsewhere")
    assert " pip wheel " in commands
    assert "need_torch.py" not in commands
    assert "--group test" not in commands


@needs_make
def test_lint_builds_nothing() -> None:
    commands = dry_run("lint", "VENV=elsewhere")
    assert "ruff check" in commands
    assert "clang-format" in commands
    assert "pip wheel" not in commands
    assert "torch" not in commands


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands_of_workflows() -> list[str]:
    """What comes behind `make` in the workflows; a variable of their matrices is `x`."""
    texts = (re.sub(r"\$\{\{ *matrix\.\w+ *\}\}", "x", file.read_text()) for file in WORKFLOWS)
    steps = (re.findall(r"(?:run|command): (?:\S+=\S+ )*make ([^},#\n]+)", text) for text in texts)
    lines = (command for found in steps for command in found)
    return sorted({command.strip() for line in lines for command in line.split("&& make")})


@needs_make
def test_workflows_run_targets_that_exist() -> None:
    commands = commands_of_workflows()
    assert {"lint", "test-rest", "test-fast", "check-wheel", "test-models"} <= set(commands)
    variables = set(re.findall(r"^(\w+) \?= ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    variables |= {"SERVERS_INSTALL"}  # it is empty unless it is given
    words = {word for command in commands for word in command.split()}
    given = {word for word in words if "=" in word}
    assert {word.split("=")[0] for word in given} <= variables
    assert dry_run("SERVERS=vllm", *(words - given))


def test_workflows_take_what_there_is() -> None:
    texts = {file.name: file.read_text() for file in WORKFLOWS}
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    pythons = {int(x) for x in re.findall(r'\{python: "3\.(\d+)"', texts["ci.yml"])}
    assert pythons == set(range(int(oldest[1]), max(pythons) + 1))
    servers = re.search(r"server: \[(.*)\]", texts["newest.yml"])
    assert servers is not None
    assert {f"{x}.txt" for x in servers[1].split(", ")} == {
        file.name for file in (ROOT / "tests" / "servers").glob("*.txt")
    }
    for name, text in texts.items():
        assert "permissions: {contents: read}" in text.split("jobs:")[0]
        assert not re.findall(r"uses: (?!\./)\S+@(?![0-9a-f]{40}  # v)\S+", text), name  # unpinned
        assert text.count("actions/checkout") == text.count("persist-credentials: false"), name
        for used in re.findall(r"uses: \./(\S+)", text):
            assert (ROOT / used).exists(), used


def test_notes_of_a_release_are_those_of_its_version(tmp_path: Path) -> None:
    """The command of release.yml, on a changelog with three versions."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    command = re.search(r"^ +(awk .*CHANGELOG.md) > notes.md$", text, re.MULTILINE)
    assert command is not None
    changelog = "# Changelog\n## Unreleased\nlater\n## [0.2.0] - 2026-12-01\nnew\n## [0.1.0]\nold\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    environment = {**os.environ, "GITHUB_REF_NAME": "v0.2.0"}
    done = subprocess.run(
        ["bash", "-c", command[1]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "new\n"


def test_linters_are_pinned_in_one_place() -> None:
    pins = re.search(r"^lint = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert pins is not None
    linters = dict(re.findall(r'"([\w-]+)==([\d.]+)"', pins[1]))
    assert set(linters) == {"ruff", "mypy", "clang-format"}
    for name in (".pre-commit-config.yaml", "Makefile", ".github/workflows/ci.yml"):
        text = (ROOT / name).read_text()
        assert not re.search(r"(ruff|mypy|clang-format)\S*[=>]=|rev:", text), name
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"\.venv/bin/([\w-]+)", hooks)) == set(linters)


MESSAGES = {
    "tests, docs: the whole suite on an H200\n\nWhy.": "",
    "bench/models: time a layer": "",
    "Merge branch 'loops'": "",
    "a subject without an area": "not `area: imperative`",
    "Hopper: a capital": "not `area: imperative`",
    "hopper: a full stop.": "not `area: imperative`",
    "hopper: " + "x" * 65: "73 characters; 72 are allowed",
    "hopper: no line between\nthis and that": "an empty line",
}


def test_the_hook_says_what_is_wrong_with_a_commit_message(tmp_path: Path) -> None:
    for message, fault in MESSAGES.items():
        (tmp_path / "message").write_text(message)
        command = [sys.executable, str(ROOT / ".ci/commit_subject.py"), str(tmp_path / "message")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, fault in done.stderr) == (1 if fault else 0, True), message
