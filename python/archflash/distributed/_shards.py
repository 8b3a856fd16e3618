"""Which rows of a sequence each rank of a group holds, and tensors cut and put together by it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed._moving import deal_apart
from archflash.distributed._pieces import Piece, joined


@dataclass(frozen=True)
class Shards:
    """Which global rows each rank holds, and in which order.

    Attributes:
        n: number of rows of the whole sequence.
        pieces: for each rank half-open ranges of global rows, in the order of its local rows. Every
            row belongs to one rank.
    """

    n: int
    pieces: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        at = 0
        for start, end in sorted(piece for rank in self.pieces for piece in rank):
            if start != at or end <= start:
                raise ValueError(
                    f"the shards hold rows {start} to {end} after row {at}: every row from 0 to "
                    f"{self.n} must belong to one rank, and no piece may be empty"
                )
            at = end
        if at != self.n:
            raise ValueError(f"the shards hold {at} rows of {self.n}: each must belong to a rank")

    @staticmethod
    def contiguous(n: int, ranks: int) -> Shards:
        """Rank r holds the r-th of as many equal parts. Under a causal mask the last one has almost
        twice the mean of the work.
        """
        return Shards(n, tuple(_joined([_part(n, ranks, r)]) for r in range(ranks)))

    @staticmethod
    def zigzag(n: int, ranks: int) -> Shards:
        """Rank r holds the r-th part of twice as many, counted from the start, and the r-th from
        the end, which gives each rank the same work under a causal mask.
        """
        both = 2 * ranks
        return Shards(
            n,
            tuple(_joined([_part(n, both, r), _part(n, both, both - 1 - r)]) for r in range(ranks)),
        )

    @staticmethod
    def documents(cu_seqlens: Tensor | Sequence[int], ranks: int, causal: bool = True) -> Shards:
        """Whole documents, where work and rows of the ranks can be balanced so; else some of the
        longest are cut in zigzag over some ranks, those whose rows travel least.

        Args:
            cu_seqlens: where documents start, and the number of rows: ``(documents + 1,)``.
            ranks: how many ranks there are.
            causal: whether the work is that of a causal mask or of none.
        """
        ends = boundaries(cu_seqlens)
        documents = [d for d in itertools.pairwise(ends) if d[1] > d[0]]
        pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        dealt = deal_apart([end - start for start, end in documents], ranks, causal)
        for (start, _), held in zip(documents, dealt, strict=True):
            for rank, some in held.items():
                pieces[rank] += [(start + a, start + b) for a, b in some]
        return Shards(ends[-1], tuple(map(_joined, pieces)))

    @staticmethod
    def of_positions(positions: Sequence[Tensor]) -> Shards:
        """The shards whose rank r holds the global rows positions[r], integers ``(rows,)``."""
        made: list[tuple[Piece, ...]] = []
        for held in positions:
            held = held.detach().cpu().long()
            if held.ndim != 1:
                raise ValueError(f"positions have shape {tuple(held.shape)}: it must be (rows,)")
            if not len(held):
                made.append(())
                continue
            breaks = (held[1:] != held[:-1] + 1).nonzero().flatten() + 1
            starts = torch.cat([held[:1], held[breaks]]).tolist()
            ends = torch.cat([held[breaks - 1], held[-1:]]).tolist()
            made.append(tuple((a, b + 1) for a, b in zip(starts, ends, strict=True)))
        return Shards(sum(len(held) for held in positions), tuple(made))

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def all_rows(self) -> list[int]:
        """How many rows each rank holds."""
        return [sum(end - start for start, end in pieces) for pieces in self.pieces]

    def rows(self, rank: int) -> int:
        """How many rows a rank holds."""
        return self.all_rows[rank]

    def positions(self, rank: int) -> Tensor:
        """The global rows of a rank, int64 ``(rows,)``, on the CPU."""
        return rows_of(self.pieces[rank])

    @functools.cached_property
    def digest(self) -> int:
        """A number of 63 bits that tells different shards apart."""
        return digest((self.n, self.pieces))

    @functools.cached_property
    def sorted(self) -> bool:
        """Whether each rank's rows are in ascending order."""
        return all(a[1] <= b[0] for rank in self.pieces for a, b in itertools.pairwise(rank))

    def in_order(self) -> Shards:
        """The same rows, those of each rank in ascending order."""
        return self if self.sorted else Shards(self.n, tuple(_joined(p) for p in self.pieces))

    def grouped(self, size: int) -> Shards:
        """The shards of groups of `size` neighbouring ranks, in ascending order."""
        together = [self.pieces[i : i + size] for i in range(0, self.ranks, size)]
        return Shards(self.n, tuple(_joined([p for r in held for p in r]) for held in together))


def digest(x: object) -> int:
    """A number of 63 bits that tells different values of plain data apart, in every process."""
    text = repr(x).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def digest_of_tensor(x: Tensor) -> int:
    """A number of 63 bits that tells different tensors on the CPU apart."""
    made = hashlib.blake2b(repr((tuple(x.shape), x.dtype)).encode(), digest_size=8)
    x = x.contiguous()
    if x.numel():
        made.update((ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr()))
    return int.from_bytes(made.digest(), "big") >> 1


def boundaries(cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    """cu_seqlens as numbers. A tensor on a GPU is waited for."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: it must be int32 "
                "(documents + 1,)"
            )
        ends: list[int] = cu_seqlens.tolist()
    else:
        ends = list(cu_seqlens)
    if not ends or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError("cu_seqlens must start with 0 and never fall")
    return ends


def _part(n: int, parts: int, i: int) -> Piece:
    return n * i // parts, n * (i + 1) // parts


def rows_of(pieces: Iterable[Piece]) -> Tensor:
    """The rows of some pieces, in their order, int64 on the CPU."""
    ranges = [torch.arange(start, end, device="cpu") for start, end in pieces]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device="cpu")


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces in ascending order, neighbours joined and empty ones left out."""
    return tuple(joined(sorted(pieces)))


def make(shards: Shards | str, n: int, ranks: int) -> Shards:
    """The shards of n rows that a name or a description says."""
    if isinstance(shards, Shards):
        if shards.ranks != ranks or shards.n != n:
            raise ValueError(
                f"shards are those of {shards.n} rows over {shards.ranks} ranks, but there are {n} "
                f"rows and the group has {ranks} ranks: make them for these"
            )
        return shards
    if shards in ("contiguous", "zigzag"):
        return _named(shards, n, ranks)
    raise ValueError(
        f"shards is {shards!r}: it must be 'contiguous', 'zigzag', Shards, which has documents, "
        "or a tensor of positions"
    )


@functools.lru_cache(64)  # the same in every layer of a step
def _named(name: str, n: int, ranks: int) -> Shards:
    return Shards.zigzag(n, ranks) if name == "zigzag" else Shards.contiguous(n, ranks)


def _for_group(shards: Shards | str, n: int, group: dist.ProcessGroup | None) -> tuple[Shards, int]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process does not belong to the group: call this on its ranks only")
    return make(shards, n, ranks), rank


def shard(
    x: Tensor, shards: Shards | str, *, dim: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The rows of a tensor that this rank holds. Nothing is sent.

    Args:
        x: the whole tensor, the same on every rank: tokens, labels, position ids, q, k or v.
        shards: `Shards`, "contiguous" or "zigzag".
        dim: the dimension of the rows.
        group: the process group; default the whole world.

    Returns:
        A new tensor of this rank's rows in the order of `shards`. It has gradients as a slice has.

    Raises:
        ValueError: another number of rows or ranks than the shards have.
    """
    held, rank = _for_group(shards, x.shape[dim], group)
    pieces = [x.narrow(dim, a, b - a) for a, b in held.pieces[rank]]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


def positions(
    n: int,
    shards: Shards | str,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The global rows that this rank holds, int64 ``(rows,)``: the position ids of its tokens where
    they are one sequence. Arguments as those of `shard`, which n rows would be given to.
    """
    held, rank = _for_group(shards, n, group)
    return held.positions(rank).to(device or "cpu")


def unshard(
    x: Tensor, shards: Shards | str, *, dim: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The whole tensor, on every rank, from the rows of all. It has no gradients.

    Args:
        x: this rank's rows, as `shard` gave them.
        shards, dim, group: as `shard` was given them.

    Raises:
        ValueError: another number of rows than the shards have, or a tensor that needs gradients.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires a gradient, and unshard has none: call it under no_grad()")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.zeros(ranks, dtype=torch.int64, device=x.device)
    counts[rank] = x.shape[dim]
    dist.all_reduce(counts, group=group)
    rows: list[int] = counts.tolist()
    held = make(shards, sum(rows), ranks)
    wanted = [held.rows(r) for r in range(ranks)]
    if rows != wanted:
        raise ValueError(f"the ranks hold {rows} rows, and by the shards {wanted}: pass these")
    local = x.movedim(dim, 0).contiguous()
    parts = [local.new_empty((max(rows), *local.shape[1:])) for _ in range(ranks)]
    padded = local.new_zeros(parts[0].shape)
    padded[: len(local)] = local
    dist.all_gather(parts, padded, group=group)
    whole = local.new_empty((held.n, *local.shape[1:]))
    for pieces, part in zip(held.pieces, parts, strict=True):
        at = 0
        for start, end in pieces:
            whole[start:end] = part[at : at + end - start]
            at += end - start
    return whole.movedim(0, dim).contiguous()
