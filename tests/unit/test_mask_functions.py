"""What archflash.integrations._mask_functions makes of mask functions: those here are written as
transformers writes its own, which need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _query_ranges, masks
from archflash.integrations import _mask_functions
from archflash.integrations._mask_functions import Rule

MaskFunction = Callable[[Any, Any, Any, Any], Any]
KEYS = 24


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def all_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def window(sliding_window: int) -> MaskFunction:
    return lambda b, h, q, k: k > q - sliding_window


def window_both_ways(sliding_window: int) -> MaskFunction:
    return lambda b, h, q, k: abs(q - k) <= sliding_window


def chunks(chunk_size: int, left_padding: Tensor) -> MaskFunction:
    return lambda b, h, q, k: (
        (k - left_padding[b]) // chunk_size == (q - left_padding[b]) // chunk_size
    )


def blocks(block_sequence_ids: Tensor) -> MaskFunction:
    def inside(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = block_sequence_ids[b, q]
        return (own == block_sequence_ids[b, k]) & (own >= 0)

    return inside


def packed(packed_sequence_mask: Tensor) -> MaskFunction:
    return lambda b, h, q, k: packed_sequence_mask[b, q] == packed_sequence_mask[b, k]


def renumbered(mask_function: MaskFunction, position_ids: Tensor) -> MaskFunction:
    return lambda b, h, q, k: mask_function(b, h, position_ids[b, q], position_ids[b, k])


def both(*mask_functions: MaskFunction) -> MaskFunction:
    def result(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = q.new_ones((), dtype=torch.bool)
        for function in mask_functions:
            seen = seen & function(b, h, q, k)
        return seen

    return result


def either(*mask_functions: MaskFunction) -> MaskFunction:
    def result(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = q.new_zeros((), dtype=torch.bool)
        for function in mask_functions:
            seen = seen | function(b, h, q, k)
        return seen

    return result


NUMBERS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 14 + [1] * 10])
POSITIONS = torch.stack(
    [torch.cat([torch.arange(n) for n in counts]) for counts in ((5, 9, 10), (14, 10))]
)
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1] * 4, [-1] * 20 + [3] * 4])
IMAGES[0, 12:] = torch.tensor([-1, 1, 1, 1, -1, 2, 2, 2, 2, -1, -1, -1])
IMAGES[0, 6:12] = -1
PADDED = torch.tensor([0, 3])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mask_functions, "_kinds", {})
    zeros = torch.zeros(1, 1, dtype=torch.long)
    for kind, function in (
        (_mask_functions.CAUSAL, causal),
        (_mask_functions.ALL, all_keys),
        (_mask_functions.WINDOW, window(1)),
        (_mask_functions.WINDOW_BOTH_WAYS, window_both_ways(1)),
        (_mask_functions.CHUNKS, chunks(1, zeros[0])),
        (_mask_functions.BLOCKS, blocks(zeros)),
        (_mask_functions.DOCUMENTS, packed(zeros)),
        (_mask_functions.RENUMBERED, renumbered(causal, zeros)),
        (_mask_functions.AND, both(causal)),
        (_mask_functions.OR, either(causal)),
    ):
        _mask_functions.register(kind, function)


def dense(function: MaskFunction, nq: int = KEYS, offset: int = 0) -> Tensor:
    batch, query = torch.arange(2), torch.arange(nq) + offset
    seen: Tensor = function(
        batch[:, None, None, None], 0, query[:, None], torch.arange(KEYS)[None, None, None]
    )
    return seen.expand(2, 1, nq, KEYS)


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (causal, Rule(True)),
        (all_keys, Rule(False)),
        (both(window(5), causal), Rule(True, 4)),
        (both(causal, window(5), window(3)), Rule(True, 2)),
        (both(window_both_ways(2), all_keys), Rule(False, 2, 2)),
        (either(causal, window(3)), None),
        (chunks(4, PADDED), None),
        (window(0), None),
        (lambda b, h, q, k: k <= q, None),
    ],
)
def test_rules(function: MaskFunction, rule: Rule | None) -> None:
    assert _mask_functions.rule_of(function) == rule


IN_DOCUMENTS = both(renumbered(both(window(4), causal), POSITIONS), packed(NUMBERS))
CLOSED = {
    "causal": causal,
    "window both ways": window_both_ways(3),
    "chunks": both(chunks(5, PADDED), causal),
    "images": either(causal, blocks(IMAGES)),
    "images in a window": both(either(causal, blocks(IMAGES)), window(6)),
    "documents": both(renumbered(causal, POSITIONS), packed(NUMBERS)),
    "a window in documents": IN_DOCUMENTS,
    "chunks in documents": both(
        renumbered(both(chunks(3, torch.tensor([0, 0])), causal), POSITIONS), packed(NUMBERS)
    ),
    "images in documents": both(
        either(renumbered(causal, POSITIONS), blocks(IMAGES)), packed(NUMBERS)
    ),
    "documents both ways": both(all_keys, packed(NUMBERS)),
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(("nq", "offset"), [(KEYS, 0), (7, 13), (1, 5)])
def test_ranges_mean_what_the_function_says(name: str, nq: int, offset: int) -> None:
    function = CLOSED[name]
    found = _mask_functions.ranges_of(function, torch.arange(nq) + offset)
    assert found is not None
    seen = torch.zeros(2, 1, nq, KEYS, dtype=torch.bool)
    for begin, end in found:
        key = torch.arange(KEYS)
        seen |= ((key >= begin[..., None]) & (key < end[..., None]))[:, None]
    assert torch.equal(seen, dense(function, nq, offset))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: k <= q,
        both(causal, lambda b, h, q, k: k % 2 == 0),
        either(*[both(causal, window(n)) for n in range(1, 6)]),
        packed(NUMBERS[:, torch.randperm(KEYS, generator=torch.Generator().manual_seed(1))]),
        blocks(torch.tensor([[1, -1, 1] * 8])),
        renumbered(causal, POSITIONS),
        both(renumbered(causal, POSITIONS.flip(1)), packed(NUMBERS)),
        both(renumbered(causal, POSITIONS[:, :5]), packed(NUMBERS)),
        both(renumbered(lambda b, h, q, k: k <= q, POSITIONS), packed(NUMBERS)),
        window(0),
        packed(NUMBERS[:, :0]),
    ],
    ids=["unknown", "part unknown", "five ranges", "scattered documents", "a block in two pieces",
         "positions without documents", "positions that do not run on", "too few positions",
         "unknown in documents", "an empty window", "no numbers of documents"],
)  # fmt: skip
def test_what_has_no_closed_form(function: MaskFunction) -> None:
    assert _mask_functions.ranges_of(function, torch.arange(KEYS)) is None
    assert _mask_functions.rule_in_documents(function) is None


def test_a_rule_in_documents() -> None:
    found = _mask_functions.rule_in_documents(IN_DOCUMENTS)
    assert found is not None
    assert found[0] == Rule(True, 3)
    assert torch.equal(found[1], NUMBERS)
    by_index = both(both(window(4), causal), packed(NUMBERS))  # as transformers 5.17 writes it
    assert _mask_functions.rule_in_documents(by_index) == found
    assert _mask_functions.rule_in_documents(CLOSED["chunks in documents"]) is None


@pytest.mark.parametrize("at_once", [1, 50, 1 << 22])
def test_ranges_of_any_mask_that_is_computed_by_rows(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_query_ranges, "_DENSE_AT_ONCE", at_once)
    seen = dense(both(either(causal, blocks(IMAGES)), lambda b, h, q, k: (k // 7) % 2 == 0))
    asked = []

    def rows(first: int, last: int) -> Tensor:
        asked.append((first, last))
        return seen[:, :, first:last]

    ranges = masks.from_rows(rows, (2, 1, KEYS, KEYS), "cpu")
    assert ranges is not None
    assert ranges.shape == (2, 1, KEYS, 2, 2)
    assert torch.equal(masks.to_dense(ranges, KEYS), seen)
    assert [first for first, _ in asked] == [0, *(last for _, last in asked[:-1])]
    assert max(last - first for first, last in asked) <= max(1, at_once // (2 * KEYS))
    every_other = dense(lambda b, h, q, k: (k % 2 == 0) & (k <= q) & (b >= 0))
    found = masks.from_rows(lambda a, b: every_other[:, :, a:b], (2, 1, KEYS, KEYS), "cpu")
    assert found is None
