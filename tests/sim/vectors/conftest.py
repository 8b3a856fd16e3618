"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from .direct import Direct


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Direct:
    """The simulator's arithmetic, compiled by itself."""
    return Direct(tmp_path_factory.mktemp("direct"))
