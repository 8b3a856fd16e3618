"""The constructors of archflash.masks, and what summarize_mask and from_flex say of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import archflash
from archflash import _query_ranges, masks


def rows_of(ranges: Tensor, nk: int) -> list[str]:
    """Each query of the first batch and head as a text, x for a key that it sees."""
    dense = masks.to_dense(ranges, nk)[0, 0]
    return ["".join(".x"[int(seen)] for seen in row) for row in dense]


def test_documents_see_themselves() -> None:
    ids = torch.tensor([[4, 4, 4, 1, 1, 4], [0, 1, 2, 2, 2, 2]])
    ranges = masks.documents(ids)
    assert ranges.shape == (2, 1, 6, 1, 2)
    assert rows_of(ranges, 6) == ["xxx...", "xxx...", "xxx...", "...xx.", "...xx.", ".....x"]
    assert rows_of(ranges[1:], 6) == ["x.....", ".x....", *["..xxxx"] * 4]
    assert torch.equal(masks.documents(ids[0]), ranges[:1])


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal() -> None:
    assert rows_of(masks.prefix_lm(torch.tensor([2]), 4), 4) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows_of(masks.prefix_lm(torch.tensor([2, 3]), 2, 4)[1:], 4) == ["xxx.", "xxxx"]


def test_spans_are_bidirectional_in_causal_text() -> None:
    spans = torch.tensor([[1, 3], [4, 4]])
    assert rows_of(masks.bidirectional_spans(spans, 5), 5) == [
        "x....", "xxx..", "xxx..", "xxxx.", "xxxxx",
    ]  # fmt: skip
    assert rows_of(masks.bidirectional_spans(spans, 2, 4), 4) == ["xxx.", "xxxx"]


def test_a_sliding_window_keeps_the_first_keys() -> None:
    ranges = masks.sliding_window_with_global(5, left=1, global_keys=2)
    assert rows_of(ranges, 5) == ["x....", "xx...", "xxx..", "xxxx.", "xx.xx"]
    decoding = masks.sliding_window_with_global(1, 9, left=2, global_keys=1)
    assert rows_of(decoding, 9) == ["x.....xxx"]


def test_nodes_of_a_tree_see_their_ancestors() -> None:
    ranges = masks.tree([-1, 0, 0, 2], past=2)
    assert rows_of(ranges, 6) == ["xxx...", "xxxx..", "xxx.x.", "xxx.xx"]
    assert ranges.shape == (1, 1, 4, 2, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.documents(torch.zeros(1, 1, 1).int()), r"ids has shape \(1, 1, 1\)"),
        (lambda: masks.prefix_lm(torch.zeros(1, 1).int(), 3), r"lengths has shape \(1, 1\)"),
        (lambda: masks.bidirectional_spans(torch.zeros(3).int(), 3), r"spans has shape \(3,\)"),
        (
            lambda: masks.sliding_window_with_global(3, left=-1, global_keys=0),
            "left is -1: it must be >= 0",
        ),
        (lambda: masks.tree([0], past=0), "parents has 0 for node 0"),
        (lambda: masks.tree([-1], past=-1), "past is -1"),
        (lambda: masks.tree([-1, 0, 0, 2, 2, 4, 4, 6, 6, 8], past=1), "sees 5 ranges of keys"),
        (lambda: masks.to_dense(torch.zeros(3, 2).int(), 4), r"key_ranges has shape \(3, 2\)"),
        (lambda: archflash.summarize_mask(torch.zeros(3)), r"attn_mask has shape \(3,\)"),
    ],
)
def test_what_cannot_be_a_mask_is_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


def test_a_summary_tells_hidden_from_whole_and_mixed_blocks() -> None:
    mask = torch.zeros(2, 1, 70, 200, dtype=torch.bool)
    mask[0, 0, :, :64] = True
    mask[0, 0, 69, 130] = True
    mask[1, 0, :64, 192:] = True
    expected = [[[[2, 0, 0, 0], [2, 0, 1, 0]]], [[[0, 0, 0, 2], [0, 0, 0, 0]]]]
    assert archflash.summarize_mask(mask).tolist() == expected
    added = torch.where(mask, 0.0, -math.inf)
    assert archflash.summarize_mask(added).tolist() == expected
    added[0, 0, 0, 0] = 0.5
    assert archflash.summarize_mask(added)[0, 0].tolist() == [[1, 0, 0, 0], [2, 0, 1, 0]]
    with pytest.raises(TypeError, match=r"attn_mask has dtype torch\.int32"):
        archflash.summarize_mask(mask.int())


def test_a_block_mask_of_flex_attention_keeps_its_blocks() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    made = flex.create_block_mask(causal, 1, 2, 256, 256, device="cpu")
    mask = flex.create_mask(causal, 1, 2, 256, 256, device="cpu")
    table = masks.from_flex(made)
    assert table.tolist() == [[[[1, 1, 0, 0]] * 2 + [[2, 2, 1, 1]] * 2] * 2]
    q, k = torch.randn(1, 2, 256, 16), torch.randn(1, 2, 256, 16)
    torch.testing.assert_close(
        archflash.attention(q, k, k, attn_mask=mask, block_mask=table),
        archflash.attention(q, k, k, attn_mask=mask),
    )
    coarse = torch.tensor([[True, False], [False, True]])[None, None]
    assert masks.from_blocks(coarse, (128, 64), 200, 100).tolist() == [
        [[[1, 0], [1, 0], [0, 1], [0, 1]]]
    ]
    with pytest.raises(ValueError, match=r"must be \(batch or 1, heads or 1, 2, 1\)"):
        masks.from_blocks(coarse, (128, 128), 200, 100)
    # Lists that are shorter, or longer, than a row of blocks.
    counts, lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[3, 0], [1, 2]]]])
    for indices in (lists, torch.nn.functional.pad(lists, (0, 3), value=9)):
        listed = flex.BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=64, seq_lengths=(128, 256), compute_q_blocks=False
        )
        assert masks.from_flex(listed).tolist() == [[[[0, 0, 0, 1], [0, 1, 1, 0]]]]
    odd = flex.create_block_mask(causal, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(ValueError, match=r"block_size is \(32, 32\)"):
        masks.from_flex(odd)


# --- masks by columns ---


def columns_of(*ranges: tuple[int, int]) -> Tensor:
    return torch.tensor(ranges, dtype=torch.int32)[None, None, :, None]


def test_causal_documents_by_columns_are_those_by_rows() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 3 + [2] * 9])
    ends = torch.tensor([5] * 5 + [8] * 3 + [17] * 9, dtype=torch.int32)
    columns = torch.stack([torch.zeros_like(ends), ends], -1)[None, None, :, None]
    ranges = masks.from_query_ranges(columns, 17)
    assert ranges.shape == (1, 1, 17, 1, 2)
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    expected = masks.to_dense(masks.documents(ids), 17) & causal
    assert torch.equal(masks.to_dense(ranges, 17) & causal, expected)
    q, k, v = (torch.randn(1, 2, 17, 16) for _ in range(3))
    torch.testing.assert_close(
        archflash.attention(q, k, v, causal=True, key_ranges=ranges),
        archflash.attention(q, k, v, attn_mask=expected),
    )


@pytest.mark.parametrize("at_once", [1, 40, 1 << 24])
def test_ranges_of_queries_become_ranges_of_keys(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time too; ranges that are empty, overlap, or reach beyond the queries."""
    monkeypatch.setattr(_query_ranges, "_DENSE_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    for batch, heads, nk, n, nq in ((1, 2, 8, 1, 5), (2, 1, 7, 3, 11), (1, 1, 1, 1, 1)):
        columns = torch.randint(
            -2, nq + 3, (batch, heads, nk, n, 2), generator=generator, dtype=torch.int32
        )
        row = torch.arange(nq)[:, None]
        seen = [
            (row >= begin[:, :, None]) & (row < end[:, :, None])
            for begin, end in (x.unbind(-1) for x in columns.unbind(3))
        ]
        expected = torch.stack(seen).any(0)
        assert torch.equal(masks.query_ranges_to_dense(columns, nq), expected)
        assert torch.equal(masks.to_dense(masks.from_query_ranges(columns, nq), nk), expected)


@pytest.mark.parametrize(("causal", "bounds"), [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask_hides_the_rows_that_it_names(causal: bool, bounds: int) -> None:
    """Documents of 3, 5 and 4 tokens; the second one is hidden from all that come after it."""
    ids = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    begin, end = (torch.tensor(x)[ids].int() for x in ([0, 3, 8], [3, 8, 12]))
    twelve = torch.full_like(end, 12)
    row = torch.arange(12)[:, None]
    columns = {
        (True, 1): ([end], row < end),
        (True, 2): ([begin + 5, end + 2], (row < begin + 5) | (row >= end + 2)),
        (False, 2): ([end, begin], (row >= begin) & (row < end)),
        (False, 4): ([end, twelve, 0 * end, begin], (row >= begin) & (row < end)),
    }
    given, expected = columns[causal, bounds]
    ranges = masks.from_flashmask(torch.stack(given, -1)[None, None], 12, causal=causal)
    assert torch.equal(masks.to_dense(ranges, 12)[0, 0], expected)
    with pytest.raises(ValueError, match=r"must be \(batch or 1, heads or 1, nk, "):
        masks.from_flashmask(torch.zeros(1, 1, 12, 3, dtype=torch.int32), 12, causal=causal)


def test_no_key_and_no_query_need_no_ranges() -> None:
    none = masks.from_query_ranges(torch.zeros(1, 1, 0, 1, 2, dtype=torch.int32), 3)
    assert none.shape == (1, 1, 3, 1, 2)
    assert not none.any()
    assert masks.from_query_ranges(columns_of((0, 1)), 0).shape == (1, 1, 0, 1, 2)


def test_keys_in_more_than_four_pieces_are_refused_with_what_to_do() -> None:
    every_other = columns_of(*((0, 3) if key % 2 else (0, 0) for key in range(10)))
    with pytest.raises(ValueError, match=r"in 5 pieces: key_ranges have up to 4.*to_dense"):
        masks.from_query_ranges(every_other, 3)
    assert masks.from_query_ranges(every_other[:, :, :8], 3).shape == (1, 1, 3, 4, 2)
    with pytest.raises(ValueError, match=r"query_ranges has shape \(1, 1, 4, 2\)"):
        masks.from_query_ranges(torch.zeros(1, 1, 4, 2, dtype=torch.int32), 4)
    with pytest.raises(TypeError, match=r"dtype torch\.int64: it must be torch\.int32"):
        masks.query_ranges_to_dense(every_other.long(), 3)


def test_attention_with_ranges_is_that_with_the_dense_mask_compiled_too() -> None:
    q, k = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 12, 16)
    ranges = masks.prefix_lm(torch.tensor([3, 7]), 9, 12)
    slopes = torch.tensor([0.5, 0.25])
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, ranges: Tensor) -> Tensor:
        return archflash.attention(
            q, k, k, key_ranges=ranges, alibi_slopes=slopes, block_mask=blocks
        )

    dense = archflash.attention(q, k, k, attn_mask=masks.to_dense(ranges, 12), alibi_slopes=slopes)
    torch.testing.assert_close(attend(q, k, ranges), dense)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, ranges), dense)
    q.requires_grad_()
    (of_ranges,) = torch.autograd.grad(attend(q, k, ranges).square().sum(), q)
    bias = torch.where(masks.to_dense(ranges, 12), 0.0, -math.inf)
    distance = (torch.arange(9)[:, None] + 3 - torch.arange(12)).abs()
    scores = q @ k.mT / 4 - slopes[:, None, None] * distance + bias
    (of_formula,) = torch.autograd.grad((scores.softmax(-1) @ k).square().sum(), q)
    torch.testing.assert_close(of_ranges, of_formula)


LISTS = torch.tensor([[[[1, 2, 5, 100]] * 300]]), torch.full((1, 1, 300), 3)
BY_NUMBERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "documents": lambda to: masks.documents(to(torch.tensor([7, 7, 120, 120, 9]))),
    "prefix_lm": lambda to: masks.prefix_lm(to(torch.tensor([3, 100])), 300, 400),
    "spans": lambda to: masks.bidirectional_spans(to(torch.tensor([[3, 9], [20, 120]])), 300),
    "lists": lambda to: masks.from_block_lists(
        *map(to, LISTS), (64, 64), 19200, 19200, key_sizes=to(torch.full((300,), 60))
    )["block_mask"],
    "bsr": lambda to: masks.from_bsr(
        to(torch.tensor([0] + [4] * 300)), to(torch.tensor([0, 7, 100, 120])), (64, 64), 19200,
        19200,
    )["block_mask"],
    "ragged": lambda to: masks.from_ragged_blocks(
        to(torch.eye(3)[None]), *[to(torch.full((1, 3), 100))] * 2, 300, 300
    )["attn_mask"],
    "chunks": lambda to: masks.from_chunks(to(torch.tensor([[[[0, 3], [5, 1]]]])), 100, 1000),
    "vertical": lambda to: masks.from_vertical_and_slash(
        to(torch.tensor([[[0, 70, 127]]])), to(torch.tensor([[[0, 100]]])), 1000, 1000
    ),
    "keys": lambda to: masks.from_key_indices(
        to(torch.tensor([[[[0, 3, 9, 100]]]])), 1, 300, to(torch.tensor([[[3]]]))
    ),
    "dense": lambda to: masks.to_dense(to(torch.tensor([[[[[0, 3], [50, 100]]]]])), 300),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NUMBERS)
def test_integers_of_every_width_are_numbers(name: str) -> None:
    """Numbers of keys and blocks are larger than what the dtype of a list may hold."""
    make = BY_NUMBERS[name]
    expected = make(Tensor.long)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint64):
        assert torch.equal(make(lambda x, to=dtype: x.to(to)), expected)
    torch._dynamo.reset()
    traced = torch.compile(lambda: make(Tensor.char), backend="eager", fullgraph=True)
    assert torch.equal(traced(), expected)
    if name != "documents":
        with pytest.raises(TypeError, match=r"has dtype torch\.bool: it must be of integers"):
            make(Tensor.bool)


@pytest.mark.parametrize("name", ["nq", "nk"])
@pytest.mark.parametrize(
    "value", [torch.tensor(3.5), torch.tensor([True]), torch.tensor([8, 8]), np.array([8]), 8.0]
)
def test_what_is_no_integer_is_no_number_of_rows(name: str, value: Any) -> None:
    sizes = {"nq": np.int64(8), "nk": torch.tensor(8)} | {name: value}
    with pytest.raises(TypeError, match=f"{name} is .*: it must be an int"):
        masks.prefix_lm(torch.tensor([3], dtype=torch.int32), **sizes)
