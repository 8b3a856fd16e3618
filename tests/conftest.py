"""The option that says where tests/core_set runs, when Python looks for garbage, what is reported
of a test that passes, and a fixture of tests in several folders.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

# Objects made since the last look, before Python looks for garbage among them. Among all that tests
# have made, half a million objects of torch.compile, it looks a few times.
NEW_OBJECTS = 50_000


def pytest_configure() -> None:
    """Looking for garbage among half a million objects of torch and of pytest took a quarter of the
    time of collecting tests, and a twentieth of that of running them.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # what there is now stays until the end
    gc.set_threshold(NEW_OBJECTS, 10, 20)
    gc.enable()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Of a test that passes, the call alone is reported. Of each of 18,000 tests a process of
    pytest-xdist sends what is reported to another, and that took 1 ms of both together.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.sections:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture
def cudnn_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch's cuDNN kernel had been measured to be the fastest everywhere."""
    from archflash import _measured

    find = _measured.find

    def with_cudnn_first(*given: Any, **named: Any) -> _measured.Measurement | None:
        found = find(*given, **named)
        return found and replace(found, order=("torch-cudnn", *found.order))

    monkeypatch.setattr(_measured, "find", with_cudnn_first)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executor",
        choices=("simulator", "gpu"),
        default="simulator",
        help="run tests/core_set on the PTX simulator (the default) or on this machine's GPU",
    )
    parser.addoption(
        "--no-pairs",
        action="store_true",
        help="with --executor=gpu: calls that would take pairs of CTAs run on CTAs alone",
    )
