"""Cases of TMA, mbarriers, clusters and wgmma give the same bits under every schedule.

Where a card's results are recorded, the bits are the card's.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .cases import Case, cases
from .replay import simulate

FOLDER = Path(__file__).parent
ALL = cases()


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_case_gives_the_same_under_every_schedule(case: Case) -> None:
    assert simulate(case, "lazy") == simulate(case, "eager") == simulate(case, "priority")


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_case_gives_what_the_card_gave(case: Case) -> None:
    about = json.loads((FOLDER / "h200.json").read_text())
    if case.name not in about["keys"]:
        pytest.skip("not recorded yet: python3 -m tests.sim.protocols.record on an H200")
    assert about["keys"][case.name] == case.key, "the case has changed: record it again"
    with np.load(FOLDER / "h200.npz") as recorded:
        assert simulate(case) == recorded[case.name].tobytes()
