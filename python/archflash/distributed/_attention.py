"""attention and explain of one sequence over the ranks of a group."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from archflash import _autocast, _dispatch, _gradients
from archflash._api import make_problem
from archflash._eager import in_transform
from archflash._errors import UnsupportedError
from archflash.distributed import _cost, _heads, _plan, _stages
from archflash.distributed import _shards as _of_shards
from archflash.distributed._agree import Statement, agree, exchange_rows
from archflash.distributed._cost import METHODS, Explanation, Shape, Speeds
from archflash.distributed._exchange import carries
from archflash.distributed._plan import Mask, Plan
from archflash.distributed._shards import Shards, digest

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What was read of cu_seqlens and key_ranges, by tensor: (version, value).
_read: Any = WeakIdKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    ranks = _Ranks.of(group, mesh)
    try:
        job = _Call(
            q, k, v, ranks, shards, causal, window, softcap, sinks, scale, cu_seqlens, key_ranges,
            method, layout, implementation,
        )  # fmt: skip
    except Exception as error:
        agree(ranks.groups, Statement(0, "", error), 0)
        raise
    return job.run(return_lse)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a call.

    Attributes:
        inner, outer: the groups of a mesh's last and first dimension; of one group without a mesh
            that is the outer one, and inner is None.
        rank, count: of this process among all, and how many they are.
        inner_count: how many an inner group has.
    """

    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    rank: int
    count: int
    inner_count: int = 1

    @staticmethod
    def of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> _Ranks:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "there is no process group: call torch.distributed.init_process_group first"
            )
        if mesh is not None:
            if group is not None:
                raise ValueError("group and mesh are given: give one of them")
            if mesh.ndim == 2:
                outer, inner = mesh.get_group(0), mesh.get_group(1)
                size = dist.get_world_size(inner)
                rank = dist.get_rank(outer) * size + dist.get_rank(inner)
                return _Ranks(outer, inner, rank, size * dist.get_world_size(outer), size)
            if mesh.ndim != 1:
                raise ValueError(f"mesh has {mesh.ndim} dimensions: it must have one or two")
            group = mesh.get_group(0)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process does not belong to the group: only its ranks may call")
        return _Ranks(group, None, rank, dist.get_world_size(group))

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The innermost first."""
        return [self.outer] if self.inner is None else [self.inner, self.outer]

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Those of a mesh of two dimensions."""
        return None if self.inner is None else (self.count // self.inner_count, self.inner_count)


class _Call:
    """A call as this rank sees it. What it refuses it refuses without the others."""

    def __init__(
        self, q: Any, k: Any, v: Any, ranks: _Ranks, shards: Any, causal: bool, window: Any,
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
        _check(q, k, v, self.packed, layout)
        if any(not carries(g, torch.device("cpu")) for g in ranks.groups) and not q.is_cuda:
            raise ValueError(f"q is on {q.device}, and the group sends tensors of GPUs only")
        self.q, self.k, self.v = (_by_head(x, self.packed, layout) for x in (q, k, v))
        forced = _dispatch.forced() if implementation is None else implementation
        if forced is not None:
            _dispatch.check_name(forced)
        # All that the options of a call can be refused for, also where a rank has no rows.
        make_problem(
            self.q, self.k, self.v, causal=causal, window=window, softcap=softcap, sinks=sinks,
            scale=scale, return_lse=True,
        )  # fmt: skip
        self.left, self.right = _bounds(causal, window)
        self.ends = None if cu_seqlens is None else read_boundaries(cu_seqlens)
        self.key_ranges = None if key_ranges is None else read_ranges(key_ranges)
        self.sinks = sinks
        deterministic = True if _gradients.asks_for_deterministic() else None
        self.options = _stages.Options(softcap, scale, forced, deterministic)
        self.fallback = os.environ.get("ARCHFLASH_FALLBACK")
        self.method = _checked_method(method, ranks.sizes)
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
        rows = agree(self.ranks.groups, Statement(self.q.shape[2], words), digest(words))
        # From here on all ranks know the same, and raise the same.
        shards = self._all_shards(rows)
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
            _check_ranges(self.key_ranges, self.q, shards.n)
        work = self._work(shards, mask)
        if self.options.implementation is not None or self.fallback == "error":
            # Then a kernel may refuse the calls of some ranks alone.
            trouble = None
            try:
                _check_calls(work, self.q, self.k, self.v, self.sinks, self.needs_gradient)
            except Exception as error:
                trouble = error
            planned = f"the plan of {words}"
            agree(self.ranks.groups, Statement(0, planned, trouble), digest(planned))
        results: tuple[Tensor, Tensor] = _Attention.apply(
            self.q, self.k, self.v, self.sinks, work, f"the backward pass of {words}"
        )  # type: ignore[no-untyped-call]
        if order is not None:
            back = order.argsort()
            results = results[0].index_select(2, back), results[1].index_select(2, back)
        out, lse = results
        if self.packed:
            # Not [0], whose gradient is filled with 0 and then copied to.
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
        elif self.layout == "bnhd":
            out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def _work(self, shards: Shards, mask: Mask) -> _Work:
        q, k, v, ranks = self.q, self.k, self.v, self.ranks
        shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
        key = (
            shards.digest, mask.n, mask.left, mask.right, mask.ends, self.ranges_digest,
            self.method, shape, ranks.rank, ranks.count, ranks.inner_count,
        )  # fmt: skip
        if key not in _plans:
            while len(_plans) >= _MOST_PLANS:
                del _plans[next(iter(_plans))]
            if mask.key_ranges is not None:  # the plan must not change with the caller's tensor
                mask = dataclasses.replace(mask, key_ranges=mask.key_ranges.clone())
            _plans[key] = _planned(ranks, shards, mask, self.method, shape)
        plan, heads, pieces = _plans[key]
        outer, inner = ranks.outer, ranks.inner
        if heads is not None and ranks.inner is None:  # ulysses of one group: nothing is across
            outer, inner = None, ranks.outer
        return _Work(ranks, outer, inner, plan, self.options, heads, pieces)

    def _all_shards(self, rows: list[int]) -> Shards:
        if isinstance(self.shards, Tensor):
            return Shards.of_positions(exchange_rows(self.ranks.groups, self.shards, rows))
        n = sum(rows)
        shards = _of_shards.make(self.shards, n, self.ranks.count)
        wanted = [shards.rows(r) for r in range(shards.ranks)]
        for rank, (has, should) in enumerate(zip(rows, wanted, strict=True)):
            if has != should:
                raise ValueError(
                    f"rank {rank} has {has} rows, and by the shards {should} of the {n} that the "
                    "ranks hold together: cut tensors with archflash.distributed.shard"
                )
        return shards


def _by_head(x: Tensor, packed: bool, layout: str) -> Tensor:
    if packed:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if layout == "bnhd" else x


def _check(q: Any, k: Any, v: Any, packed: bool, layout: str) -> None:
    if layout not in ("bhnd", "bnhd"):
        raise ValueError(f"layout is {layout!r}: it must be 'bhnd' or 'bnhd'")
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is {type(x).__name__}: it must be a plain tensor of this rank's rows"
            )
        if x.ndim != dims:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must have {dims} dimensions"
                + (" with cu_seqlens" if packed else "")
            )
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} has dtype {x.dtype}: it must be float32, float16, bfloat16 or float64"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"{name} is {x.dtype} on {x.device}, and q {q.dtype} on {q.device}: they must agree"
            )
    q, k, v = (_by_head(x, packed, layout) for x in (q, k, v))
    if q.shape[2] != k.shape[2] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has {q.shape[0]} sequences of {q.shape[2]} rows and {q.shape[3]} columns, k "
            f"{k.shape[0]} of {k.shape[2]} and {k.shape[3]}: they must agree, as attention over "
            "ranks is that of a sequence to itself"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}: they must agree")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of k's {k.shape[1]}")


def _bounds(causal: bool, window: Any) -> tuple[int | None, int | None]:
    """The bounds of a causal mask and a window together."""
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise ValueError(f"window is {window!r}: it must be (left, right)")
    left, right = (None if x is None or x < 0 else int(x) for x in window or (None, None))
    return left, 0 if causal else right


def _checked_method(method: str, sizes: tuple[int, int] | None) -> str:
    if method != "auto" and method not in METHODS:
        raise ValueError(
            f"method is {method!r}: it must be 'auto', {', '.join(map(repr, METHODS))}"
        )
    if sizes is not None and method not in ("auto", "hybrid"):
        raise UnsupportedError(
            f"method {method!r} has no mesh of two dimensions: give a group, or method='hybrid'"
        )
    if sizes is None and method == "hybrid":
        raise UnsupportedError("method 'hybrid' needs a mesh of two dimensions: give mesh=")
    return "hybrid" if sizes is not None else method


def _remembered(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """What was read of a tensor on a GPU, which is not read again while it stays the same. One on
    the CPU is read each time, as numpy may have written to it.
    """
    if not x.is_cuda or x.is_inference():
        return read(x)
    known = _read.get(x)
    if known is None or known[0] != x._version:
        known = _read[x] = (x._version, read(x))
    return known[1]


def read_boundaries(cu_seqlens: Any) -> tuple[int, ...]:
    if not isinstance(cu_seqlens, Tensor):
        return tuple(_of_shards.boundaries(cu_seqlens))
    found: tuple[int, ...] = _remembered(cu_seqlens, lambda x: tuple(_of_shards.boundaries(x)))
    return found


def read_ranges(key_ranges: Any) -> Tensor:
    if not isinstance(key_ranges, Tensor) or key_ranges.dtype != torch.int32:
        raise TypeError("key_ranges must be an int32 tensor")
    if key_ranges.ndim != 5 or key_ranges.shape[-1] != 2:
        raise ValueError(
            f"key_ranges has shape {tuple(key_ranges.shape)}: it must be (batch or 1, heads or 1, "
            "n or 1, ranges, 2)"
        )
    found: Tensor = _remembered(key_ranges, lambda x: x.detach().cpu())
    return found


_ends_digest = functools.lru_cache(64)(digest)  # the same in every layer of a step


def _check_ranges(key_ranges: Tensor, q: Tensor, n: int) -> None:
    batch, heads, rows = key_ranges.shape[:3]
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]) or rows not in (1, n):
        raise ValueError(
            f"key_ranges has shape {tuple(key_ranges.shape)}: it must be ({q.shape[0]} or 1, "
            f"{q.shape[1]} or 1, {n} or 1, ranges, 2), of the whole sequence"
        )


@dataclass(frozen=True)
class _Work:
    """What a rank does: its plan, and for ulysses who has which heads.

    Attributes:
        heads: of the inner ranks; None where heads stay.
        pieces: of the inner ranks, the rows that they hold.
    """

    ranks: _Ranks
    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    plan: Plan
    options: _stages.Options
    heads: _heads.Split | None = None
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()


_plans: dict[Any, Any] = {}
_MOST_PLANS = 64


def _planned(
    ranks: _Ranks, shards: Shards, mask: Mask, method: str, shape: Shape
) -> tuple[Plan, _heads.Split | None, Any]:
    packs = shape.batch == 1
    if method == "auto":
        method = _cost.explain(shards, mask, shape, Speeds()).chosen
    if method in ("all-gather", "ring"):
        everyone = range(shards.ranks)
        sources = [everyone] if method == "all-gather" else [[r] for r in everyone]
        shares: tuple[tuple[int, int], ...] = ((0, shape.heads_kv),)
        back = None
        if method == "all-gather" and shards.ranks > 1:
            shares = _cost.head_shares(shards, mask, shape, Speeds())
            back = _cost.head_shares(shards, mask, shape, Speeds(), back=True)
        plan = _plan.make(shards, mask, ranks.rank, sources, shares, back, packs=packs)
        return plan, None, ()
    size = ranks.inner_count if method == "hybrid" else ranks.count
    across, inside = divmod(ranks.rank, size)
    split = _heads.Split.make(shape.heads_q, shape.heads_kv, size)
    first, end = split.of_q[inside]
    if mask.key_ranges is not None and mask.key_ranges.shape[1] > 1:
        mask = dataclasses.replace(mask, key_ranges=mask.key_ranges[:, first:end])
    groups = shards.grouped(size)
    plan = _plan.make(
        groups, mask, across, [[r] for r in range(groups.ranks)],
        ((0, len(split.of_kv[inside])),), packs=packs,
    )  # fmt: skip
    return plan, split, shards.pieces[across * size : (across + 1) * size]


def _check_calls(
    work: _Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, differentiated: bool
) -> None:
    """Raises what this rank's calls would raise."""
    if work.heads is not None:
        rank, rows = dist.get_rank(work.inner), work.plan.rows
        (first, end), groups = work.heads.of_q[rank], work.heads.of_kv[rank]
        # As tensors come out of an exchange.
        q, k, v = (
            x.new_empty((rows, x.shape[0], heads, x.shape[3])).permute(1, 2, 0, 3)
            for x, heads in ((q, end - first), (k, len(groups)), (v, len(groups)))
        )
        sinks = None if sinks is None else sinks[first:end]
    _stages.check(work.plan, work.options, q, k, v, sinks, differentiated)


class _Attention(torch.autograd.Function):
    """The call and its gradients; q, k and v are "bhnd"."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: _Work, words: str
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out = _like(q, v.shape[3])
        saved: tuple[Tensor, ...] = (q, k, v)
        if work.heads is None:
            lse = _stages.forward(work.plan, work.outer, work.options, q, k, v, sinks, out)
            saved = (*saved, out, lse)
        else:
            lse, saved = _by_heads(work, q, k, v, sinks, out)
        ctx.work, ctx.words = work, words
        own = () if sinks is None else (sinks, *(() if work.heads is None else (out, lse)))
        ctx.save_for_backward(*saved, *own)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        q, k, v, out, lse, *own = ctx.saved_tensors
        words = f"{ctx.words}, dlse {dlse is not None}"
        agree(work.ranks.groups, Statement(0, words), digest(words))
        with torch.no_grad():
            if work.heads is None:
                dout = torch.zeros_like(out) if dout is None else dout
                dq, dkv = _stages.backward(
                    work.plan, work.outer, work.options, dout, dlse, q, k, v, out, lse
                )
                dk, dv = (
                    torch.empty_like(x).copy_(y)
                    for x, y in zip((k, v), _stages.columns(dkv, k.shape[3]), strict=True)
                )
                dq = dq.to(q.dtype)
                own = [*own, out, lse]
            else:
                rows = _rows_of(work)
                if dout is None:
                    heads = work.heads.of_q[-1][1]
                    dout = q.new_zeros((q.shape[0], heads, rows, v.shape[3]))
                dq, dk, dv = _gradients_by_heads(work, dout, dlse, q, k, v, out, lse)
            dsinks = None
            if len(own) == 3:
                dsinks = _of_sinks(own[0], own[1], own[2], dout, dlse)
        return dq, dk, dv, dsinks, None, None


def _rows_of(work: _Work) -> int:
    index = dist.get_rank(work.inner)
    return sum(end - start for start, end in work.pieces[index])


def _like(q: Tensor, columns: int) -> Tensor:
    """A new tensor "bhnd" whose heads and rows are nested as those of q."""
    batch, heads, rows, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, rows, heads, columns)).transpose(1, 2)
    return q.new_empty((batch, heads, rows, columns))


def _of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the sinks by the local rows: a sink's share of a row is exp(sink - lse)."""
    wide = torch.promote_types(out.dtype, torch.float32)
    behind = (dout.to(wide) * out.to(wide)).sum(-1)
    behind = -behind if dlse is None else dlse - behind
    share = (sinks.to(wide)[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    return (share * behind).sum((0, 2)).to(sinks.dtype)


def _by_heads(
    work: _Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward pass after an exchange of rows for heads. Also returns what gradients need."""
    split, rank = work.heads, dist.get_rank(work.inner)
    assert split is not None
    of_q = [range(*heads) for heads in split.of_q]
    moved = [
        _heads.to_heads(work.inner, work.pieces, x, heads)
        for x, heads in ((q, of_q), (k, split.of_kv), (v, split.of_kv))
    ]
    for _, pending in moved:
        pending.wait()
    q_all, k_all, v_all = (x.permute(1, 2, 0, 3) for x, _ in moved)
    out_all = out.new_empty((*moved[0][0].shape[:3], v.shape[3]))
    first, end = split.of_q[rank]
    lse_all = _stages.forward(
        work.plan, work.outer, work.options, q_all, k_all, v_all,
        None if sinks is None else sinks[first:end], out_all.permute(1, 2, 0, 3),
    )  # fmt: skip
    lse = lse_all.new_empty(q.shape[:3])
    _heads.to_rows(work.inner, work.pieces, out_all, of_q, out)
    _heads.to_rows(
        work.inner, work.pieces, lse_all.permute(2, 0, 1)[..., None], of_q, lse[..., None]
    )
    return lse, (q_all, k_all, v_all, out_all.permute(1, 2, 0, 3), lse_all)


def _gradients_by_heads(
    work: _Work, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    split = work.heads
    assert split is not None
    of_q = [range(*heads) for heads in split.of_q]
    moved = [_heads.to_heads(work.inner, work.pieces, dout, of_q)]
    if dlse is not None:
        moved.append(_heads.to_heads(work.inner, work.pieces, dlse[..., None], of_q))
    for _, pending in moved:
        pending.wait()
    dout_all, *dlse_all = (x.permute(1, 2, 0, 3) for x, _ in moved)
    dq_all, dkv = _stages.backward(
        work.plan, work.outer, work.options, dout_all, dlse_all[0][..., 0] if dlse_all else None,
        q, k, v, out, lse,
    )  # fmt: skip
    rows, batch = _rows_of(work), q.shape[0]
    dq = q.new_empty((batch, split.of_q[-1][1], rows, q.shape[3]))
    _heads.to_rows(work.inner, work.pieces, dq_all.to(q.dtype).permute(2, 0, 1, 3), of_q, dq)
    # Copies of a head are added up in float32.
    dtype = dkv.dtype if split.repeats else k.dtype
    heads_kv = 1 + max(head for heads in split.of_kv for head in heads)
    both = dkv.new_zeros((batch, heads_kv, rows, dkv.shape[3]), dtype=dtype)
    _heads.to_rows(work.inner, work.pieces, dkv.to(dtype), split.of_kv, both, adds=split.repeats)
    dk, dv = both[..., : k.shape[3]], both[..., k.shape[3] :]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


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
    sizes = None if isinstance(ranks, int) else ranks
    count = ranks if isinstance(ranks, int) else ranks[0] * ranks[1]
    packed = cu_seqlens is not None
    _check(q, k, v, packed, layout)
    q, k, v = (_by_head(x, packed, layout) for x in (q, k, v))
    left, right = _bounds(causal, window)
    ends = None if cu_seqlens is None else read_boundaries(cu_seqlens)
    ranges = None if key_ranges is None else read_ranges(key_ranges)
    if ranges is not None:
        _check_ranges(ranges, q, q.shape[2])
    held = _of_shards.make(shards, q.shape[2], count).in_order()
    mask = Mask(held.n, left, right, ends, ranges)
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
    return _cost.explain(held, mask, shape, speeds or Speeds(), sizes)
