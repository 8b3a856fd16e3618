"""A call whose memory is refused at any allocation raises, and leaves the next call right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.failing import run


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.rest)])
def test_allocations_on_the_cpu(step: int, tmp_path: Path) -> None:
    assert run("cpu", tmp_path, step) > 800 // step
