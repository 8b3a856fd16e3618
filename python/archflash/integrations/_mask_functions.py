"""What the mask functions of transformers stand for, without a number for each query and key.

transformers says which keys a query sees by a function of their indices, put together from a few
known ones: causal, windows, chunks, blocks of image tokens, packed documents, and their unions and
intersections. Here such a function becomes one of these:

- a `Rule`, which `archflash.attention` has options for;
- a rule inside of documents;
- up to four ranges of keys for each query (key_ranges), in closed form: nothing of the size of
  queries times keys is computed.

Known functions are told by their code, so a function of the same name by somebody else is unknown.
This module knows transformers' functions only by `register`, and so needs no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archflash._archflash import MOST_RANGES
from archflash.masks import documents

MaskFunction = Callable[..., Any]

CAUSAL = "causal"  # k <= q
ALL = "all"
WINDOW = "window"  # q - sliding_window < k
WINDOW_BOTH_WAYS = "window both ways"  # |q - k| <= sliding_window
CHUNKS = "chunks"  # positions behind left_padding are cut into chunks of chunk_size
BLOCKS = "blocks"  # the same number in block_sequence_ids, but for negative ones
DOCUMENTS = "documents"  # the same number in packed_sequence_mask
RENUMBERED = "renumbered"  # mask_function of the positions in position_ids
AND = "and"
OR = "or"

_kinds: dict[CodeType, str] = {}


def register(kind: str, function: MaskFunction) -> None:
    """Makes functions of the code of `function` known as those of a kind."""
    _kinds[function.__code__] = kind


class Rule(NamedTuple):
    """Which keys a query sees, by position: ``k <= q`` where causal, and ``q - left <= k <= q +
    right`` where these are given.
    """

    causal: bool
    left: int | None = None
    right: int | None = None


class Ranges(NamedTuple):
    """The keys from begin up to end, both int64 ``(batch or 1, queries)``."""

    begin: Tensor
    end: Tensor


_FAR = 1 << 30  # beyond every position


def rule_of(function: MaskFunction) -> Rule | None:
    """The rule that a mask function stands for; None if it is of another kind."""
    kind, made_of = _parts(function)
    if kind == CAUSAL:
        return Rule(True)
    if kind == ALL:
        return Rule(False)
    size = made_of.get("sliding_window")
    if kind in (WINDOW, WINDOW_BOTH_WAYS) and isinstance(size, int) and size > 0:
        return Rule(False, size - 1) if kind == WINDOW else Rule(False, size, size)
    if kind != AND:
        return None
    together = Rule(False)
    for part in made_of["mask_functions"]:
        rule = rule_of(part)
        if rule is None:
            return None
        together = _both(together, rule)
    return together


def rule_in_documents(function: MaskFunction) -> tuple[Rule, Tensor] | None:
    """The rule that holds inside of each document, and the numbers of documents ``(batch, n)``,
    where tokens of one number stand side by side; None if the function is of another kind.

    Positions may start anew in each document, as a rule looks at differences of positions only.
    """
    numbers: list[Tensor] = []
    rule = Rule(False)
    for part in _all_of(function):
        kind, made_of = _parts(part)
        if kind == DOCUMENTS:
            numbers.append(made_of["packed_sequence_mask"])
            continue
        inner = made_of["mask_function"] if kind == RENUMBERED else part
        of_part = rule_of(inner)
        if of_part is None:
            return None
        rule = _both(rule, of_part)
    if len(numbers) != 1:
        return None
    for part in _all_of(function):
        kind, made_of = _parts(part)
        if kind == RENUMBERED and not _counts_on(made_of["position_ids"], numbers[0]):
            return None
    rows = torch.arange(numbers[0].shape[1], device=numbers[0].device)[None]
    return None if _of_number(numbers[0], rows, None) is None else (rule, numbers[0])


def _all_of(function: MaskFunction) -> list[MaskFunction]:
    """The functions of which a function is the intersection."""
    kind, made_of = _parts(function)
    if kind != AND:
        return [function]
    return [part for inner in made_of["mask_functions"] for part in _all_of(inner)]


def _both(one: Rule, other: Rule) -> Rule:
    lefts = [side for side in (one.left, other.left) if side is not None]
    rights = [side for side in (one.right, other.right) if side is not None]
    return Rule(
        one.causal or other.causal, min(lefts) if lefts else None, min(rights) if rights else None
    )


def ranges_of(function: MaskFunction, positions: Tensor) -> list[Ranges] | None:
    """The keys that each query sees, as a union of at most four ranges; None if the function is of
    a kind that has no such form, or some block of it is in several pieces.

    Args:
        function: a mask function.
        positions: those of the queries, int64 ``(queries,)``.
    """
    found = _ranges(function, positions[None], positions[None], None)
    return found if found is not None and len(found) <= MOST_RANGES else None


def _parts(function: MaskFunction) -> tuple[str | None, dict[str, Any]]:
    """The kind of a mask function, None if it is unknown, and what it was made of."""
    code: CodeType | None = getattr(function, "__code__", None)
    kind = None if code is None else _kinds.get(code)
    if code is None or kind is None:
        return None, {}
    cells = function.__closure__ or ()
    return kind, dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _ranges(
    function: MaskFunction, row: Tensor, position: Tensor, within: Tensor | None
) -> list[Ranges] | None:
    """`ranges_of` in the numbering of `position`, for the queries `row` of tensors that have an
    entry for each token; both (batch or 1, queries). `within` are documents that the result is
    intersected with.
    """
    kind, made_of = _parts(function)
    if kind in (CAUSAL, ALL, WINDOW, WINDOW_BOTH_WAYS):
        rule = rule_of(function)
        if rule is None:
            return None
        begin = torch.full_like(position, -_FAR) if rule.left is None else position - rule.left
        end = torch.full_like(position, _FAR) if rule.right is None else position + rule.right + 1
        return [Ranges(begin, torch.minimum(end, position + 1) if rule.causal else end)]
    if kind == CHUNKS:
        size, skipped = made_of["chunk_size"], made_of["left_padding"].long()[:, None]
        begin = (position - skipped).div(size, rounding_mode="floor") * size + skipped
        return [Ranges(begin, begin + size)]
    if kind == BLOCKS:
        ids = made_of["block_sequence_ids"]
        found = _of_number(ids, row, ids >= 0)
        return None if found is None else [found]
    if kind == DOCUMENTS:
        found = _of_number(made_of["packed_sequence_mask"], row, None)
        return None if found is None else [found]
    if kind == RENUMBERED:
        # Positions run on inside of a document, so that a range of them is a range of rows.
        numbers = made_of["position_ids"]
        if within is None or not _counts_on(numbers, within):
            return None
        own = numbers.long().gather(1, row.expand(len(numbers), -1))
        inner = _ranges(made_of["mask_function"], row, own, None)
        if inner is None:
            return None
        return [Ranges(begin + row - own, end + row - own) for begin, end in inner]
    if kind == OR:
        union: list[Ranges] = []
        for part in made_of["mask_functions"]:
            found_part = _ranges(part, row, position, within)
            if found_part is None:
                return None
            union += found_part
        return union
    if kind == AND:
        functions = made_of["mask_functions"]
        for part in functions:
            part_kind, part_made_of = _parts(part)
            if part_kind == DOCUMENTS:
                within = part_made_of["packed_sequence_mask"]
        common: list[Ranges] | None = None
        for part in functions:
            found_part = _ranges(part, row, position, within)
            if found_part is None:
                return None
            common = found_part if common is None else intersected(common, found_part)
        return common
    return None


def intersected(some: list[Ranges], others: list[Ranges]) -> list[Ranges]:
    """The intersection of two unions of ranges."""
    return [
        Ranges(torch.maximum(a.begin, b.begin), torch.minimum(a.end, b.end))
        for a in some
        for b in others
    ]


def _of_number(ids: Tensor, row: Tensor, seen: Tensor | None) -> Ranges | None:
    """The tokens that have the number of a query's own, or none where the query's is not `seen`.
    None if those of one number do not stand side by side: this is read on the host.
    """
    if row.shape[1] == 0 or ids.shape[1] == 0:
        return None
    counts = torch.ones_like(ids, dtype=torch.bool) if seen is None else seen
    starts, ordered = torch.ones_like(counts), ids.sort(1)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    distinct = torch.ones_like(counts)
    distinct[:, 1:] = ordered.values[:, 1:] != ordered.values[:, :-1]
    distinct &= counts.gather(1, ordered.indices)
    in_one_piece = (starts & counts).sum() == distinct.sum()
    fits = row[:, -1].max() < ids.shape[1]
    if not bool(in_one_piece & fits):
        return None
    row = row.expand(len(ids), -1)
    runs = documents(ids)[:, 0, :, 0].long()
    begin, end = (runs[..., side].gather(1, row) for side in range(2))
    if seen is not None:
        end = torch.where(seen.gather(1, row), end, begin)
    return Ranges(begin, end)


def _counts_on(positions: Tensor, ids: Tensor) -> bool:
    """Whether positions grow by 1 from token to token inside of each document. It is read on the
    host."""
    if positions.shape != ids.shape:
        return False
    steps = positions[:, 1:] - positions[:, :-1]
    # Documents of the same number that do not stand side by side are found by _of_number.
    return bool(((steps == 1) | (ids[:, 1:] != ids[:, :-1])).all())
