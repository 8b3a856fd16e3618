"""Fixtures for the tests of this folder."""

from __future__ import annotations

import pytest

from .direct import Direct


@pytest.fixture(scope="session")
def direct() -> Direct:
    """The simulator's arithmetic, compiled as a library of its own."""
    return Direct()
