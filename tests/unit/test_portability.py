"""What only POSIX has is called in one Python file and one C++ file; the sources alone say what is
missing.
"""

from __future__ import annotations

import ast
import errno
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import archflash
from archflash import _posix

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"fcntl", "grp", "msvcrt", "pwd", "resource", "selectors", "signal", "termios"}
CALLS = {"chown", "fchmod", "fork", "geteuid", "getpgid", "killpg", "setsid", "pass_fds"}
HEADERS = re.compile(r"#include <(dlfcn\.h|unistd\.h|windows\.h|pthread\.h|sys/.*)>")


def used(source: str) -> set[str]:
    """The modules, functions and arguments of a Python source that POSIX alone has."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {x.name for x in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & MODULES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & CALLS
        elif isinstance(node, ast.keyword):
            found |= {node.arg or ""} & CALLS
    return found


def test_python() -> None:
    package = Path(archflash.__file__).parent
    calls = {path.name: used(path.read_text()) for path in package.rglob("*.py")}
    assert {name for name, found in calls.items() if found} == {"_posix.py"}


def test_a_lock_on_windows_waits_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = [OSError(errno.EDEADLOCK, "ten seconds have passed")] * 2

    def locking(*_: object) -> None:
        if answers:
            raise answers.pop()

    fake = SimpleNamespace(locking=locking, LK_LOCK=1)
    monkeypatch.setattr(_posix, "msvcrt", fake, raising=False)
    with (tmp_path / "file").open("w") as file, monkeypatch.context() as windows:
        windows.setattr(sys, "platform", "win32")
        _posix.lock(file)
        assert not answers
        answers.append(OSError(errno.EBADF, "no such file"))
        with pytest.raises(OSError, match="no such file"):
            _posix.lock(file)


def test_sources_without_the_compiled_part_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(archflash.__file__).read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"not in clone/python/archflash. .*`pip install \.`"):
        exec(source, {"__path__": ["clone/python/archflash"]})


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(archflash.__file__).read_text()
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(ImportError, match=r"needs torch 2\.6 or newer, and this is torch 2\.5\.1"):
        exec(source, {"__path__": archflash.__path__, "__name__": "archflash"})


def test_host_code() -> None:
    files = [
        x for folder in ("src", "sim") for x in (ROOT / folder).rglob("*.[ch]*") if x.is_file()
    ]
    found = {x.name for x in files if HEADERS.search(x.read_text())}
    assert found == {"loaded_libraries.cpp"}
