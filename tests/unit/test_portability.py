"""What only POSIX has is called in one Python file and one C++ file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import archflash

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


def test_host_code() -> None:
    files = [
        x for folder in ("src", "sim") for x in (ROOT / folder).rglob("*.[ch]*") if x.is_file()
    ]
    found = {x.name for x in files if HEADERS.search(x.read_text())}
    assert found == {"loaded_libraries.cpp"}
