"""What a rank does in a call: its ranks, and its plan by a method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from archflash.distributed import _cost, _heads, _plan, _stages
from archflash.distributed._beside import beside_messages
from archflash.distributed._cost import Shape, Speeds
from archflash.distributed._mask import Mask
from archflash.distributed._plan import Plan
from archflash.distributed._shards import Shards


@dataclass(frozen=True)
class Ranks:
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
    def of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Ranks:
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
                return Ranks(outer, inner, rank, size * dist.get_world_size(outer), size)
            if mesh.ndim != 1:
                raise ValueError(f"mesh has {mesh.ndim} dimensions: it must have one or two")
            group = mesh.get_group(0)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process does not belong to the group: only its ranks may call")
        return Ranks(group, None, rank, dist.get_world_size(group))

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The groups, the innermost first."""
        return [self.outer] if self.inner is None else [self.inner, self.outer]

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The sizes of a mesh of two dimensions; None for a group."""
        return None if self.inner is None else (self.count // self.inner_count, self.inner_count)


@dataclass(frozen=True)
class Work:
    """What a rank does: its plan, and for ulysses who has which heads.

    Attributes:
        heads: of the inner ranks; None where heads stay.
        pieces: of the inner ranks, the rows that they hold.
    """

    ranks: Ranks
    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    plan: Plan
    options: _stages.Options
    heads: _heads.Split | None = None
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()


_plans: dict[Any, Any] = {}
_MOST_PLANS = 64


def work_of(
    ranks: Ranks, shards: Shards, mask: Mask, ranges_digest: int | None, method: str, shape: Shape,
    options: _stages.Options,
) -> Work:  # fmt: skip
    """What this rank does. The plan is kept for later calls.

    Args:
        ranges_digest: of the mask's key_ranges.
    """
    key = (
        shards.digest, mask.n, mask.left, mask.right, mask.ends, ranges_digest, method, shape,
        ranks.rank, ranks.count, ranks.inner_count,
    )  # fmt: skip
    if key not in _plans:
        while len(_plans) >= _MOST_PLANS:
            del _plans[next(iter(_plans))]
        if mask.key_ranges is not None:  # the plan must not change with the caller's tensor
            mask = dataclasses.replace(mask, key_ranges=mask.key_ranges.clone())
        _plans[key] = _planned(ranks, shards, mask, method, shape)
    plan, heads, pieces = _plans[key]
    outer, inner = ranks.outer, ranks.inner
    if heads is not None and ranks.inner is None:  # ulysses of one group: nothing is across
        outer, inner = None, ranks.outer
    return Work(ranks, outer, inner, plan, options, heads, pieces)


def _planned(
    ranks: Ranks, shards: Shards, mask: Mask, method: str, shape: Shape
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
        one_share = len(plan.stages) == len(plan.stages_back) == 1
        if (
            mask.ends is not None
            and one_share
            and _cost.is_short(shards, mask, shape, Speeds())
            and any(_cost.traffic(shards, mask)[0])
        ):
            plan = beside_messages(plan, packs, _cost.least_alone(shape, Speeds()))
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


def check_calls(
    work: Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, differentiated: bool
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
