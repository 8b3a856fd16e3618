"""attention and explain of one sequence over the ranks of a group."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from archflash import _autocast, _dispatch, _gradients
from archflash._api import make_problem
from archflash._eager import in_transform, never_compiled
from archflash._errors import UnsupportedError
from archflash.distributed import _cost, _stages
from archflash.distributed import _shards as _of_shards
from archflash.distributed._agree import Agreement, Statement, agree, exchange_rows
from archflash.distributed._cost import Explanation, Shape, Speeds
from archflash.distributed._exchange import carries
from archflash.distributed._mask import Mask
from archflash.distributed._passes import Attention
from archflash.distributed._reading import (
    bounds,
    check_ranges,
    checked,
    checked_method,
    read_boundaries,
    read_ranges,
)
from archflash.distributed._shards import Shards, digest
from archflash.distributed._work import Ranks, check_calls, work_of


@never_compiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    shards: Shards | str | Tensor = "contiguous",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    return_lse: bool = False,
    method: str = "auto",
    layout: str = "bhnd",
    implementation: str | None = None,
) -> Any:
    """Attention of one sequence whose rows lie on the ranks of a group: local rows in, local rows
    out. Every rank of the group calls it, with the same options.

    The result is that of `archflash.attention` on the whole sequence, and so are the gradients of
    q, k and v. Before anything is sent the ranks compare their calls through the CPU; what does not
    fit together, and what is refused, is the same error on all of them.

    Args:
        q: this rank's queries, ``(batch, heads_q, rows, d)``, or as `layout` says; with cu_seqlens
            ``(rows, heads_q, d)``. float32, float16, bfloat16 or float64. A rank may have no rows.
        k: keys of the same rows, ``(batch, heads_kv, rows, d)``.
        v: values of the same rows, ``(batch, heads_kv, rows, dv)``.
        group: the process group, of NCCL or gloo; default the whole world.
        mesh: a DeviceMesh of one or two dimensions in place of a group. Of two, heads are split
            over the last one (ulysses), and rows travel over the first one (ring); ranks are
            counted as in mesh.mesh.flatten().
        shards: which rows of the sequence each rank holds: "contiguous", "zigzag", `Shards`, which
            also has those by documents, or this rank's positions, integers ``(rows,)``, which the
            ranks tell each other in every call: `Shards.of_positions` does it once.
        causal: row i of the whole sequence sees rows up to i.
        window: ``(left, right)``: row i sees rows i - left to i + right; None for an unbounded
            side.
        softcap, scale: as for `archflash.attention`.
        sinks: ``(heads_q,)``, one more logit per head, counted once. The gradient that a rank gets
            is that of its own rows: the sum over the ranks is the whole one, as of any parameter.
        cu_seqlens: int32 ``(documents + 1,)`` of the whole sequence, the same on every rank: where
            documents start, in global rows. A row sees its own document. It is read on the host:
            keep it on the CPU.
        key_ranges: int32 ``(batch or 1, heads_q or 1, n or 1, ranges, 2)`` of the whole sequence of
            n rows, the same on every rank, with global keys, as for `archflash.attention`. It is
            read on the host.
        return_lse: also return the log-sum-exp, float32 ``(batch, heads_q, rows)``, or ``(heads_q,
            rows)`` with cu_seqlens.
        method: "all-gather", "ring", "ulysses", "hybrid" (of a mesh of two dimensions), or "auto",
            the one that `explain` expects to be the fastest.
        layout: "bhnd" or "bnhd".
        implementation: forces a kernel, as for `archflash.attention`.

    Returns:
        This rank's rows of the output, shaped as q with dv for d; with return_lse the pair with the
        log-sum-exp.

    Raises:
        ValueError, TypeError, UnsupportedError: what a rank refuses, with its number, on all ranks.
        GroupError: the ranks make different calls, or one of them did not come in time, or failed
            in the middle of the call: the group is then lost, and others are not.

    Example (one process of `torchrun`)::

        out = archflash.distributed.attention(q, k, v, causal=True, shards="zigzag")
    """
    ranks = Ranks.of(group, mesh)
    try:
        job = _Call(
            q, k, v, ranks, shards, causal, window, softcap, sinks, scale, cu_seqlens, key_ranges,
            method, layout, implementation,
        )  # fmt: skip
    except Exception as error:
        agree(ranks.groups, Statement(0, "", error), 0)
        raise
    return job.run(return_lse)


class _Call:
    """A call as this rank sees it. What it refuses it refuses without the others."""

    def __init__(
        self, q: Any, k: Any, v: Any, ranks: Ranks, shards: Any, causal: bool, window: Any,
        softcap: float | None, sinks: Tensor | None, scale: float | None, cu_seqlens: Any,
        key_ranges: Any, method: str, layout: str, implementation: str | None,
    ) -> None:  # fmt: skip
        if _autocast.is_on():
            q, k, v, _ = _autocast.inputs(q, k, v, None)
        if in_transform():
            raise UnsupportedError("attention over ranks has no transforms of torch.func")
        self.packed, self.layout, self.ranks, self.shards = (
            cu_seqlens is not None,
            layout,
            ranks,
            shards,
        )
        self.q, self.k, self.v = checked(q, k, v, self.packed, layout)
        if any(not carries(g, torch.device("cpu")) for g in ranks.groups) and not q.is_cuda:
            raise ValueError(f"q is on {q.device}, and the group sends tensors of GPUs only")
        forced = _dispatch.forced() if implementation is None else implementation
        if forced is not None:
            _dispatch.check_name(forced)
        # All that the options of a call can be refused for, also where a rank has no rows.
        make_problem(
            self.q, self.k, self.v, causal=causal, window=window, softcap=softcap, sinks=sinks,
            scale=scale, return_lse=True,
        )  # fmt: skip
        self.left, self.right = bounds(causal, window)
        self.ends = None if cu_seqlens is None else read_boundaries(cu_seqlens)
        self.key_ranges = None if key_ranges is None else read_ranges(key_ranges)
        self.sinks = sinks
        deterministic = True if _gradients.asks_for_deterministic() else None
        self.options = _stages.Options(softcap, scale, forced, deterministic)
        self.fallback = os.environ.get("ARCHFLASH_FALLBACK")
        self.method = checked_method(method, ranks.sizes)
        if isinstance(shards, Tensor) and (shards.ndim != 1 or len(shards) != self.q.shape[2]):
            raise ValueError(
                f"shards are positions of shape {tuple(shards.shape)}: it must be "
                f"({self.q.shape[2]},), one for each row of this rank"
            )
        if not isinstance(shards, (str, Shards, Tensor)):
            raise TypeError(f"shards is {shards!r}: it must be a name, Shards or positions")

    def in_words(self) -> str:
        """All that must be the same on every rank."""
        batch, heads, _, d = self.q.shape
        shards = self.shards if isinstance(self.shards, str) else type(self.shards).__name__
        if isinstance(self.shards, Shards):
            shards = f"Shards {self.shards.digest:x}"
        ranges = None if self.key_ranges is None else f"{self.ranges_digest:x}"
        ends = None if self.ends is None else f"{_ends_digest(self.ends):x}"
        sinks = None if self.sinks is None else self.sinks.dtype
        return (
            f"attention of q ({batch}, {heads}, rows, {d}) over {self.k.shape[1]} heads, dv "
            f"{self.v.shape[3]}, {self.q.dtype}, {self.q.device.type}, {self.layout}, shards "
            f"{shards}, window ({self.left}, {self.right}), cu_seqlens {ends}, key_ranges {ranges},"
            f" sinks {sinks}, {self.options}, fallback {self.fallback}, method {self.method}, "
            f"gradients {self.needs_gradient}"
        )

    @functools.cached_property
    def ranges_digest(self) -> int | None:
        return None if self.key_ranges is None else _of_shards.digest_of_tensor(self.key_ranges)

    @functools.cached_property
    def needs_gradient(self) -> bool:
        given = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    def run(self, return_lse: bool) -> Any:
        words = self.in_words()
        statement = Statement(self.q.shape[2], words)
        with Agreement(self.ranks.groups, statement, digest(words)) as agreement:
            (out, lse), order = self._results(words, agreement)
        if order is not None:
            back = order.argsort()
            out, lse = out.index_select(2, back), lse.index_select(2, back)
        if self.packed:
            # Not [0], whose gradient is filled with 0 and then copied to.
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
        elif self.layout == "bnhd":
            out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def _results(
        self, words: str, agreement: Agreement
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Output and log-sum-exp "bhnd"; and the order of the rows, if it is not the caller's."""
        may_be_refused = self.options.implementation is not None or self.fallback == "error"
        shards = self._known_shards()
        if shards is not None and not may_be_refused:
            agreement.check = self._all_shards  # once the others have answered
        else:
            shards = self._all_shards(agreement.rows())
        # All ranks know the same, and raise the same.
        order = None
        if not shards.sorted:
            places = shards.positions(self.ranks.rank).argsort().to(self.q.device)
            order, shards = places, shards.in_order()
            self.q, self.k, self.v = (x.index_select(2, order) for x in (self.q, self.k, self.v))
        mask = Mask(shards.n, self.left, self.right, self.ends, self.key_ranges)
        if self.ends is not None and self.ends[-1] != shards.n:
            raise ValueError(
                f"cu_seqlens end with {self.ends[-1]}, but the ranks hold {shards.n} rows together"
            )
        if self.key_ranges is not None:
            check_ranges(self.key_ranges, self.q, shards.n)
        shape = Shape.of(self.q, self.k, self.v)
        work = work_of(
            self.ranks, shards, mask, self.ranges_digest, self.method, shape, self.options
        )
        if may_be_refused:
            # Then a kernel may refuse the calls of some ranks alone.
            trouble = None
            try:
                check_calls(work, self.q, self.k, self.v, self.sinks, self.needs_gradient)
            except Exception as error:
                trouble = error
            planned = f"the plan of {words}"
            agree(self.ranks.groups, Statement(0, planned, trouble), digest(planned))
        if not work.plan.in_one:
            agreement.rows()
        results: tuple[Tensor, Tensor] = Attention.apply(
            self.q, self.k, self.v, self.sinks, work, f"the backward pass of {words}", agreement
        )  # type: ignore[no-untyped-call]
        return results, order

    def _known_shards(self) -> Shards | None:
        """The shards, where they are known before the other ranks say how many rows they have."""
        shards, ranks = self.shards, self.ranks
        if not isinstance(shards, Shards) or shards.ranks != ranks.count:
            return None
        return shards if shards.rows(ranks.rank) == self.q.shape[2] else None

    def _all_shards(self, rows: list[int]) -> Shards:
        if isinstance(self.shards, Tensor):
            return Shards.of_positions(exchange_rows(self.ranks.groups, self.shards, rows))
        n = sum(rows)
        shards = _of_shards.make(self.shards, n, self.ranks.count)
        wanted = shards.all_rows
        for rank, (has, should) in enumerate(zip(rows, wanted, strict=True)):
            if has != should:
                raise ValueError(
                    f"rank {rank} has {has} rows, and by the shards {should} of the {n} that the "
                    "ranks hold together: cut tensors with archflash.distributed.shard"
                )
        return shards


_ends_digest = functools.lru_cache(64)(digest)  # the same in every layer of a step


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int | tuple[int, int],
    shards: Shards | str = "contiguous",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    layout: str = "bhnd",
    speeds: Speeds | None = None,
) -> Explanation:
    """Says what each method would cost: bytes sent and received by each rank, work and balance,
    buffers, and the time that a simple model expects of the forward pass. It sends nothing and
    needs no process group.

    Args:
        q, k, v: of the whole sequence, as `attention` takes local ones; they may be on the "meta"
            device.
        ranks: how many there are; of a mesh of two dimensions its sizes.
        shards, ..., layout: as for `attention`.
        speeds: what the model reckons with; default 600 TFLOP/s and 300 GB/s.

    Returns:
        An `Explanation`, whose str() is readable.

    Raises:
        ValueError, TypeError: as `attention`.

    Example:
        >>> import archflash.distributed, torch
        >>> q = torch.empty(1, 64, 65536, 128, device="meta", dtype=torch.bfloat16)
        >>> k = q[:, :8]
        >>> said = archflash.distributed.explain(q, k, k, ranks=8, shards="zigzag", causal=True)
        >>> said.chosen, round(said.estimates[0].balance, 3)
        ('all-gather', 1.0)
    """
    sizes = (ranks, 1) if isinstance(ranks, int) else ranks
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"ranks is {ranks}: it must be their number, or the two sizes of a mesh")
    count = sizes[0] * sizes[1]
    packed = cu_seqlens is not None
    q, k, v = checked(q, k, v, packed, layout)
    make_problem(q, k, v, causal=causal, window=window)  # refuses other windows
    left, right = bounds(causal, window)
    ends = None if cu_seqlens is None else read_boundaries(cu_seqlens)
    ranges = None if key_ranges is None else read_ranges(key_ranges)
    if ranges is not None:
        check_ranges(ranges, q, q.shape[2])
    held = _of_shards.make(shards, q.shape[2], count).in_order()
    mask = Mask(held.n, left, right, ends, ranges)
    shape = Shape.of(q, k, v)
    mesh = None if isinstance(ranks, int) else sizes
    return _cost.explain(held, mask, shape, speeds or Speeds(), mesh)
