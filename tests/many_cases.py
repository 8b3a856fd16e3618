"""One test for many cases of microseconds each.

A parametrised test costs about a millisecond, a line of the log and, in `pytest -n`, a message.
Where a case costs less than that, a test goes through a group of cases instead. It goes on after a
case that fails, and names every one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SHOWN = 20


def check_all(
    cases: Collection[T], check: Callable[[T], object], name: Callable[[T], str] = str
) -> None:
    """Calls `check` with every case.

    Raises:
        AssertionError: there is no case, or some fail: their names and what each raised.
    """
    assert cases, "no case to check"
    failures = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            failures.append(f"{name(case)}: {type(error).__name__}: {error}")
    if failures:
        shown = "\n".join(failures[:SHOWN])
        pytest.fail(f"{len(failures)} of {len(cases)} cases fail:\n{shown}", pytrace=False)


def one_test_for_each(
    groups: Mapping[str, Collection[tuple[Any, ...]]],
) -> Callable[[Callable[..., None]], Callable[[str], None]]:
    """Makes of the check of one case a test of each group; its cases are the check's arguments."""

    def decorate(check: Callable[..., None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("group", groups)
        def test(group: str) -> None:
            check_all(groups[group], lambda case: check(*case))

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
