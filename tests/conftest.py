"""The option that says where tests/core_set runs."""

from __future__ import annotations

import pytest


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
