"""Random problems over the whole public API agree with float64, and wrong ones are refused.

Hypothesis draws the same problems in each run, and shows the smallest one that fails: add it to
FOUND. `python -m tests.properties` draws more of them from a seed, also on a GPU.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archflash
from tests.properties import ENTRIES, Problem, attempt, draw
from tests.properties.illegal import refuses

# Problems that have failed, and what was wrong.
FOUND = [
    # NaN where the forward pass had an infinite sink.
    Problem(
        "attention_backward", 368,
        {"dtype": "bfloat16", "dims": (64, 64), "heads": (2, 1), "batch": 1, "nq": 3, "nk": 1,
         "options": {"sinks": "infinite"}, "strides": ("dense", "dense", "dense"),
         "mask_gradient": False, "dlse": False},
    ),
    # A sink of -inf had a gradient where no key is seen.
    *(
        Problem(
            entry, 660,
            {"dtype": "float16", "dims": (16, 16), "heads": (2, 2), "batch": 1, "nq": 5, "nk": 0,
             "options": {"sinks": "infinite"}, "strides": ("dense", "dense", "dense"),
             "mask_gradient": False, "dlse": True},
        )
        for entry in ("attention_backward", "autograd")
    ),
    # The error rule of int8 did not take calls without rows.
    Problem(
        "attention", 786,
        {"dtype": "bfloat16", "dims": (16, 16), "heads": (1, 1), "batch": 0, "nq": 0, "nk": 33,
         "options": {"approximate": "int8_qk"}, "strides": ("dense", "dense", "dense"), "pad": 0},
    ),
    # Rows that FlashMask hides were seen, if its second pair of bounds lay behind the first.
    Problem(
        "masks", 260,
        {"name": "from_flashmask", "nq": 3, "nk": 3, "batch": 2, "number": 5, "causal": False},
    ),
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
ALWAYS_THE_SAME = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
chances = st.randoms(use_true_random=False)


def check(problem: Problem, *implementations: str) -> None:
    for name, verdict in attempt(problem, implementations).items():
        assert verdict in ("right", "refused"), f"{name}: {verdict}\n{problem}"


@pytest.mark.parametrize("problem", FOUND, ids=lambda problem: problem.entry)
def test_what_has_failed_is_right(problem: Problem) -> None:
    check(problem, "torch", "simt")


@pytest.mark.parametrize("entry", ENTRIES)
def test_answers_agree_with_float64(entry: str) -> None:
    @settings(ALWAYS_THE_SAME, max_examples=200)
    @given(st.builds(draw, st.just(entry), chances))
    def property_holds(problem: Problem) -> None:
        check(problem, "torch")

    property_holds()


@pytest.mark.parametrize("entry", ["attention", "attention_backward", "attention_with_kvcache"])
def test_kernels_agree_with_float64(entry: str) -> None:
    """On the simulator, which is slow: a few tiny problems."""
    names = [i.name for i in archflash.implementations() if i.name != "torch"]

    @settings(ALWAYS_THE_SAME, max_examples=40)
    @given(st.builds(draw, st.just(entry), chances, st.just(9)), st.sampled_from(names))
    def property_holds(problem: Problem, name: str) -> None:
        check(problem, name)

    property_holds()


@pytest.mark.parametrize("entry", ["attention", "attention_backward", "attention_with_kvcache"])
def test_wrong_calls_are_refused(entry: str) -> None:
    @settings(ALWAYS_THE_SAME, max_examples=400)
    @given(chances)
    def property_holds(chance: random.Random) -> None:
        refuses(draw(entry, chance, 70), chance)

    property_holds()
