"""The option that says where tests/core_set runs, and when Python looks for garbage."""

from __future__ import annotations

import gc

import pytest

# Objects made since the last look, before Python looks for garbage among them.
NEW_OBJECTS = 20_000


def pytest_configure() -> None:
    """Looking for garbage among half a million objects of torch and of pytest took a quarter of the
    time of collecting tests, and a twentieth of that of running them.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # what there is now stays until the end
    gc.set_threshold(NEW_OBJECTS, 10, 10)
    gc.enable()


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
