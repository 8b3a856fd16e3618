"""Random problems over the whole public API agree with float64, and wrong ones are refused.

Hypothesis draws the same problems in each run, and shows the smallest one that fails: add it to
found.py. `make test-rest` draws three times as many, and `python -m tests.properties` as many as
there is time for, from a seed and also on a GPU.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archflash
from tests.properties import (
    ENTRIES,
    Problem,
    attempt,
    draw,
    illegal_others,
    illegal_own,
    odd_values,
)
from tests.properties.drawing import APPROXIMATE, draw_approximate, draw_block_scaled, options_of
from tests.properties.found import FOUND
from tests.properties.illegal import raises, refuses
from tests.properties.illegal_others import Legal, Options, spoiled
from tests.properties.making import Maker

pytestmark = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
ALWAYS_THE_SAME = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
chances = st.randoms(use_true_random=False)
thrice = pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.rest)])


def check(problem: Problem, *implementations: str) -> None:
    for name, verdict in attempt(problem, implementations).items():
        assert verdict in ("right", "refused"), f"{name}: {verdict}\n{problem}"


@pytest.mark.parametrize("problem", FOUND, ids=lambda problem: problem.entry)
def test_what_has_failed_is_right(problem: Problem) -> None:
    check(problem, "torch", "simt")


@thrice
@pytest.mark.parametrize("entry", ENTRIES)
def test_answers_agree_with_float64(entry: str, times: int) -> None:
    slow = entry in ("key_lists", "block_lists")

    @settings(ALWAYS_THE_SAME, max_examples=times * (25 if slow else 36))
    @given(st.builds(draw, st.just(entry), chances))
    def property_holds(problem: Problem) -> None:
        check(problem, "torch")

    property_holds()


# What no call may have together: each of the second is refused beside the first.
APART = {
    "attention": {
        "key_indices": "alibi_slopes attn_mask batch_invariant block_mask dropout_p fp8 "
        "k_descale key_ranges packed q_descale v_descale",
        "packed": "attn_mask block_mask key_ranges",
        "batch_invariant": "dropout_p num_splits",
    },
    "attention_backward": {"packed": "attn_mask block_mask key_ranges mask_gradient"},
    "attention_with_kvcache": {
        "key_indices": "alibi_slopes attention_chunk attn_mask batch_invariant cache_dtype "
        "k_descale key_ranges q_lengths rotary rotary_interleaved v_descale",
        "batch_invariant": "num_splits",
        "page_size": "rows_of",
    },
}


@pytest.mark.parametrize("entry", ["attention", "attention_backward", "attention_with_kvcache"])
def test_every_pair_of_options(entry: str) -> None:
    """As few random problems as have all pairs of options but those that are refused."""
    chance = random.Random(entry)
    missing: dict[tuple[str, str], Problem] = {}
    for _ in range(20000):
        problem = draw(entry, chance, 70)
        for pair in itertools.combinations(sorted(options_of(problem)), 2):
            missing.setdefault(pair, problem)
    every = sorted({name for pair in missing for name in pair})
    apart = {(x, y) for x, others in APART[entry].items() for y in others.split()}
    assert {tuple(sorted(pair)) for pair in apart} == {
        pair for pair in itertools.combinations(every, 2) if pair not in missing
    }
    while missing:
        problem = max(missing.values(), key=lambda p: len(options_of(p)))
        check(problem, "torch")
        for pair in itertools.combinations(sorted(options_of(problem)), 2):
            missing.pop(pair, None)


@thrice
@pytest.mark.parametrize(
    "entry",
    ["attention", "attention_backward", "attention_with_kvcache", "key_lists", "block_lists"],
)
def test_kernels_agree_with_float64(entry: str, times: int) -> None:
    """On the simulator, which is slow: a few tiny problems."""
    names = [i.name for i in archflash.implementations() if i.name != "torch"]

    @settings(ALWAYS_THE_SAME, max_examples=times * 20)
    @given(st.builds(draw, st.just(entry), chances, st.just(9)), st.sampled_from(names))
    def property_holds(problem: Problem, name: str) -> None:
        check(problem, name)

    property_holds()


@thrice
@pytest.mark.parametrize("entry", ["attention", "attention_backward", "attention_with_kvcache"])
def test_wrong_calls_are_refused(entry: str, times: int) -> None:
    @settings(ALWAYS_THE_SAME, max_examples=times * 200)
    @given(chances)
    def property_holds(chance: random.Random) -> None:
        refuses(draw(entry, chance, 70), chance)

    property_holds()


def refuses_all(name: str, legal: Legal, options: Options, right: set[tuple[str, ...]]) -> None:
    """The error names the argument, or where two tensors do not fit together the other one."""
    tensors = {x: y for x, y in legal.given.items() if isinstance(y, torch.Tensor)}
    assert legal.call(**{x: y.clone() for x, y in tensors.items()}) is not None
    for argument, what, value in spoiled(name, legal, options, right):
        wrong = {x: y.clone() for x, y in tensors.items()} | {argument: value}
        names = {argument} | (tensors.keys() if isinstance(value, torch.Tensor) else set())
        raises(lambda wrong=wrong: legal.call(**wrong), f"{argument} {what}", names)
        for x, y in tensors.items():
            same = x == argument or torch.equal(wrong[x].view(torch.uint8), y.view(torch.uint8))
            assert same, f"{argument} {what}: {x} was written"


OF_OTHERS, OWN = illegal_others.legal_calls(), illegal_own.legal_calls()


@pytest.mark.parametrize("name", OF_OTHERS)
def test_wrong_calls_of_other_libraries_functions_are_refused(name: str) -> None:
    refuses_all(name, OF_OTHERS[name], illegal_others.OPTIONS, illegal_others.RIGHT)


@pytest.mark.parametrize("name", OWN)
def test_wrong_calls_beside_attention_are_refused(name: str) -> None:
    options = illegal_own.OF_NVFP4 if name == "stored nvfp4" else illegal_own.OPTIONS
    refuses_all(name, OWN[name], options, illegal_own.RIGHT)


ODD = odd_values.legal_calls()


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.rest)])
def test_odd_values_are_taken_or_refused_by_name(count: int) -> None:
    found = []
    for name, legal in ODD.items():
        found += odd_values.faults(name, legal, random.Random(name), count)
    assert not found, "\n".join(found)


@thrice
@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_kernels_agree_with_float64(name: str, times: int) -> None:
    kernel = {"int8_qk": "ada", "nvfp4": "blackwell_consumer"}.get(name, "ampere")

    @settings(ALWAYS_THE_SAME, max_examples=times * 12)
    @given(st.builds(draw_approximate, st.just(name), chances, st.just(40)))
    def property_holds(problem: Problem) -> None:
        check(problem, kernel)

    property_holds()


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch before 2.7 lacks it")
def test_calls_with_block_scales_agree_with_float64() -> None:
    @settings(ALWAYS_THE_SAME, max_examples=25)
    @given(st.builds(draw_block_scaled, chances, st.just(70)))
    def property_holds(problem: Problem) -> None:
        check(problem, "blackwell_consumer", "torch")

    property_holds()


def test_nvfp4_tensors_agree_with_float64() -> None:
    @settings(ALWAYS_THE_SAME, max_examples=12)
    @given(chances)
    def property_holds(chance: random.Random) -> None:
        heads_kv, nq, nk = chance.choice((1, 2)), chance.randint(1, 140), chance.randint(0, 200)
        heads, d, dv = heads_kv * chance.choice((1, 3)), 16 * chance.randint(1, 8), 48
        make = Maker(chance.randint(0, 999), "cpu")
        triples, numbers = [], []
        for count, rows, columns, dim in (
            (heads, nq, d, -1), (heads_kv, nk, d, -1), (heads_kv, nk, dv, -2)
        ):  # fmt: skip
            x = make.rand(1, count, rows, columns) * chance.choice((0.01, 1.0, 3.0))
            per = chance.choice(("tensor", "head"))
            triples.append(archflash.quantize_nvfp4(x, per=per, dim=dim))
            numbers.append(archflash.reference.dequantize_nvfp4(*triples[-1], dim))
        call = {
            "causal": chance.random() < 0.5,
            "window": chance.choice((None, (chance.randint(0, 90), chance.randint(0, 30)))),
            "q_offset": chance.choice((None, -5, 40)),
            "sinks": chance.choice((None, make.rand(heads))),
            "scale": chance.choice((0.03, 0.3)),
        }
        out, lse = archflash.attention_nvfp4(
            *triples, implementation="blackwell_consumer", return_lse=True, **call
        )
        for report in archflash.reference.check_stored_nvfp4(out, lse, *numbers, **call):
            assert report is not None
            assert report.ok, report

    property_holds()
