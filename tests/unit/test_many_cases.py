"""Tests that go through many cases fail for each of them, and say which."""

from __future__ import annotations

import pytest
from tests.many_cases import check_all


def is_even(number: int) -> None:
    assert number % 2 == 0, f"{number} is odd"


def test_all_cases_are_checked_and_those_that_fail_are_named() -> None:
    seen: list[int] = []
    check_all([0, 2, 4], lambda number: (is_even(number), seen.append(number)))
    assert seen == [0, 2, 4]
    with pytest.raises(pytest.fail.Exception) as raised:
        check_all([1, 2, 3], is_even, name=lambda number: f"case-{number}")
    said = str(raised.value)
    assert said.startswith("2 of 3 cases fail:\ncase-1: AssertionError: 1 is odd")
    assert "case-3: AssertionError: 3 is odd" in said
    assert "case-2" not in said
