"""Faults that a GPU's tests plant in kernels are lines that the kernels still have."""

from __future__ import annotations

import pytest
from bench.on_the_spot import SOURCES

from tests.gpu.planted_faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert fault.old in (SOURCES / fault.file).read_text()
    assert fault.new != fault.old
