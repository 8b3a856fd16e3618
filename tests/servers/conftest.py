"""Tests of plug-ins inside the real packages of servers, which `make test-servers` installs: see
install.py. A folder of tests is of the package of its name, and skipped where that is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tests import compatibility

PACKAGES = ("vllm", "sglang")
collect_ignore = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", choices=PACKAGES, help="note the versions if all tests passed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    package = session.config.getoption("--record")
    if package is None or exitstatus != 0:
        return
    skipped = len(
        session.config.pluginmanager.getplugin("terminalreporter").stats.get("skipped", ())
    )
    compatibility.note(
        package,
        importlib.metadata.version(package),
        f"plug-in, with transformers {importlib.metadata.version('transformers')}",
        torch=importlib.metadata.version("torch"),
        passed=session.testscollected - skipped,
        skipped=skipped,
    )
