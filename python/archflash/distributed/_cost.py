"""What a method costs each rank: bytes, work, memory, and the time that a simple model expects.

The model counts the products of seen pairs at one speed, messages at another, and passes over
partial outputs at a third. It says which method to prefer, not how long a call takes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from archflash.distributed._heads import Split
from archflash.distributed._mask import Mask, overlaps, seen
from archflash.distributed._pieces import Piece
from archflash.distributed._shards import Shards

METHODS = ("all-gather", "ring", "ulysses", "hybrid")
_SHARED_SECONDS = 2.5e-3  # of work, at least, for one more share of the heads
_SHORT_SECONDS = 5e-3  # of work, at most, of a call in which the host's time counts
_ALONE_SECONDS = 5e-5  # of work, at least, of rows that are computed while messages travel
# What several shares cost of the work, with a mask and without: they have fewer tiles, and NCCL's
# kernel takes some SMs from them (four H200s).
_SHARING_COSTS = {True: 0.02, False: 0.06}


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: batch, heads, columns, and bytes of an element."""

    batch: int
    heads_q: int
    heads_kv: int
    d: int
    dv: int
    element_bytes: int

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shape:
        """Of tensors "bhnd"."""
        batch, heads_q, _, d = q.shape
        return Shape(batch, heads_q, k.shape[1], d, v.shape[3], q.element_size())


@dataclass(frozen=True)
class Speeds:
    """What the model reckons with.

    Attributes:
        flops: operations a second of a kernel.
        link: bytes a second that a rank sends and, at the same time, receives.
        memory: bytes a second of a pass over tensors.
        call: seconds of one stage beside its work.
        room: bytes of buffers that a rank has for keys of others.
    """

    flops: float = 600e12
    link: float = 300e9
    memory: float = 3e12
    call: float = 20e-6
    room: float = 8e9


@dataclass(frozen=True)
class Estimate:
    """What the model says of a method for the forward pass.

    Attributes:
        method: its name.
        pairs: pairs of a query row and a key that it sees, for all heads, of each rank.
        sent, received: bytes of each rank.
        buffer_bytes: the largest buffers of a rank for keys of others.
        seconds: of the slowest rank.
        reason: why it cannot be taken, or is not preferred; empty if nothing speaks against it.
    """

    method: str
    pairs: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    buffer_bytes: int
    seconds: float
    reason: str = ""

    @property
    def balance(self) -> float:
        """The most work of a rank over the mean of all."""
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean if mean else 1.0

    def __str__(self) -> str:
        largest = max(map(sum, zip(self.sent, self.received, strict=True)))
        text = (
            f"{self.method:10}  {self.seconds * 1e3:9.3f} ms  balance {self.balance:5.3f}  "
            f"sent and received {largest / 1e6:10.1f} MB  buffers {self.buffer_bytes / 1e6:9.1f} MB"
        )
        return f"{text}  ({self.reason})" if self.reason else text


@dataclass(frozen=True)
class Explanation:
    """The estimates of all methods; `str` of it is a table.

    Attributes:
        chosen: the method that "auto" takes.
        shards: who holds which rows.
        estimates: by method, the expected fastest first.
    """

    chosen: str
    shards: Shards
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        rows = [self.shards.rows(r) for r in range(self.shards.ranks)]
        lines = [
            f"{self.shards.n} rows on {self.shards.ranks} ranks, {min(rows)} to {max(rows)} each: "
            f"{self.chosen}"
        ]
        return "\n".join([*lines, *(f"  {estimate}" for estimate in self.estimates)])


def pairs_of(mask: Mask, pieces: Sequence[Piece]) -> int:
    """How many pairs of a row of these pieces and a key that it sees there are."""
    if mask.key_ranges is None:
        return sum(mask.pairs(*cut) for piece in pieces for cut in mask.documents(piece))
    total = 0
    for start, end in pieces:
        ranges = mask.row_ranges(torch.arange(start, end, device="cpu"))
        ranges = ranges.gather(3, ranges[..., :1].argsort(3).expand(ranges.shape))
        reached = torch.cummax(ranges[..., 1], 3).values
        before = torch.nn.functional.pad(reached[..., :-1], (1, 0))
        fresh = (ranges[..., 1] - torch.maximum(ranges[..., 0], before)).clamp(min=0)
        total += int(fresh.sum()) // (ranges.shape[0] * ranges.shape[1])
    return total


def traffic(shards: Shards, mask: Mask) -> tuple[list[int], list[int]]:
    """How many rows of k and v each rank sends and receives, if each gets what it sees."""
    turns: dict[int, int] = {}
    received = []
    wanted = [seen(mask, pieces) if pieces else [] for pieces in shards.pieces]
    for ranges, pieces in zip(wanted, shards.pieces, strict=True):
        own = sum(b - a for a, b in overlaps(ranges, pieces))
        received.append(sum(b - a for a, b in ranges) - own)
        for a, b in ranges:
            turns[a], turns[b] = turns.get(a, 0) + 1, turns.get(b, 0) - 1
    # Between two edges a row is wanted by the same number of ranks.
    edges = sorted({0, shards.n, *turns, *(x for p in shards.pieces for piece in p for x in piece)})
    places = {edge: i for i, edge in enumerate(edges)}
    sums, count = [0], 0
    for a, b in itertools.pairwise(edges):
        count += turns.get(a, 0)
        sums.append(sums[-1] + count * (b - a))
    sent = []
    for ranges, pieces in zip(wanted, shards.pieces, strict=True):
        every = sum(sums[places[b]] - sums[places[a]] for a, b in pieces)
        sent.append(every - sum(b - a for a, b in overlaps(ranges, pieces)))
    return sent, received


def head_shares(
    shards: Shards, mask: Mask, shape: Shape, speeds: Speeds, *, back: bool = False
) -> tuple[Piece, ...]:
    """Shares of the heads of k and v for all-gather: while one is computed, the next one's keys
    travel, and in the backward pass the gradients of the one before. The first one is a quarter,
    because its keys are waited for, and in the backward pass the last one, because its gradients
    are; the rest is one share, unless buffers are too large. One share is all where that hides too
    little.
    """
    heads, seconds = shape.heads_kv, _slowest(shards, mask, shape, speeds)
    widths = shape.element_bytes
    if back:
        seconds, widths = seconds * 2.5 / 2, widths + max(4, shape.element_bytes)
    row = shape.batch * (shape.d + shape.dv) * widths
    rows = max(1, *traffic(shards, mask)[1])
    hidden = 0.75 * rows * row * heads / speeds.link
    masked = any(x is not None for x in (mask.left, mask.right, mask.ends, mask.key_ranges))
    shared = seconds > _SHARED_SECONDS and hidden > _SHARING_COSTS[masked] * seconds
    if not shared and rows * row * heads <= speeds.room:
        return ((0, heads),)
    most = max(1, int(speeds.room / (2 * row * rows)))  # of two shares at a time
    first = min(-(-heads // 4), most) if shared else 0
    last = max(first, heads - first) if back else heads
    edges = sorted({0, first, *range(first, last, most), last, heads})
    return tuple(itertools.pairwise(edges))


def is_short(shards: Shards, mask: Mask, shape: Shape, speeds: Speeds) -> bool:
    """Whether messages that the host starts as one are worth a copy of the keys more."""
    return _slowest(shards, mask, shape, speeds) < _SHORT_SECONDS


def least_alone(shape: Shape, speeds: Speeds) -> float:
    """Pairs of a row and a key whose work is worth a call beside messages."""
    return _ALONE_SECONDS / max(1e-30, shape.heads_q * _seconds(1, shape, speeds))


def _slowest(shards: Shards, mask: Mask, shape: Shape, speeds: Speeds) -> float:
    pairs = max(pairs_of(mask, pieces) for pieces in shards.pieces) * shape.heads_q
    return _seconds(pairs, shape, speeds)


def explain(
    shards: Shards, mask: Mask, shape: Shape, speeds: Speeds, sizes: tuple[int, int] | None = None
) -> Explanation:
    """The estimates of all methods. sizes: those of a mesh, outer and inner."""
    estimates = [_gathering("all-gather", shards, mask, shape, speeds)]
    estimates.append(_gathering("ring", shards, mask, shape, speeds))
    estimates.append(_ulysses(shards, mask, shape, speeds))
    if sizes is not None:
        estimates = [_hybrid(shards, mask, shape, speeds, sizes)]
    estimates.sort(key=lambda e: (bool(e.reason), e.seconds))
    return Explanation(estimates[0].method, shards, tuple(estimates))


def _seconds(pairs: int, shape: Shape, speeds: Speeds) -> float:
    return 2.0 * pairs * shape.batch * (shape.d + shape.dv) / speeds.flops


def _gathering(
    method: str, shards: Shards, mask: Mask, shape: Shape, speeds: Speeds
) -> Estimate:  # fmt: skip
    row = shape.batch * shape.heads_kv * (shape.d + shape.dv) * shape.element_bytes
    sent, received = ([x * row for x in rows] for rows in traffic(shards, mask))
    pairs = [pairs_of(mask, pieces) * shape.heads_q for pieces in shards.pieces]
    ranks, slowest, reason = shards.ranks, 0.0, ""
    shares = head_shares(shards, mask, shape, speeds)
    waited = shares[0][1] / max(1, shape.heads_kv)  # the share of keys that nothing hides
    largest = max(end - start for start, end in shares) / max(1, shape.heads_kv)
    for r in range(ranks):
        work = _seconds(pairs[r], shape, speeds)
        travel = max(sent[r], received[r]) / speeds.link
        if method == "ring":
            # The first stage has the rank's own keys; later ones are merged in float32.
            passes = 3 * 4 * shape.batch * shape.heads_q * shape.dv * shards.rows(r)
            stages = min(ranks, 1 + -(-received[r] * ranks // max(1, row * shards.n)))
            merging = (stages - 1) * passes / speeds.memory if received[r] else 0.0
            time = max(work, travel) + merging + stages * speeds.call
        else:
            time = max(work, travel) + min(work, travel) * waited + len(shares) * speeds.call
        slowest = max(slowest, time)
    if method == "ring":
        most = 3 * max(shards.rows(r) for r in range(ranks)) * row
    else:
        most = int(max(received, default=0) * min(1, 2 * largest))
        if most > speeds.room:
            reason = f"its buffers are larger than {speeds.room / 1e9:.1f} GB"
    return Estimate(method, tuple(pairs), tuple(sent), tuple(received), most, slowest, reason)


def _ulysses(shards: Shards, mask: Mask, shape: Shape, speeds: Speeds) -> Estimate:
    split = Split.make(shape.heads_q, shape.heads_kv, shards.ranks)
    total = sum(pairs_of(mask, pieces) for pieces in shards.pieces)
    rows, sent, received, pairs = shards.n, [], [], []
    at_rank = [
        (end - first) * (shape.d + shape.dv) + len(kv) * (shape.d + shape.dv)
        for (first, end), kv in zip(split.of_q, split.of_kv, strict=True)
    ]
    every = sum(at_rank)
    for r, (first, end) in enumerate(split.of_q):
        held = shards.rows(r)
        one = shape.batch * shape.element_bytes
        sent.append(one * held * (every - at_rank[r]))
        received.append(one * (rows - held) * at_rank[r])
        pairs.append(total * (end - first))
    seconds = max(
        _seconds(p, shape, speeds) + max(s, t) / speeds.link + 4 * speeds.call
        for p, s, t in zip(pairs, sent, received, strict=True)
    )
    reason = "" if shape.heads_q >= shards.ranks else f"{shape.heads_q} heads leave ranks idle"
    buffers = shape.batch * shape.element_bytes * rows * max(at_rank)
    return Estimate("ulysses", tuple(pairs), tuple(sent), tuple(received), buffers, seconds, reason)


def _hybrid(
    shards: Shards, mask: Mask, shape: Shape, speeds: Speeds, sizes: tuple[int, int]
) -> Estimate:
    """Ulysses inside, a ring across: the sums of both."""
    inner = sizes[1]
    heads = dataclasses.replace(
        shape, heads_q=-(-shape.heads_q // inner), heads_kv=max(1, -(-shape.heads_kv // inner))
    )
    across = _gathering("ring", shards.grouped(inner), mask, heads, speeds)
    inside = _ulysses(
        Shards.contiguous(shards.n // max(1, sizes[0]), inner), Mask(shards.n // max(1, sizes[0])),
        shape, speeds,
    )  # fmt: skip
    travel = max(map(max, inside.sent, inside.received)) / speeds.link
    sent = tuple(across.sent[r // inner] + inside.sent[r % inner] for r in range(shards.ranks))
    received = tuple(
        across.received[r // inner] + inside.received[r % inner] for r in range(shards.ranks)
    )
    pairs = tuple(across.pairs[r // inner] for r in range(shards.ranks))
    buffers = across.buffer_bytes + inside.buffer_bytes
    return Estimate("hybrid", pairs, sent, received, buffers, across.seconds + travel)
