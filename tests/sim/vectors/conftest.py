"""Fixtures for the tests of this folder."""

from __future__ import annotations

import pytest

from .direct import Direct


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Direct:
    """The simulator's arithmetic, compiled as a library of its own."""
    return Direct(tmp_path_factory.mktemp("direct"))
