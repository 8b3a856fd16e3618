"""Chooses the executor before the test modules, whose parameters depend on it, are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from .executors import choose, executor

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    choose(config.getoption("--executor"), pairs=not config.getoption("--no-pairs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = executor().why_not()
    if reason is None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
