"""Options and parameters of the pytest-benchmark suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The suite imports its own package, which is not installed: python/archflash is not on this path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import environment
from bench.cases import load_cases

DEFAULT_GROUP = "quick"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --all-cases."""
    parser.addoption(
        "--all-cases",
        action="store_true",
        help=f"benchmark every case of cases.toml, not only the group {DEFAULT_GROUP}",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each benchmark the cases that this machine's GPU can run, each with its candidates;
    without a GPU one skipped test.
    """
    if not {"case", "candidate"} <= set(metafunc.fixturenames):
        return
    problem = environment.why_no_gpu() or environment.why_no_archflash()
    if problem:
        skip = pytest.mark.skip(reason=problem)
        metafunc.parametrize(("case", "candidate"), [pytest.param(None, None, marks=skip)])
        return
    import torch

    from bench.candidates import our_candidates, runnable, torch_candidates

    cases = load_cases()
    if not metafunc.config.getoption("--all-cases"):
        cases = [case for case in cases if DEFAULT_GROUP in case.groups]
    metafunc.parametrize(
        ("case", "candidate"),
        [
            pytest.param(case, candidate, id=f"{candidate.name}-{case.name.replace(' ', '-')}")
            for case, candidate in runnable(
                cases, our_candidates() + torch_candidates(), torch.cuda.current_device()
            )
        ],
    )
