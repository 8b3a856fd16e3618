"""On a GPU, too, a call whose memory is refused at any allocation raises, and the next is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.failing import run

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_every_allocation(tmp_path: Path) -> None:
    assert run("cuda", tmp_path) > 60
