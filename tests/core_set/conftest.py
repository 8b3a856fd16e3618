"""Chooses the executor before the test modules, whose parameters depend on it, are imported, and
which tests `make test` leaves to `make test-rest`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..sim.schedules import IN_FULL
from .executors import choose, executor, left_to_rest, others_of_two

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    choose(config.getoption("--executor"), pairs=not config.getoption("--no-pairs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = executor().why_not()
    mine = [item for item in items if HERE in item.path.parents]
    if reason is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
    elif executor().name == "simulator" and not IN_FULL:
        tests = [item.nodeid for item in mine]
        left = left_to_rest(set(tests)) | others_of_two(tests)
        for item in mine:
            if item.nodeid in left:
                item.add_marker(pytest.mark.rest)
