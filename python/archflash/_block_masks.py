"""Masks of blocks: tables and lists of the blocks that are seen, as libraries for sparse attention
have them, made into options of `archflash.attention`. Public through `archflash.masks`.

Where blocks are whole blocks of block_mask (64 queries, 64 keys), its table says everything.
Elsewhere attn_mask says it too, a byte for each query and key, with its summary as block_mask. No
function reads values on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _sequences
from archflash._archflash import MASK_BLOCK, MOST_RANGES
from archflash._given import check_dense
from archflash._mask_arguments import checked

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256  # queries or keys of a block of a list
_MIXED, _FULL = 1, 2  # numbers of a block_mask; 0: hidden


@checked
def summarize_mask(attn_mask: Tensor) -> Tensor:
    """Says of each block of 64 queries and 64 keys whether attn_mask hides it, keeps all of it, or
    has to be asked. With block_mask=summarize_mask(mask) beside attn_mask=mask, kernels skip the
    blocks that are hidden, and do not read the mask where all is kept. One summary serves every
    call with the same mask.

    Args:
        attn_mask: bool or floating, two to four dimensions ``(..., nq, nk)``; -inf hides a key. The
            last two dimensions must have their full size.

    Returns:
        block_mask, int8 ``(batch or 1, heads or 1, ceil(nq / 64), ceil(nk / 64))``: 0 for a block
        that is hidden, 2 for one that is kept and to which nothing is added, 1 for all others.

    Raises:
        ValueError: a mask of fewer than two or more than four dimensions.
        TypeError: a mask that is neither bool nor floating.

    Example:
        >>> import archflash, torch
        >>> mask = torch.ones(128, 128, dtype=torch.bool).tril()
        >>> archflash.summarize_mask(mask).tolist()
        [[[[1, 0], [2, 1]]]]
    """
    check_dense(attn_mask=attn_mask)
    if not 2 <= attn_mask.ndim <= 4:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}: it must have 2 to 4 dimensions"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}: it must be bool or floating")
    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    boolean = mask.dtype == torch.bool
    seen = mask if boolean else mask != -torch.inf
    plain = mask if boolean else mask == 0
    any_seen = _by_block(seen, fill=False).any(-1).any(-2)
    all_plain = _by_block(plain, fill=True).all(-1).all(-2)
    return torch.where(all_plain & any_seen, _FULL, any_seen.to(torch.int8)).to(torch.int8)


def from_flex(block_mask: Any) -> Tensor:
    """The block_mask that says what a BlockMask of torch.nn.attention.flex_attention says of its
    blocks, whose sizes must be multiples of 64.

    A BlockMask that has partial blocks leaves their inside to a function. Pass that as attn_mask,
    too: ``create_mask(mask_mod, B, H, Q_LEN, KV_LEN)`` makes the tensor.

    Args:
        block_mask: a BlockMask.

    Returns:
        block_mask, int8 ``(batch, heads, ceil(nq / 64), ceil(nk / 64))``, as `summarize_mask` has
        it: 2 for full blocks, 1 for partial ones.

    Raises:
        ValueError: blocks of another size.
    """
    nq, nk = block_mask.seq_lengths
    columns = -(-nk // block_mask.BLOCK_SIZE[1])  # lists may be shorter
    table = _scattered(block_mask.kv_num_blocks, block_mask.kv_indices, columns, _MIXED)
    if block_mask.full_kv_num_blocks is not None:
        counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        table = torch.maximum(table, _scattered(counts, indices, columns, _FULL))
    return from_blocks(table, block_mask.BLOCK_SIZE, nq, nk)


@checked
def from_blocks(table: Tensor, block_size: tuple[int, int], nq: int, nk: int) -> Tensor:
    """The block_mask with the meaning of a table of larger blocks.

    Args:
        table: bool (True is seen) or integers (0 is hidden, 2 is full as in block_mask, all others
            are seen) ``(batch or 1, heads or 1, ceil(nq / rows), ceil(nk / keys))``.
        block_size: queries and keys of a block, multiples of 64.
        nq, nk: numbers of queries and keys.

    Returns:
        block_mask, int8 ``(batch or 1, heads or 1, ceil(nq / 64), ceil(nk / 64))``.

    Raises:
        ValueError: blocks of another size, or a table of another shape.
    """
    rows, keys = block_size
    if rows % MASK_BLOCK or keys % MASK_BLOCK:
        raise ValueError(
            f"block_size is ({rows}, {keys}): both must be multiples of {MASK_BLOCK}; make "
            "attn_mask of the table, and block_mask=summarize_mask() of that"
        )
    expected = (-(-nq // rows), -(-nk // keys))
    if table.ndim != 4 or tuple(table.shape[2:]) != expected:
        raise ValueError(
            f"table has shape {tuple(table.shape)}: it must be (batch or 1, heads or 1, "
            f"{expected[0]}, {expected[1]})"
        )
    if table.dtype == torch.bool:
        table = table.to(torch.int8)
    else:
        table = torch.where(table == _FULL, _FULL, (table != 0).to(torch.int8))
    fine = table.repeat_interleave(rows // MASK_BLOCK, 2)
    fine = fine.repeat_interleave(keys // MASK_BLOCK, 3)
    return fine[:, :, : -(-nq // MASK_BLOCK), : -(-nk // MASK_BLOCK)].contiguous()


@checked
def from_block_lists(
    indices: Tensor,
    counts: Tensor,
    block_size: tuple[int, int],
    nq: int,
    nk: int,
    *,
    key_sizes: Tensor | None = None,
) -> dict[str, Tensor]:
    """Each row of blocks sees the blocks of keys in its list, as VSA's and FlexAttention's index
    lists with counts have it.

    Args:
        indices: integers ``(batch or 1, heads or 1, ceil(nq / rows), n)``, numbers of blocks of
            keys, in any order.
        counts: integers, how many entries of each list count, shaped as indices without its last
            dimension.
        block_size: queries and keys of a block, 16 to 256.
        nq, nk: numbers of queries and keys.
        key_sizes: integers ``(ceil(nk / keys),)``: so many keys at the start of each block are
            tokens (VSA's variable_block_sizes); default all.

    Returns:
        Options of `archflash.attention`: ``block_mask``, and where the blocks are not whole ones of
        it, or some are not full, ``attn_mask``. Heads are those of q: repeat lists of heads of k
        for the heads of q that share them.

    Raises:
        ValueError: tensors of other shapes, or blocks of another size.

    Example:
        >>> import archflash, torch
        >>> lists = torch.tensor([[[[1, 0], [1, 0]]]]), torch.tensor([[[1, 2]]])
        >>> archflash.masks.from_block_lists(*lists, (64, 128), 128, 256)["block_mask"].tolist()
        [[[[0, 0, 1, 1], [1, 1, 1, 1]]]]
    """
    shape = _blocks_of(block_size, nq, nk)
    if indices.ndim != 4 or indices.shape[2] != shape[0]:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}: it must be (batch or 1, heads or 1, "
            f"{shape[0]}, n)"
        )
    if counts.shape != indices.shape[:3]:
        raise ValueError(
            f"counts has shape {tuple(counts.shape)}: it must be {tuple(indices.shape[:3])}"
        )
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    table = marked(indices, listed, shape[1])
    return _options(table, block_size, nq, nk, key_sizes)


@checked
def from_bsr(
    indptr: Tensor, indices: Tensor, block_size: tuple[int, int], nq: int, nk: int
) -> dict[str, Tensor]:
    """Each row of blocks sees the blocks of keys that a matrix in block compressed sparse row
    format (BSR) has, as FlashInfer's BlockSparseAttentionWrapper takes it.

    Args:
        indptr: integers ``(ceil(nq / rows) + 1,)``: the entries of row i of blocks are
            ``indices[indptr[i] : indptr[i + 1]]``.
        indices: integers ``(n,)``, numbers of blocks of keys.
        block_size: queries and keys of a block, 16 to 256.
        nq, nk: numbers of queries and keys.

    Returns:
        Options of `archflash.attention`, as `from_block_lists`, for all sequences and heads.

    Raises:
        ValueError: tensors of other shapes, or blocks of another size.
    """
    rows, columns = _blocks_of(block_size, nq, nk)
    if indptr.shape != (rows + 1,) or indices.ndim != 1:
        raise ValueError(
            f"indptr and indices have shapes {tuple(indptr.shape)} and {tuple(indices.shape)}: "
            f"they must be ({rows + 1},) and (n,)"
        )
    entry = torch.arange(len(indices), device=indices.device)
    indptr = indptr.to(indices.device)
    row = _sequences.of_rows(entry, indptr)
    # What belongs to no row or column goes into one of its own, which is dropped.
    inside = (entry >= indptr[0]) & (row < rows) & (indices >= 0) & (indices < columns)
    place = torch.where(inside, row * columns + indices, rows * columns).long()
    flat = torch.zeros(rows * columns + 1, dtype=torch.bool, device=indices.device)
    table = flat.index_fill(0, place, True)[:-1].reshape(1, 1, rows, columns)
    return _options(table, block_size, nq, nk, None)


@checked
def from_ragged_blocks(
    table: Tensor, row_sizes: Tensor, key_sizes: Tensor, nq: int, nk: int
) -> dict[str, Tensor]:
    """A table of blocks whose sizes vary, as FlashInfer's VariableBlockSparseAttentionWrapper takes
    it. It takes a byte for each query and key of each head.

    Args:
        table: bool, or integers (not 0 is seen), ``(heads or 1, rows, columns)``.
        row_sizes: integers ``(heads or 1, rows)``, queries of each row of blocks, nq together.
        key_sizes: integers ``(heads or 1, columns)``, keys of each column of blocks, nk together.
        nq, nk: numbers of queries and keys.

    Returns:
        ``attn_mask`` and ``block_mask``, options of `archflash.attention`.

    Raises:
        ValueError: tensors of other shapes.
    """
    if table.ndim != 3 or any(
        sizes.ndim != 2
        or sizes.shape[1] != table.shape[side]
        or sizes.shape[0] not in (1, len(table))
        for side, sizes in ((1, row_sizes), (2, key_sizes))
    ):
        raise ValueError(
            f"table, row_sizes and key_sizes have shapes {tuple(table.shape)}, "
            f"{tuple(row_sizes.shape)} and {tuple(key_sizes.shape)}: they must be (heads, rows, "
            "columns), (heads or 1, rows) and (heads or 1, columns)"
        )

    def number_of_block(sizes: Tensor, n: int) -> Tensor:
        ends = sizes.cumsum(1)
        token = torch.arange(n, device=sizes.device).expand(len(sizes), n).contiguous()
        number = torch.searchsorted(ends, token, right=True).clamp(max=sizes.shape[1] - 1)
        return number.expand(len(table), n)

    rows, columns = number_of_block(row_sizes, nq), number_of_block(key_sizes, nk)
    of_rows = table.bool().gather(1, rows[:, :, None].expand(-1, -1, table.shape[2]))
    mask = of_rows.gather(2, columns[:, None].expand(-1, nq, -1))[None]
    return {"attn_mask": mask, "block_mask": summarize_mask(mask)}


@checked
def from_chunks(chunks: Tensor, chunk_size: int, nk: int) -> Tensor:
    """Each query sees the chunks of keys that it has chosen, as MoBA's gate does it. Add
    causal=True, and let a query choose its own chunk.

    Args:
        chunks: integers ``(batch or 1, heads or 1, nq, n)`` with n up to 4, numbers of chunks;
            negative ones choose none.
        chunk_size: keys of a chunk.
        nk: number of keys.

    Returns:
        key_ranges, int32 ``(batch or 1, heads or 1, nq, n, 2)``.

    Raises:
        ValueError: chunks of another shape, or more than four for a query: say those with
            attn_mask, of which `summarize_mask` makes block_mask.
    """
    if chunk_size == 0:
        raise ValueError("chunk_size is 0: it must be 1 or more")
    if chunks.ndim != 4 or chunks.shape[3] > MOST_RANGES:
        raise ValueError(
            f"chunks has shape {tuple(chunks.shape)}: it must be (batch or 1, heads or 1, nq, n) "
            f"with n up to {MOST_RANGES}; pass attn_mask for more"
        )
    begin = (chunks.long() * chunk_size).clamp(0, nk)
    end = torch.where(chunks < 0, 0, begin + chunk_size).clamp(max=nk)
    return torch.stack([begin, end], -1).to(torch.int32)


@checked
def from_vertical_and_slash(vertical: Tensor, slash: Tensor, nq: int, nk: int) -> Tensor:
    """Each query sees columns of keys, and keys at distances before it, as MInference's
    vertical-slash pattern has them, both widened to blocks of 64 queries and 64 keys: so each query
    sees all that the pattern names, and what shares a block with it. Add causal=True.

    Args:
        vertical: integers ``(batch or 1, heads or 1, n)``, keys that every query sees.
        slash: integers ``(batch or 1, heads or 1, m)``: the query at position i sees the key
            i - slash. Queries are the last ones of the sequence.
        nq, nk: numbers of queries and keys.

    Returns:
        block_mask, bool ``(batch or 1, heads or 1, ceil(nq / 64), ceil(nk / 64))``.

    Raises:
        ValueError: tensors of other shapes.
    """
    if vertical.ndim != 3 or slash.ndim != 3:
        raise ValueError(
            f"vertical and slash have shapes {tuple(vertical.shape)} and {tuple(slash.shape)}: "
            "they must be (batch or 1, heads or 1, n)"
        )
    rows, columns = -(-nq // MASK_BLOCK), -(-nk // MASK_BLOCK)
    inside = (vertical >= 0) & (vertical < nk)
    seen = marked(vertical[:, :, None] // MASK_BLOCK, inside[:, :, None], columns)
    # The keys of a slash in a row of blocks lie in two neighbouring blocks at most.
    first = torch.arange(rows, device=slash.device)[:, None] * MASK_BLOCK + (nk - nq)
    last = (first + MASK_BLOCK - 1).clamp(max=nk - 1)
    first, last = first - slash[:, :, None], last - slash[:, :, None]
    inside = (first < nk) & (last >= 0)
    for end in (first, last):
        seen = seen | marked(end.clamp(0, nk - 1) // MASK_BLOCK, inside, columns)
    return seen


@checked
def tile_order(canvas: Sequence[int], tile: Sequence[int]) -> Tensor:
    """The order of tokens in which each tile of a canvas is a run of neighbours, as sliding tile
    attention (STA) needs it.

    Args:
        canvas: frames, height and width in tokens.
        tile: the same of a tile, which divide those of the canvas.

    Returns:
        int64 ``(tokens,)``: ``x[..., order, :]`` has the tokens of x tile after tile.

    Raises:
        ValueError: tiles that do not fill the canvas.
    """
    counts = _tiles_of(canvas, tile)
    split = [size for pair in zip(counts, tile, strict=True) for size in pair]
    tokens = torch.arange(canvas[0] * canvas[1] * canvas[2], device="cpu").reshape(split)
    return tokens.permute(0, 2, 4, 1, 3, 5).flatten()


@checked
def sliding_tiles(
    canvas: Sequence[int],
    tile: Sequence[int],
    windows: Sequence[Sequence[int]],
    *,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Each tile of a canvas sees the tiles in a window around it, which stays inside of the canvas,
    as sliding tile attention (STA) has it. Tokens are in the order of `tile_order`.

    Args:
        canvas: frames, height and width in tokens.
        tile: the same of a tile, which divide those of the canvas.
        windows: for each head of q, or one for all, the same of its window in tiles, odd numbers.
        device: where the result lies; default the CPU.

    Returns:
        Options of `archflash.attention`, as `from_block_lists`, for all sequences.

    Raises:
        ValueError: tiles that do not fill the canvas, or a window of another size.
    """
    counts = _tiles_of(canvas, tile)
    if len(windows) == 0 or not all(
        hasattr(window, "__len__")
        and len(window) == 3
        and all(size > 0 and size % 2 == 1 for size in window)
        for window in windows
    ):
        raise ValueError(
            f"windows are {list(windows)}: it must be a list, of each head, of three odd numbers "
            "of tiles"
        )
    heads = []
    for window in windows:
        axes = []
        for count, size in zip(counts, window, strict=True):
            half = size // 2
            at = torch.arange(count, device=device or "cpu")
            centre = at.clamp(half, max(half, count - 1 - half))
            axes.append((at - centre[:, None]).abs() <= half)
        t, h, w = axes
        seen = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None, :]
        tiles = counts[0] * counts[1] * counts[2]
        heads.append(seen.reshape(tiles, tiles))
    tokens, size = canvas[0] * canvas[1] * canvas[2], tile[0] * tile[1] * tile[2]
    return _options(torch.stack(heads)[None], (size, size), tokens, tokens, None)


def _tiles_of(canvas: Sequence[int], tile: Sequence[int]) -> list[int]:
    if (
        len(canvas) != 3
        or len(tile) != 3
        or any(n <= 0 or size % n for size, n in zip(canvas, tile, strict=True))
    ):
        raise ValueError(
            f"canvas {tuple(canvas)} and tile {tuple(tile)}: each must be three numbers, those of "
            "the tile divisors of those of the canvas; fill the canvas up"
        )
    return [size // n for size, n in zip(canvas, tile, strict=True)]


def _blocks_of(block_size: tuple[int, int], nq: int, nk: int) -> tuple[int, int]:
    """Rows and columns of blocks."""
    if not all(SMALLEST_BLOCK <= size <= LARGEST_BLOCK for size in block_size):
        raise ValueError(
            f"block_size is ({block_size[0]}, {block_size[1]}): both must be "
            f"{SMALLEST_BLOCK} to {LARGEST_BLOCK}; make a table of larger ones with from_blocks"
        )
    return -(-nq // block_size[0]), -(-nk // block_size[1])


def marked(indices: Tensor, counts: Tensor, columns: int) -> Tensor:
    """Bool tables in which the indices that count are True, those of the last dimension of each."""
    counts = counts & (indices >= 0) & (indices < columns)
    place = torch.where(counts, indices, columns).long()  # others: a column that is dropped
    table = torch.zeros(*place.shape[:-1], columns + 1, dtype=torch.bool, device=place.device)
    return table.scatter(-1, place, True)[..., :columns]


def _options(
    table: Tensor, block_size: tuple[int, int], nq: int, nk: int, key_sizes: Tensor | None
) -> dict[str, Tensor]:
    """The options of a bool table of blocks."""
    rows, keys = block_size
    if key_sizes is not None:
        if key_sizes.shape != (-(-nk // keys),):
            raise ValueError(
                f"key_sizes has shape {tuple(key_sizes.shape)}: it must be ({-(-nk // keys)},)"
            )
        place = torch.arange(nk, device=table.device)
        tokens = place % keys < key_sizes.to(table.device)[place // keys]
    if rows % MASK_BLOCK == 0 and keys % MASK_BLOCK == 0:
        fine = from_blocks(table, block_size, nq, nk)
        if key_sizes is None:
            return {"block_mask": fine}
        of_keys = summarize_mask(tokens[None])  # one row of blocks, for all
        return {"block_mask": fine * of_keys, "attn_mask": tokens[None, None, None]}
    mask = table.repeat_interleave(rows, 2)[:, :, :nq].repeat_interleave(keys, 3)[..., :nk]
    if key_sizes is not None:
        mask = mask & tokens
    return {"attn_mask": mask, "block_mask": summarize_mask(mask)}


def _scattered(counts: Tensor, indices: Tensor, columns: int, value: int) -> Tensor:
    """An int8 table with `value` at the first counts[...] of indices[..., :] in each row."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return marked(indices, listed, columns).to(torch.int8) * value


def _by_block(x: Tensor, *, fill: bool) -> Tensor:
    """``(B, H, nq, nk)`` as ``(B, H, rows of blocks, 64, columns of blocks, 64)``, filled up."""
    nq, nk = x.shape[-2:]
    x = torch.nn.functional.pad(x, (0, -nk % MASK_BLOCK, 0, -nq % MASK_BLOCK), value=fill)
    rows, columns = (size // MASK_BLOCK for size in x.shape[-2:])
    return x.reshape(*x.shape[:2], rows, MASK_BLOCK, columns, MASK_BLOCK)
