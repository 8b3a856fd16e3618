"""The constructors of archflash.masks for lists of blocks, against masks that loops make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import archflash
from archflash import masks


def seen_by(options: dict[str, Tensor], nq: int, nk: int) -> Tensor:
    """What the options let each query see, bool (batch or 1, heads or 1, nq, nk); a 2 in block_mask
    must be true, as kernels do not read attn_mask there.
    """
    table = options["block_mask"].to(torch.int8).repeat_interleave(64, 2).repeat_interleave(64, 3)
    table = table[:, :, :nq, :nk]
    mask = options.get("attn_mask")
    if mask is None:
        return table != 0
    assert ((table != 2) | mask).all()
    return (table != 0) & mask


def numbers(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "block_size", [(64, 64), (128, 192), (64, 32), (16, 64), (100, 48), (256, 256)]
)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_list_of_blocks_is_seen_and_nothing_else(
    block_size: tuple[int, int], ragged: bool
) -> None:
    nq, nk = 300, 410
    rows, columns = -(-nq // block_size[0]), -(-nk // block_size[1])
    indices = numbers(2, 3, rows, 4, below=columns)
    counts = numbers(2, 3, rows, below=5, seed=1)
    sizes = numbers(columns, below=block_size[1] + 1, seed=2) if ragged else None
    options = masks.from_block_lists(indices, counts, block_size, nq, nk, key_sizes=sizes)
    expected = torch.zeros(2, 3, nq, nk, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, (2, 3, rows))).tolist():
        for column in indices[b, h, row, : counts[b, h, row]].tolist():
            first = column * block_size[1]
            end = first + (block_size[1] if sizes is None else int(sizes[column]))
            expected[b, h, row * block_size[0] : (row + 1) * block_size[0], first:end] = True
    assert torch.equal(seen_by(options, nq, nk).expand_as(expected), expected)
    whole_blocks = all(size % 64 == 0 for size in block_size)
    assert ("attn_mask" in options) == (ragged or not whole_blocks)
    if whole_blocks and ragged:  # a number for each key, not for each query and key
        assert options["attn_mask"].shape == (1, 1, 1, nk)


def test_ragged_blocks_give_what_their_mask_gives() -> None:
    q, k = (torch.randn(1, 2, 128, 16) for _ in range(2))
    options = masks.from_block_lists(
        torch.tensor([[[[0, 1], [1, 0]]]]), torch.tensor([[[2, 1]]]), (64, 64), 128, 128,
        key_sizes=torch.tensor([64, 30]),
    )  # fmt: skip
    torch.testing.assert_close(
        archflash.attention(q, k, k, **options),
        archflash.attention(q, k, k, attn_mask=seen_by(options, 128, 128)),
    )


def test_a_table_of_any_integers_hides_where_it_is_0() -> None:
    table = torch.tensor([[0, 1, 2, 3, -1, 127, 256, 258]])[None, None]
    for dtype in (torch.int64, torch.int32, torch.int16):
        made = masks.from_blocks(table.to(dtype), (64, 64), 64, 512)
        assert (made.dtype, made[0, 0, 0].tolist()) == (torch.int8, [0, 1, 2, 1, 1, 1, 1, 1])
    seen = masks.from_blocks(table.bool(), (64, 64), 64, 512)
    assert seen[0, 0, 0].tolist() == [0] + [1] * 7


@pytest.mark.parametrize("block_size", [(64, 128), (32, 16)])
def test_a_bsr_matrix_is_seen(block_size: tuple[int, int]) -> None:
    nq, nk = 200, 150
    rows, columns = -(-nq // block_size[0]), -(-nk // block_size[1])
    lengths = numbers(rows, below=columns + 1)
    # The first two entries, of block 0, belong to no row, as in a part of a larger matrix.
    indptr = 2 + torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    lists = [torch.randperm(columns)[:n] for n in lengths.tolist()]
    indices = torch.cat([torch.zeros(2, dtype=torch.long), *lists])
    seen = seen_by(masks.from_bsr(indptr.int(), indices.int(), block_size, nq, nk), nq, nk)
    expected = torch.zeros(nq, nk, dtype=torch.bool)
    for row in range(rows):
        for column in indices[indptr[row] : indptr[row + 1]].tolist():
            at = row * block_size[0], column * block_size[1]
            expected[at[0] : at[0] + block_size[0], at[1] : at[1] + block_size[1]] = True
    assert torch.equal(seen[0, 0], expected)


def test_blocks_of_sizes_that_vary_are_seen() -> None:
    table = numbers(2, 3, 4, below=2).bool()
    row_sizes = torch.tensor([[10, 0, 60], [1, 30, 39]])
    key_sizes = torch.tensor([[5, 64, 0, 21]])
    seen = seen_by(masks.from_ragged_blocks(table, row_sizes, key_sizes, 70, 90), 70, 90)
    for head in range(2):
        expected = table[head].repeat_interleave(row_sizes[head], 0)
        assert torch.equal(seen[0, head], expected.repeat_interleave(key_sizes[0], 1))


def test_chosen_chunks_are_ranges() -> None:
    chunks = torch.tensor([[[[2, 0, -1]], [[1, 1, 1]]]]).transpose(1, 2)  # a head, two queries
    ranges = masks.from_chunks(chunks, 40, 100)
    assert ranges.tolist() == [[[[[80, 100], [0, 40], [0, 0]], [[40, 80]] * 3]]]
    assert masks.to_dense(ranges, 100)[0, 0].sum(1).tolist() == [60, 40]
    with pytest.raises(ValueError, match="n up to 4"):
        masks.from_chunks(torch.zeros(1, 1, 2, 5).int(), 40, 100)


def test_vertical_and_slash_see_each_key_that_the_pattern_names() -> None:
    nq, nk = 150, 290
    distances = (0, 70, 500, -100)  # the last one names later keys
    vertical, slash = torch.tensor([[[3, 200]]]), torch.tensor([[distances]])
    table = masks.from_vertical_and_slash(vertical, slash, nq, nk)
    exact = torch.zeros(nq, nk, dtype=torch.bool)
    exact[:, [3, 200]] = True
    for row in range(nq):
        for distance in distances:
            if 0 <= row + nk - nq - distance < nk:
                exact[row, row + nk - nq - distance] = True
    widened = archflash.summarize_mask(exact) != 0
    assert (table | ~widened).all()
    assert torch.equal(table, widened)


def test_tiles_slide_inside_of_the_canvas() -> None:
    canvas, tile = (4, 8, 8), (2, 4, 8)
    order = masks.tile_order(canvas, tile)
    assert torch.equal(order.sort().values, torch.arange(256))
    place = torch.stack(torch.meshgrid(*map(torch.arange, canvas), indexing="ij"), -1).reshape(
        -1, 3
    )
    number = (place // torch.tensor(tile))[order]  # of each token's tile along each axis
    assert torch.equal(number[:64], number[0].expand(64, 3))
    options = masks.sliding_tiles(canvas, tile, [(1, 3, 1), (3, 1, 1)])
    counts = torch.tensor([2, 2, 1])
    for head, window in enumerate(torch.tensor([[1, 3, 1], [3, 1, 1]])):
        half = window // 2
        centre = number.clamp(half, torch.maximum(half, counts - 1 - half))
        expected = ((number[None] - centre[:, None]).abs() <= half).all(-1)
        assert torch.equal(seen_by(options, 256, 256)[0, head], expected)
    assert set(options) == {"block_mask"}
    odd = masks.sliding_tiles((2, 6, 6), (1, 3, 3), [(1, 1, 1)])  # tiles of 9 tokens
    assert torch.equal(
        seen_by(odd, 72, 72)[0, 0],
        torch.eye(8, dtype=torch.bool).repeat_interleave(9, 0).repeat_interleave(9, 1),
    )


LISTS = torch.zeros(1, 1, 2, 3).int(), torch.zeros(1, 1, 2).int()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: masks.from_block_lists(*LISTS, (8, 64), 128, 64),
            r"block_size is \(8, 64\): both must be 16 to 256",
        ),
        (
            lambda: masks.from_block_lists(*LISTS, (64, 64), 192, 64),
            r"indices has shape \(1, 1, 2, 3\): it must be \(batch or 1, heads or 1, 3, n\)",
        ),
        (
            lambda: masks.from_block_lists(LISTS[0], torch.zeros(1, 2).int(), (64, 64), 128, 64),
            r"counts has shape \(1, 2\): it must be \(1, 1, 2\)",
        ),
        (
            lambda: masks.from_block_lists(
                *LISTS, (64, 64), 128, 64, key_sizes=torch.ones(2).int()
            ),
            r"key_sizes has shape \(2,\): it must be \(1,\)",
        ),
        (
            lambda: masks.from_bsr(torch.zeros(2).int(), torch.zeros(3).int(), (64, 64), 128, 64),
            r"must be \(3,\) and \(n,\)",
        ),
        (
            lambda: masks.from_ragged_blocks(
                torch.ones(1, 2, 2).bool(), torch.ones(1, 3).int(), torch.ones(1, 2).int(), 2, 2
            ),
            "table, row_sizes and key_sizes have shapes",
        ),
        (
            lambda: masks.from_vertical_and_slash(
                torch.ones(2).int(), torch.ones(1, 1, 2).int(), 8, 8
            ),
            "vertical and slash have shapes",
        ),
        (lambda: masks.tile_order((4, 4, 4), (3, 4, 4)), "divisors"),
        (lambda: masks.sliding_tiles((4, 4, 4), (4, 4, 4), [(2, 1, 1)]), "three odd numbers"),
        (lambda: masks.sliding_tiles((4, 4, 4), (4, 4, 4), [(1, -1, 1)]), "three odd numbers"),
        (lambda: masks.sliding_tiles((4, 4, 4), (4, 4, 4), [1, 1, 1]), "three odd numbers"),
        (lambda: masks.sliding_tiles((4, 4, 4), (4, 4, 4), []), "three odd numbers"),
    ],
)
def test_what_are_no_blocks_is_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]
