"""A call whose memory is refused at any allocation raises, and leaves the next call right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.failing import run


@pytest.mark.slow
def test_every_allocation_on_the_cpu(tmp_path: Path) -> None:
    assert run("cpu", tmp_path) > 40
