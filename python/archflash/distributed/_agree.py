"""The ranks of a call agree on it before anything is sent, or all of them raise an error.

Each rank tells the others a few numbers through the CPU, which no GPU waits for: by sockets on one
host, by gloo on several. A rank whose arguments are refused says so, too, so that no other one
waits for its keys.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from archflash._errors import (
    ArchflashError,
    ForcedImplementationError,
    NotCompiledError,
    UnsupportedError,
)
from archflash.distributed._neighbours import Neighbours, meet

_KINDS: tuple[type[Exception], ...] = (
    ValueError, TypeError, UnsupportedError, ForcedImplementationError, NotCompiledError,
    RuntimeError,
)  # fmt: skip


@dataclass
class _Beside:
    """What the ranks of a group agree through.

    Attributes:
        gloo: None for a group that sends tensors on the CPU itself: it must not keep itself alive.
        neighbours: None where ranks are on several hosts.
    """

    gloo: Any
    neighbours: Neighbours | None = None


_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, _Beside] = weakref.WeakKeyDictionary()
# Groups that are of no use any more, and why.
_given_up: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class GroupError(ArchflashError, RuntimeError):
    """Ranks of a group called archflash.distributed with what does not fit together, or one of them
    did not come.
    """


@dataclass(frozen=True)
class Statement:
    """What a rank says of its call.

    Attributes:
        rows: how many rows it has.
        call: all that must be the same on every rank, in words.
        trouble: why its arguments are refused; None if they are not.
    """

    rows: int
    call: str
    trouble: Exception | None = None


def agree(
    groups: Sequence[dist.ProcessGroup | None], statement: Statement, digest: int
) -> list[int]:
    """Waits for the other ranks, and returns how many rows each has.

    Args:
        groups: the groups of the mesh, the innermost first: the ranks of all of them together are
            counted in that order.
        statement: of this rank.
        digest: of statement.call.

    Raises:
        ValueError, TypeError, UnsupportedError, GroupError: the same on all ranks.
    """
    bad = statement.trouble is not None
    said: list[tuple[int, ...]] = [(int(bad), statement.rows, digest)]
    for group in groups:
        said = _gathered(group, said)
    return _agreed(groups, statement, said)


class Agreement:
    """What `agree` returns or raises, which may be asked for later than this rank tells the others
    about its call: meanwhile it does what sends nothing. At the end of the context it has been
    asked for, so that no answer is left to the next call.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup | None], statement: Statement, digest: int
    ) -> None:
        """The arguments of `agree`. The statement is of a rank that refuses nothing."""
        self.check: Callable[[list[int]], object] = len  # of how many rows the ranks have
        self._groups, self._statement, self._digest = groups, statement, digest
        self._said = array("q", (0, statement.rows, digest)).tobytes()
        self._rows: list[int] | None = None
        self._is_over = False
        self._neighbours: Neighbours | None = None
        if len(groups) == 1:
            with _or_given_up(groups[0]):
                self._neighbours = _beside_of(groups[0]).neighbours
                if self._neighbours is not None:
                    self._neighbours.say(self._said)

    def rows(self) -> list[int]:
        """How many rows each rank has."""
        if self._rows is None:
            self._is_over = True
            if self._neighbours is None:
                self._rows = agree(self._groups, self._statement, self._digest)
            else:
                with _or_given_up(self._groups[0]):
                    said = array("q", b"".join(self._neighbours.hear(self._said)))
                all_said = list(zip(said[::3], said[1::3], said[2::3], strict=True))
                self._rows = _agreed(self._groups, self._statement, all_said)
            self.check(self._rows)
        return self._rows

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_over:
            return
        if error is None or isinstance(error, Exception):
            self.rows()
            return
        for group in self._groups:  # Ctrl-C waits for no one
            _given_up[_whole(group)] = type(error).__name__


def _agreed(
    groups: Sequence[dist.ProcessGroup | None],
    statement: Statement,
    said: Sequence[tuple[int, ...]],
) -> list[int]:
    """What follows from what the ranks said: whether they refuse, rows, and digests."""
    if all(row[0] == 0 and row[2] == said[0][2] for row in said):
        return [row[1] for row in said]
    texts = [_in_words(statement)]
    for group in groups:
        texts = _gathered_texts(group, texts)
    for rank, text in enumerate(texts):
        kind, _, sentence = text.partition(":")
        if kind.isdigit():
            raise _KINDS[int(kind)](f"rank {rank} of the group: {sentence}") from statement.trouble
    # The rank to name is one that differs from most.
    usual = max(texts, key=texts.count)
    rank = next(r for r, text in enumerate(texts) if text != usual)
    raise GroupError(
        f"rank {rank} of the group calls {texts[rank][1:]}, but rank {texts.index(usual)} calls "
        f"{usual[1:]}: every rank must make the same calls in the same order"
    )


def _in_words(statement: Statement) -> str:
    trouble = statement.trouble
    if trouble is None:
        return f":{statement.call}"
    kind = next((i for i, kind in enumerate(_KINDS) if isinstance(trouble, kind)), len(_KINDS) - 1)
    return f"{kind}:{trouble}"


def _gathered(
    group: dist.ProcessGroup | None, rows: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The rows of all ranks of a group, in the order of the ranks."""
    flat = array("q", itertools.chain.from_iterable(rows))
    size = flat.itemsize * len(flat)
    width = len(rows[0])
    with _or_given_up(group):
        neighbours = _beside_of(group).neighbours
        if neighbours is not None and neighbours.takes(size):
            said = array("q", b"".join(neighbours.gather(flat.tobytes())))
        else:
            mine = torch.tensor(flat, dtype=torch.int64, device="cpu")
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            _all_gather(group, parts, mine)
            said = array("q", torch.cat(parts).tolist())
    return [tuple(said[i : i + width]) for i in range(0, len(said), width)]


@contextlib.contextmanager
def _or_given_up(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes errors between the ranks a GroupError. From then on the group is given up: what others
    still send for this call must not be taken for the next one's.
    """
    whole = _whole(group)
    if whole in _given_up:
        raise GroupError(
            "the group was given up in an earlier call of archflash.distributed, make a new one "
            f"(torch.distributed.new_group) to go on: {_given_up[whole]}"
        )
    try:
        yield
    except (GroupError, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # a KeyboardInterrupt, too
        _given_up[whole] = str(error) or type(error).__name__
        if not isinstance(error, (RuntimeError, OSError)):
            raise
        raise GroupError(
            "not all ranks of the group came to this call of archflash.distributed, make a new "
            f"group (torch.distributed.new_group) to go on: {error}"
        ) from error


def _gathered_texts(group: dist.ProcessGroup | None, texts: Sequence[str]) -> list[str]:
    mine = "\0".join(texts).encode()
    lengths = [row[0] for row in _gathered(group, [(len(mine),)])]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in lengths]
    with _or_given_up(group):
        _all_gather(group, parts, padded)
    return [
        text
        for part, n in zip(parts, lengths, strict=True)
        for text in bytes(part[:n].tolist()).decode().split("\0")
    ]


def _all_gather(
    group: dist.ProcessGroup | None, parts: list[torch.Tensor], x: torch.Tensor
) -> None:
    """Gathers tensors on the CPU from all ranks of a group."""
    gloo = _beside_of(group).gloo
    if gloo is None:
        dist.all_gather(parts, x, group=group)
    else:
        gloo.allgather([parts], [x]).wait()


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    return whole


def _beside_of(group: dist.ProcessGroup | None) -> _Beside:
    """What the ranks agree through.

    The first call for a group of NCCL, which all its ranks take part in, makes one with gloo beside
    it, and starts NCCL: later messages may leave out some ranks, which would not come to its start.
    """
    whole = _whole(group)
    if whole not in _beside:
        backends = dict(x.split(":") for x in dist.get_backend_config(whole).split(","))
        if backends.get("cuda") == "nccl":
            dist.all_reduce(torch.zeros(1, device="cuda"), group=whole)
        device = "cpu" if "cpu" in backends else next(iter(backends))
        made = _beside[whole] = _Beside(None if device == "cpu" else gloo_beside(whole, device))
        made.neighbours = meet(
            whole.rank(), whole.size(), _timeout(whole, device).total_seconds(),
            lambda text: _gathered_texts(whole, [text]),
        )  # fmt: skip
    return _beside[whole]


def _timeout(group: dist.ProcessGroup, device: str) -> datetime.timedelta:
    """device: a type that the group has a backend for."""
    # Not all backends have options.
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    found: datetime.timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return found


def gloo_beside(group: dist.ProcessGroup, device: str) -> Any:
    """gloo for the ranks of a group, with its time-out. torch.distributed.new_group is not for a
    few ranks: all would have to call it, or belong to as many groups.

    Args:
        device: a type that the group has a backend for.
    """
    store = dist.distributed_c10d._get_default_store()
    return dist.ProcessGroupGloo(
        dist.distributed_c10d.PrefixStore(f"archflash/{group.group_name}", store),
        group.rank(),
        group.size(),
        _timeout(group, device),
    )


def exchange_rows(
    groups: Sequence[dist.ProcessGroup | None], mine: torch.Tensor, rows: Sequence[int]
) -> list[torch.Tensor]:
    """An integer for each row of each rank, int64 on the CPU.

    Args:
        mine: those of this rank.
        rows: how many each rank has, in the order of `agree`.
    """
    said = [tuple(mine.detach().cpu().long().tolist()) + (0,) * (max(rows) - len(mine))]
    for group in groups:
        said = _gathered(group, said)
    return [torch.tensor(x[:n], device="cpu") for x, n in zip(said, rows, strict=True)]
