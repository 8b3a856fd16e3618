"""What the functions of archflash.masks promise, one query and one key at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from archflash import masks
from tests.properties.drawing import Given
from tests.properties.making import Maker

Sees = Callable[[int, int, int], bool]  # (batch, query, key)


def check_mask(given: Given, make: Maker) -> None:
    """Raises AssertionError unless the mask of the drawn function shows what its rule says."""
    chance = random.Random(int(make.integers(0, 1 << 30, ())))
    nq, nk, batch, number = given["nq"], given["nk"], given["batch"], given["number"]
    first = nk - nq  # the position of query 0
    name = given["name"]
    if name == "summarize_mask":
        return _check_summary(given, make)
    if name in ("from_query_ranges", "from_flashmask"):
        return _check_columns(given, make)
    sees: Sees
    if name == "documents":
        ids = make.integers(0, 1 + number // 3, (batch, nk))
        nq, told = nk, ids.tolist()
        made = masks.documents(ids)

        def same(b: int, i: int, j: int) -> bool:
            low, high = sorted((i, j))
            return len(set(told[b][low : high + 1])) == 1

        sees = same
    elif name == "prefix_lm":
        lengths = [chance.randint(0, nk) for _ in range(batch)]
        made = masks.prefix_lm(make.int32(lengths), nq, nk)
        sees = lambda b, i, j: j < lengths[b] or j <= i + first  # noqa: E731
    elif name == "bidirectional_spans":
        ends = [sorted(chance.sample(range(nk + 1), min(2 * (number // 3), (nk + 1) // 2 * 2)))
                for _ in range(batch)]  # fmt: skip
        spans = [list(zip(x[::2], x[1::2], strict=True)) for x in ends]
        made = masks.bidirectional_spans(make.int32(spans).reshape(batch, -1, 2), nq, nk)

        def in_span(b: int, i: int, j: int) -> bool:
            place = i + first
            return j <= place or any(x <= place < y and j < y for x, y in spans[b])

        sees = in_span
    elif name == "sliding_window_with_global":
        left = chance.randint(0, 40)
        made = masks.sliding_window_with_global(
            nq, nk, left=left, global_keys=number, device=make.device
        )
        sees = lambda b, i, j: j <= i + first and (j < number or j >= i + first - left)  # noqa: E731
    else:
        parents: list[int] = []
        while len(parents) < nq:  # a depth-first walk, so that a node has few ranges
            parents.append(len(parents) - 1 if not parents or chance.random() < 0.9 else 0)
        if parents:
            parents[0] = -1
        past, above = first, [set[int]() for _ in parents]
        for node, parent in enumerate(parents):
            above[node] = {node} | (above[parent] if parent >= 0 else set())
        made = masks.tree(parents, past, device=make.device)
        sees = lambda b, i, j: j < past or j - past in above[i]  # noqa: E731
    dense = masks.to_dense(made, nk)
    shown = dense.expand(batch, 1, nq, nk).tolist() if nq else []
    for b in range(batch if nq else 0):
        for i in range(nq):
            wanted = [sees(b, i, j) for j in range(nk)]
            assert shown[b][0][i] == wanted, f"{name}: batch {b}, query {i} sees other keys"


def _check_columns(given: Given, make: Maker) -> None:
    """Masks by columns: key_ranges say the same, or the mask has more than four pieces."""
    nq, nk, batch, causal = given["nq"], given["nk"], given["batch"], given["causal"]
    row = torch.arange(nq, device=make.device)[:, None]
    if given["name"] == "from_query_ranges":
        bounds = make.integers(-2, nq + 3, (batch, 1, nk, given["number"] % 3, 2))
        begin, end = (bounds[..., i].transpose(2, 3)[:, :, :, None] for i in range(2))
        wanted = ((row >= begin) & (row < end)).any(2)
        shown = masks.query_ranges_to_dense(bounds, nq).expand_as(wanted)
        assert torch.equal(shown, wanted), "query_ranges_to_dense shows other keys"
        make_it = lambda: masks.from_query_ranges(bounds, nq)  # noqa: E731
    else:
        count = (1, 2)[given["number"] % 2] if causal else (2, 4)[given["number"] % 2]
        # Few different columns, so that rows have few pieces.
        columns = make.integers(0, nq + 1, (batch, 1, 2, count)).sort(-1).values
        bounds = columns.repeat_interleave(-(-nk // 2), 2)[:, :, :nk]
        if not causal and count == 2:  # from bound 0 on, and before bound 1
            bounds = bounds.flip(-1)
        b = [x[:, :, None] for x in bounds.unbind(-1)]
        if causal:
            hidden = (row >= b[0]) & (row < (b[1] if count == 2 else nq))
        elif count == 2:
            hidden = (row >= b[0]) | (row < b[1])
        else:
            hidden = ((row >= b[0]) & (row < b[1])) | ((row >= b[2]) & (row < b[3]))
        wanted = ~hidden
        make_it = lambda: masks.from_flashmask(bounds, nq, causal=causal)  # noqa: E731
    starts = wanted & ~torch.nn.functional.pad(wanted, (1, 0))[..., :-1]
    pieces = int(starts.sum(-1).max()) if starts.numel() else 0
    try:
        made = make_it()
    except ValueError as error:
        assert pieces > 4, error  # noqa: PT017
        assert str(pieces) in str(error), error  # noqa: PT017
        return
    assert pieces <= 4, f"{pieces} pieces are no error"
    shown = masks.to_dense(made, nk).expand_as(wanted)
    assert torch.equal(shown, wanted), f"{given['name']} shows other keys"


def _check_summary(given: Given, make: Maker) -> None:
    nq, nk, batch, number = given["nq"], given["nk"], given["batch"], given["number"]
    kept = make.uniform(batch, 1, nq, nk) < (1.0 if number < 4 else 0.999 if number < 7 else 0.0)
    mask = kept if given["causal"] else torch.where(kept, 0.0, -math.inf)
    made = masks.summarize_mask(mask)
    assert made.shape == (batch, 1, -(-nq // 64), -(-nk // 64))
    for b in range(batch):
        for i in range(made.shape[2]):
            for j in range(made.shape[3]):
                block = kept[b, 0, 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
                wanted = 2 if bool(block.all()) else int(bool(block.any()))
                assert int(made[b, 0, i, j]) == wanted, f"block {b, i, j}"
