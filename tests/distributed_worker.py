"""The ranks of the tests of archflash.distributed: random calls against one process in float64.

    python -m tests.distributed_worker RANKS FOLDER [--backend nccl --device cuda] PART...

The parts are functions of this module. A rank writes into a file of the folder; one that gets
through its parts says "done".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import archflash
import archflash.distributed as afd
from archflash.distributed import _cost, _stages, _turns
from archflash.distributed._agree import gloo_beside

ROOT = Path(__file__).parents[1]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
# The error of a result over the largest number of it, at most.
TOLERANCE = {
    torch.float64: 2e-6,  # log-sum-exps are float32
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@dataclass(frozen=True)
class Case:
    """A call on the whole sequence, the way it is split, and the tensors."""

    n: int
    shards: Any
    method: str
    left: int | None = None
    right: int | None = None
    causal: bool = False
    ends: list[int] | None = None
    key_ranges: Tensor | None = None
    softcap: float | None = None
    layout: str = "bhnd"
    implementation: str | None = None
    tensors: dict[str, Tensor | None] = dataclasses.field(default_factory=dict, repr=False)

    def held(self, ranks: int) -> afd.Shards:
        """Who has which rows."""
        if isinstance(self.shards, afd.Shards):
            return self.shards
        return getattr(afd.Shards, self.shards)(self.n, ranks)


def reference(case: Case) -> list[Tensor | None]:
    """Outputs and gradients in float64, from a dense mask: as NAMES."""
    x = case.tensors
    q, k, v, sinks = (
        None if (t := x[name]) is None else t.double().clone().requires_grad_()
        for name in ("q", "k", "v", "sinks")
    )
    assert q is not None
    assert k is not None
    assert v is not None
    n, device = case.n, q.device
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    seen = torch.ones(n, n, dtype=torch.bool, device=device)
    if case.left is not None:
        seen &= j >= i - case.left
    if case.right is not None:
        seen &= j <= i + case.right
    if case.causal:
        seen &= j <= i
    if case.ends is not None:
        number = torch.bucketize(j, torch.tensor(case.ends, device=device), right=True)
        seen &= number[:, None] == number
    seen = seen[None, None]
    if case.key_ranges is not None:
        begin, end = case.key_ranges.to(device).unbind(-1)
        seen = seen & ((j >= begin[..., None]) & (j < end[..., None])).any(3)
    shared = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(shared, 1) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        more = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], -1)
    base = scores.amax(-1, keepdim=True).clamp(min=-1e30).detach()
    weights = (scores - base).exp()
    total = weights.sum(-1, keepdim=True)
    divisor = torch.where(total == 0, 1.0, total)
    out = weights[..., :n] / divisor @ values
    lse = torch.where(total == 0, -torch.inf, base + divisor.log())[..., 0]
    loss(out, lse, x["dout"], x["dlse"]).backward()
    found = [out.detach(), lse.detach(), q.grad, k.grad, v.grad]
    return [*found, None if sinks is None else sinks.grad]


def loss(out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> Tensor:
    assert dout is not None
    total = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(lse.isinf(), 0.0) * dlse.to(lse.dtype)).sum()
    return total


def run(case: Case, rank: int, ranks: int, where: dict[str, Any]) -> list[Tensor | None]:
    """What this rank gets, as NAMES."""
    x, rows = case.tensors, case.held(ranks).positions(rank)
    q, k, v = (x[name][:, :, rows].clone().requires_grad_() for name in "qkv")  # type: ignore[index]
    sinks = None if x["sinks"] is None else x["sinks"].clone().requires_grad_()
    given = [q, k, v]
    if case.ends is not None:
        given = [t[0].transpose(0, 1) for t in given]
    elif case.layout == "bnhd":
        given = [t.transpose(1, 2) for t in given]
    ends = None if case.ends is None else torch.tensor(case.ends, dtype=torch.int32)
    out, lse = afd.attention(
        *given, shards=case.shards, causal=case.causal, window=(case.left, case.right),
        softcap=case.softcap, sinks=sinks, cu_seqlens=ends, key_ranges=case.key_ranges,
        return_lse=True, method=case.method, layout=case.layout,
        implementation=case.implementation, **where,
    )  # fmt: skip
    if case.ends is not None:
        out, lse = out.transpose(0, 1)[None], lse[None]
    elif case.layout == "bnhd":
        out = out.transpose(1, 2)
    dlse = None if x["dlse"] is None else x["dlse"][:, :, rows]
    loss(out, lse, x["dout"][:, :, rows], dlse).backward()  # type: ignore[index]
    dsinks = None
    if sinks is not None:
        assert sinks.grad is not None
        dsinks = sinks.grad.cpu() if dist.get_backend() == "gloo" else sinks.grad.clone()
        dist.all_reduce(dsinks)
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad, dsinks]


def check(case: Case, rank: int, ranks: int, where: dict[str, Any]) -> None:
    found, rows = run(case, rank, ranks, where), case.held(ranks).positions(rank)
    dtype = case.tensors["q"].dtype  # type: ignore[union-attr]
    for name, x, wanted in zip(NAMES, found, reference(case), strict=True):
        if wanted is None:
            continue
        assert x is not None
        y = wanted if name == "dsinks" else wanted[:, :, rows]
        x, largest = (
            x.double().to(y.device),
            1 + float(wanted.masked_fill(wanted.isinf(), 0).abs().amax()),
        )
        assert torch.equal(x.isinf(), y.isinf()), (rank, name, case)
        off = (x - y).masked_fill(y.isinf(), 0.0).abs()
        error = float(off.amax()) / largest if off.numel() else 0.0
        assert error <= TOLERANCE[dtype], (rank, name, error, case)


class Draw:
    """Random choices that are the same on every rank."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator, self._device = torch.Generator().manual_seed(seed), device

    def of(self, *choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=self._generator))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def cuts(self, n: int, count: int) -> list[int]:
        drawn = torch.randint(0, n + 1, (count,), generator=self._generator)
        found: list[int] = drawn.sort().values.tolist()
        return found

    def ranges(self, *shape: int, n: int) -> Tensor:
        drawn = torch.randint(0, n + 1, (*shape, 2), generator=self._generator)
        return drawn.sort(-1).values.int()

    def shards(self, n: int, ranks: int) -> afd.Shards:
        """Rows of every kind: shuffled, in turns, neighbours of any number."""
        rows = self.of(torch.randperm(n, generator=self._generator), torch.arange(n), None)
        if rows is None:
            return afd.Shards.of_positions([torch.arange(n)[r::ranks] for r in range(ranks)])
        return afd.Shards.of_positions(rows.tensor_split(self.cuts(n, ranks - 1)))

    def tensors(
        self, batch: int, heads: int, heads_kv: int, n: int, d: int, dv: int, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        q, k = self.normal(batch, heads, n, d), self.normal(batch, heads_kv, n, d)
        v, dout = self.normal(batch, heads_kv, n, dv), self.normal(batch, heads, n, dv)
        made = {"q": q, "k": k, "v": v, "dout": dout}
        dlse, sinks = self.of(None, self.normal(batch, heads, n)), self.of(None, self.normal(heads))
        return {name: x.to(dtype) for name, x in made.items()} | {"dlse": dlse, "sinks": sinks}


def drawn(seed: int, ranks: int, device: str, methods: tuple[str, ...]) -> Case:
    """A random call."""
    draw = Draw(seed, device)
    on_gpu = device != "cpu"
    n = draw.of(1, 5, 99, 300, 1000, 1777) if on_gpu else draw.of(1, 2, 5, 8, 17, 64, 99)
    heads_kv, batch, kind = (
        draw.of(1, 2, 3),
        draw.of(1, 1, 2),
        draw.of("", "", "documents", "ranges"),
    )
    heads, d, dv = heads_kv * draw.of(1, 2, 3), draw.of(8, 16), draw.of(8, 16)
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    if on_gpu:
        d = dv = draw.of(64, 128)
        dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    window = draw.of((None, None), (None, None), (3, None), (5, 2), (None, 4), (0, 0))
    ends = key_ranges = None
    if kind == "documents":
        batch, ends = 1, [0, *draw.cuts(n, draw.of(1, 3, 12, 20)), n]
    if kind == "ranges":
        shape = draw.of(1, batch), draw.of(1, heads), draw.of(1, n), draw.of(1, 3)
        key_ranges = draw.ranges(*shape, n=n)
    documents = afd.Shards.documents(ends, ranks) if ends else "zigzag"
    shards = draw.of("contiguous", "zigzag", documents, draw.shards(n, ranks))
    return Case(
        n, shards, draw.of("auto", *methods), *window, draw.of(True, True, False), ends, key_ranges,
        draw.of(None, None, 3.0), draw.of("bhnd", "bnhd"),
        tensors=draw.tensors(batch, heads, heads_kv, n, d, dv, draw.of(*dtypes)),
    )  # fmt: skip


@dataclass(frozen=True)
class Here:
    """This process among its ranks, and the arguments of `attention` for each method."""

    rank: int
    ranks: int
    device: str
    where: dict[str, dict[str, Any]]
    seconds: float
    cases: int

    def arguments(self, case: Case) -> dict[str, Any]:
        return self.where.get(case.method, {})

    def counted(self) -> Iterator[int]:
        """Numbers of cases, until there are enough or the time of some rank is over."""
        start = time.monotonic()
        for number in range(self.cases):
            over = torch.tensor(float(time.monotonic() - start > self.seconds))
            if dist.get_backend() == "nccl":
                over = over.to(self.device)
            dist.all_reduce(over)
            if over.item():
                return
            yield number


class InTurns(_turns.Turns):
    """On the CPU, where there are no streams: messages are started as for turns."""

    def __bool__(self) -> bool:
        return True


def random_calls(here: Here) -> None:
    """Every method, over shards, lengths, masks and dtypes, with gradients."""
    methods = ("ring", "all-gather", "ulysses", *here.where)
    _cost._ALONE_SECONDS = 0.0  # of documents: rows beside messages in small calls, too
    number, turns_of = -1, _stages.turns_of
    for number in here.counted():
        if here.device == "cpu" and number % 2:
            _stages.turns_of = lambda *call: InTurns(None)
        else:
            _stages.turns_of = turns_of
        # Shares of the heads in small calls, too.
        _cost._SHARED_SECONDS = 1e-30 if number % 4 < 2 else 1.0
        # New memory holds NaN then.
        torch.use_deterministic_algorithms(here.device == "cpu" and number % 3 == 0)
        case = drawn(number, here.ranks, here.device, methods)
        check(case, here.rank, here.ranks, here.arguments(case))
    torch.use_deterministic_algorithms(False)
    print(number + 1, "random calls")


def positions_of_each_rank(here: Here) -> None:
    """Shards as tensors, which each rank gives for its own rows."""
    rows = (torch.arange(40) * 7 % 40).tensor_split(here.ranks)
    x = Draw(3, here.device).tensors(1, 4, 2, 40, 8, 8, torch.float32)
    q, k, v = (x[name][:, :, rows[here.rank]] for name in "qkv")  # type: ignore[index]
    by_all = afd.attention(q, k, v, shards=afd.Shards.of_positions(rows), causal=True)
    assert torch.equal(afd.attention(q, k, v, shards=rows[here.rank], causal=True), by_all)


def shards_of_tensors(here: Here) -> None:
    """What shard cuts unshard puts together."""
    draw = Draw(5, here.device)
    whole = draw.normal(3, 41, 2)
    for shards in ("contiguous", "zigzag", draw.shards(41, here.ranks)):
        part = afd.shard(whole, shards, dim=1)
        rows = afd.positions(41, shards, device=here.device)
        assert torch.equal(part, whole[:, rows])
        if dist.get_backend() != "gloo" or here.device == "cpu":
            assert torch.equal(afd.unshard(part, shards, dim=1), whole)


def kernels(here: Here) -> None:
    """Kernels in place of PyTorch: on the CPU by the simulator."""
    for method, more in (
        ("ring", {"causal": True}),
        ("all-gather", {"causal": True, "left": 9}),
        ("ring", {"causal": True, "ends": [0, *range(2, 40, 3), 40]}),
        ("ulysses", {"causal": True, "ends": [0, 17, 40]}),
        ("all-gather", {"key_ranges": Draw(1, "cpu").ranges(1, 1, 40, 2, n=40)}),
    ):
        draw = Draw(11, here.device)
        case = Case(
            40, "zigzag", method, implementation="ampere",
            tensors=draw.tensors(1, 4, 2, 40, 16, 16, torch.bfloat16), **more,
        )  # fmt: skip
        check(case, here.rank, here.ranks, {})


def same_bits(here: Here) -> None:
    """A call gives the same bits every time, gradients too."""
    torch.use_deterministic_algorithms(True)
    n, d = (2000, 128) if here.device != "cpu" else (60, 8)
    for method in ("ring", "all-gather", "ulysses", *here.where):
        tensors = Draw(7, here.device).tensors(1, 8, 2, n, d, d, torch.bfloat16)
        case = Case(n, "zigzag", method, causal=True, tensors=tensors)
        first, second = (run(case, here.rank, here.ranks, here.arguments(case)) for _ in range(2))
        for name, x, y in zip(NAMES, first, second, strict=True):
            assert x is y is None or torch.equal(x, y), (method, name)  # type: ignore[arg-type]
    torch.use_deterministic_algorithms(False)


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """A call raises the same error on all ranks."""
    with pytest.raises(kind) as caught:
        call()
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, sentence)
    assert len(set(said)) == 1, said


def faults(here: Here) -> None:
    """What does not fit is an error on all ranks, after which calls work."""
    draw, last = Draw(9, here.device), here.rank == here.ranks - 1
    q = draw.normal(1, 4, 8, 8)
    name = f"rank {here.ranks - 1} of the group"
    refused(lambda: afd.attention(q, q, q[:, :, last:]), ValueError, name, "v has shape")
    refused(lambda: afd.attention(q, q, q[:, : 4 - last]), ValueError, name)
    refused(lambda: afd.attention(q, q.to(torch.float16) if last else q, q), TypeError, name)
    refused(lambda: afd.attention(q, q, q, causal=last), afd.GroupError, "window (None, 0)")
    if here.ranks > 2:
        refused(lambda: afd.attention(q, q, q, softcap=3.0 + last), afd.GroupError, name)
    refused(lambda: afd.attention(q, q, q, method="hybrid"), archflash.UnsupportedError, "mesh")
    refused(lambda: afd.attention(q, q, q, method="tree"), ValueError, "'tree'")
    refused(lambda: afd.attention(*[q[:, :, last:]] * 3), ValueError, "by the shards")
    if here.device == "cpu":
        refused(lambda: afd.unshard(q[:, :, 4 * last :], "zigzag", dim=2), ValueError, "rows, and")
    cu_seqlens = torch.tensor([0, 9], dtype=torch.int32)
    packed = q[0].transpose(0, 1)
    refused(lambda: afd.attention(*[packed] * 3, cu_seqlens=cu_seqlens), ValueError, "end with 9")
    sinks = draw.normal(4)
    refused(lambda: afd.attention(q, q, q, sinks=sinks[: 4 - last]), ValueError, name, "sinks")
    refused(lambda: afd.attention(q, q, q, sinks=sinks.half() if last else sinks), afd.GroupError)
    refused(lambda: afd.attention(q, q, q, window=(2.5, 0)), TypeError, "window left is 2.5")

    def forced_on_one() -> Any:
        with archflash.force("torch") if last else contextlib.nullcontext():
            return afd.attention(q, q, q)

    refused(forced_on_one, afd.GroupError, "implementation")
    # A rank without rows makes no call that could refuse anything.
    rows = [torch.arange(8)[: 8 * (r == 0)] for r in range(here.ranks)]
    shards = afd.Shards.of_positions(rows)
    some = q if here.rank == 0 else q[:, :, :0]
    refused(lambda: afd.attention(some, some, some, shards=shards, scale=math.nan), ValueError)
    for method in ("ring", "ulysses"):
        refused(
            lambda method=method: afd.attention(
                some, some, some, shards=shards, method=method, implementation="ampere"
            ),
            archflash.ForcedImplementationError, "float32",
        )  # fmt: skip
    # Shards that are known are planned with before the others have answered.
    ends = torch.tensor([0, 3, 6 * here.ranks, 8 * here.ranks], dtype=torch.int32)
    dealt = afd.Shards.documents(ends, here.ranks)
    held = [draw.normal(dealt.rows(r), 4, 8) for r in range(here.ranks)][here.rank]
    more: dict[str, Any] = {"shards": dealt, "cu_seqlens": ends, "method": "all-gather"}
    right = afd.attention(held, held, held, **more)
    refused(lambda: afd.attention(*[held] * 3, causal=last, **more), afd.GroupError, name)
    some_rows = held[last:]
    refused(lambda: afd.attention(*[some_rows] * 3, **more), ValueError, "those of")
    wrong = more | {"cu_seqlens": ends - int(last)}
    refused(lambda: afd.attention(*[held] * 3, **wrong), ValueError, name, "must start with 0")
    wrong = more | {"cu_seqlens": ends[:-1]}
    refused(lambda: afd.attention(*[held] * 3, **wrong), ValueError, "hold")
    wrong = more | {"cu_seqlens": ends[: 4 - last]}
    refused(lambda: afd.attention(*[held] * 3, **wrong), afd.GroupError, "cu_seqlens")
    assert torch.equal(afd.attention(held, held, held, **more), right)
    # cu_seqlens that numpy or a view has changed are read anew.
    lengths = torch.tensor([0, 4, 8 * here.ranks], dtype=torch.int32)
    before = afd.attention(*[packed] * 3, cu_seqlens=lengths)
    lengths.data[1] = 8 * here.ranks - 4
    after = afd.attention(*[packed] * 3, cu_seqlens=lengths)
    changed = torch.tensor(float((before != after).any()))
    changed = changed.to(here.device) if dist.get_backend() == "nccl" else changed
    dist.all_reduce(changed)
    assert changed.item() > 0
    # One rank goes back while the others go on.
    x = q.clone().requires_grad_()
    out = afd.attention(x, q, q)
    if last:
        refused(lambda: out.sum().backward(), afd.GroupError, "the backward pass")
    else:
        refused(lambda: afd.attention(x, q, q), afd.GroupError, "the backward pass")
    case = Case(8 * here.ranks, "zigzag", "auto", causal=True,
                tensors=draw.tensors(1, 4, 2, 8 * here.ranks, 64, 64, torch.float32))  # fmt: skip
    check(case, here.rank, here.ranks, {})


def watched_calls(here: Here) -> None:
    """torch.compile breaks its graph, checkpointing repeats a call, transforms are refused."""
    draw = Draw(19, here.device)
    q, k = draw.normal(1, 4, 32, 64).requires_grad_(), draw.normal(1, 2, 32, 64).requires_grad_()

    def attend(q: Tensor, k: Tensor) -> Tensor:
        out: Tensor = afd.attention(q * 2, k, k, causal=True, shards="zigzag") + 1
        return out.sin()

    wanted = attend(q, k)
    gradients = torch.autograd.grad(wanted.sum(), (q, k))
    compiled = torch.compile(attend, backend="aot_eager")
    for call in (lambda: compiled(q, k), lambda: checkpoint(attend, q, k, use_reentrant=False)):
        found = call()
        torch.testing.assert_close(found, wanted)
        for x, y in zip(torch.autograd.grad(found.sum(), (q, k)), gradients, strict=True):
            torch.testing.assert_close(x, y)
    refused(
        lambda: torch.func.grad(lambda q: attend(q, k).sum())(q),
        archflash.UnsupportedError, "transforms",
    )  # fmt: skip
    first_two = dist.new_group([0, 1])  # beside the default group
    if here.rank < 2:
        out = afd.attention(q, k, k, group=first_two)
        torch.testing.assert_close(out, afd.attention(q, k, k, group=first_two, method="ring"))


def transformer_engines_call(here: Here) -> None:
    """The arguments of TransformerEngine's function, in its three layouts."""
    from archflash.compat.transformer_engine import attn_forward_func_with_cp

    draw, n, none = Draw(13, here.device), 24 * here.ranks, [None] * 6
    sinks = draw.normal(4)
    tensors = draw.tensors(2, 4, 2, n, 16, 16, torch.float32) | {"sinks": sinks}
    case = Case(n, "zigzag", "", causal=True, tensors=tensors)
    x = case.tensors
    wanted, rows = reference(case)[0], case.held(here.ranks).positions(here.rank)
    assert wanted is not None
    for comm, layout in (("p2p", "bshd"), ("all_gather", "sbhd"), ("a2a", "bshd")):
        order = (0, 2, 1, 3) if layout == "bshd" else (2, 0, 1, 3)
        local = [x[name][:, :, rows].permute(order) for name in "qkv"]  # type: ignore[index]
        out = attn_forward_func_with_cp(
            True, *local, *none, 0.0, dist.group.WORLD, None, None, comm, qkv_format=layout,
            softmax_type="learnable", softmax_offset=sinks[None, :, None, None],
        )  # fmt: skip
        expected = wanted[:, :, rows].permute(order).to(out.dtype)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    # Sequences of 5, 2 and n - 20 rows, with padding behind them.
    step = 2 * here.ranks
    real, starts = [0, 5, 7, n - 13], [0, -(-5 // step) * step]
    starts.append(starts[-1] + step)
    starts.append(starts[-1] + -(-(n - 20) // step) * step)
    total, ends = starts[-1], []
    for i, start in enumerate(starts[:-1]):
        ends += [start, start + real[i + 1] - real[i]]
    tensors = draw.tensors(1, 4, 2, total, 16, 16, torch.float32) | {"sinks": None}
    case = Case(total, "zigzag", "", causal=True, ends=[*ends, total], tensors=tensors)
    wanted = reference(case)[0]
    assert wanted is not None
    rows = torch.cat(
        [
            a + afd.Shards.zigzag(b - a, here.ranks).positions(here.rank)
            for a, b in itertools.pairwise(starts)
        ]
    )
    local = [case.tensors[name][0, :, rows].transpose(0, 1) for name in "qkv"]  # type: ignore[index]
    given = [torch.tensor(x, dtype=torch.int32) for x in (real, real, starts, starts)]
    out = attn_forward_func_with_cp(
        True, *local, given[0], given[1], None, None, given[2], given[3], 0.0, dist.group.WORLD,
        None, None, "all_gather", qkv_format="thd", attn_mask_type="padding_causal",
    )  # fmt: skip
    expected = wanted[0][:, rows].transpose(0, 1).to(out.dtype)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    with pytest.raises(archflash.UnsupportedError, match="padding of 'sbhd'"):
        attn_forward_func_with_cp(
            True, *local, *none, 0.0, dist.group.WORLD, None, None, qkv_format="sbhd",
            attn_mask_type="padding",
        )  # fmt: skip
    with pytest.raises(archflash.UnsupportedError, match="fp8"):
        attn_forward_func_with_cp(
            True, *local, *none, 0.5, dist.group.WORLD, None, None, fp8=True
        )  # fmt: skip


def models_of_transformers(here: Here) -> None:
    """Tiny models give the logits and gradients that they give in one process."""
    import transformers

    from archflash.integrations.transformers_parallel import NAME, sharing

    sizes = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    n = 20 * here.ranks
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
    for config, more, cu_seqlens in (
        ("LlamaConfig", {}, None),
        ("LlamaConfig", {}, torch.tensor([0, 7, 25, n], dtype=torch.int32)),
        ("MistralConfig", {"sliding_window": 5}, None),
        ("GptOssConfig", experts, None),
    ):
        torch.manual_seed(0)
        made = getattr(transformers, config)(**sizes, **more)
        model = transformers.AutoModelForCausalLM.from_config(made).eval()
        ids = torch.randint(1, 99, (1, n))
        ends = [0, n] if cu_seqlens is None else cu_seqlens.tolist()
        places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
        model.set_attn_implementation("eager")
        wanted = model(ids, position_ids=places, use_cache=False).logits
        wanted.square().sum().backward()
        whole = [x.grad.clone() for x in model.parameters() if x.grad is not None]
        model.zero_grad()
        model.set_attn_implementation(NAME)
        rows = afd.positions(n, "zigzag")
        with sharing("zigzag", cu_seqlens=cu_seqlens):
            found = model(ids[:, rows], position_ids=places[:, rows], use_cache=False).logits
            with pytest.raises(archflash.UnsupportedError, match="padding"):
                model(ids[:, rows], attention_mask=(ids[:, rows] > 50).long(), use_cache=False)
        torch.testing.assert_close(found, wanted[:, rows], atol=1e-4, rtol=1e-4)
        found.square().sum().backward()
        for x, y in zip((x for x in model.parameters() if x.grad is not None), whole, strict=True):
            dist.all_reduce(x.grad)
            torch.testing.assert_close(x.grad, y, atol=1e-2, rtol=1e-3)
    with pytest.raises(archflash.UnsupportedError, match="sharing"):
        model(ids, use_cache=False)


def pytorchs_context_parallel(here: Here) -> None:
    """PyTorch's own ring, whose calls of its operators archflash.enable() serves, compiled too."""

    def attend(*given: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)

    _context_parallel(here, attend)
    _context_parallel(here, torch.compile(attend))


def _context_parallel(here: Here, attend: Callable[..., Tensor]) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (here.ranks,))
    n = 256 * here.ranks
    tensors = Draw(17, here.device).tensors(1, 4, 4, n, 64, 64, torch.bfloat16)
    case = Case(n, "zigzag", "", causal=True, tensors=tensors | {"dlse": None, "sinks": None})
    rows = case.held(here.ranks).positions(here.rank)
    buffers = [tensors[name].clone() for name in ("q", "k", "v", "dout")]  # type: ignore[union-attr]
    archflash.stats(reset=True)
    with (
        archflash.enabled(),
        context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
        ),
    ):
        *leaves, dout = buffers
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = attend(*leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert sum(archflash.stats().served.values()) > 0, archflash.stats()
    wanted = reference(case)
    for x, y in zip(found, (wanted[0], *wanted[2:5]), strict=True):
        assert y is not None
        y = y[:, :, rows]
        assert float((x.double() - y).abs().max() / y.abs().max()) < 3e-2


def gloo_beside_groups(here: Here) -> None:
    """The group that is made beside one of NCCL comes about although ranks belong to different
    numbers of groups.
    """
    groups = [dist.new_group([0]), dist.new_group([0, 1]), dist.new_group()]
    for group in (groups[2], groups[1]):
        if dist.get_rank(group) < 0:
            continue
        gloo = gloo_beside(group, here.device.split(":")[0])
        parts = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        gloo.allgather([parts], [torch.full((1,), float(dist.get_rank(group)))]).wait()
        assert [x.item() for x in parts] == list(range(len(parts)))


def broken_in_the_middle(here: Here) -> None:
    """A rank that raises, or is too slow, in the middle of a call is an error on the others within
    the time-out of the group. Other groups work before, meanwhile and after.
    """
    q = Draw(1, here.device).normal(1, 4, 8 * here.ranks, 16).requires_grad_()
    attend, seconds = _stages.attention, 1.0
    other = dist.new_group(backend="gloo")

    def raises() -> None:
        raise MemoryError("in the middle")

    for method, fails, kind in (
        ("ring", raises, MemoryError),
        ("ulysses", raises, MemoryError),
        ("ring", lambda: time.sleep(2.5 * seconds), afd.GroupError),
    ):
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
        wanted = afd.attention(q, q, q, group=group, method=method)
        calls = itertools.count(1)

        def last_fails(*tensors: Any, fails: Any = fails, calls: Any = calls, **more: Any) -> Any:
            if here.rank == here.ranks - 1 and next(calls) == 1:
                fails()
            return attend(*tensors, **more)

        def call_on(group: Any = group, method: str = method) -> None:
            while True:  # until the ranks miss each other
                afd.attention(q, q, q, group=group, method=method).sum().backward()

        _stages.attention = last_fails
        start = time.monotonic()
        expected = kind if here.rank == here.ranks - 1 else afd.GroupError
        with pytest.raises(expected):
            call_on()
        assert time.monotonic() - start < 5 * seconds
        _stages.attention = attend
        found = afd.attention(q, q, q, group=other, method=method)
        torch.testing.assert_close(found, wanted)


def missing(here: Here) -> None:
    """A rank that does not come, and one that dies, are errors within the group's time-out."""
    q = torch.zeros(1, 2, 4, 8)
    short = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1))
    start = time.monotonic()
    if here.rank:
        time.sleep(2)
    else:
        with pytest.raises(afd.GroupError, match="not all ranks"):
            afd.attention(q, q, q, group=short)
        assert time.monotonic() - start < 10
    dist.barrier()
    tensors = Draw(1, here.device).tensors(1, 2, 2, 4, 64, 64, torch.float32)
    check(Case(4, "zigzag", "ring", tensors=tensors), here.rank, here.ranks, {})
    q = q.to(here.device)
    attend, calls = _stages.attention, itertools.count(1)

    def last_is_killed(*tensors: Any, **more: Any) -> Any:
        if here.rank == here.ranks - 1 and next(calls) == 20:
            print("done", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return attend(*tensors, **more)

    _stages.attention = last_is_killed

    def call_on() -> None:
        while True:
            afd.attention(q, q, q, method="ring")

    with pytest.raises(RuntimeError):
        call_on()


def run_ranks(ranks: int, folder: Path, *arguments: str) -> list[str]:
    """What each rank said of its parts."""
    run_with_forks(["-m", "tests.distributed_worker", str(ranks), str(folder), *arguments], folder)
    return [(folder / f"{rank}.txt").read_text() for rank in range(ranks)]


def run_with_forks(arguments: list[str], folder: Path, seconds: float = 300) -> str:
    """What a process of Python says, whose forks are ended with it."""
    said = folder / "said.txt"
    with said.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        run.wait(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return said.read_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    # Importing torch takes longer than most parts: one process does it for all ranks.
    for rank in range(asked.ranks):
        if os.fork() == 0:
            with (asked.folder / f"{rank}.txt").open("w") as file:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(file.fileno(), stream.fileno())
            return run_parts(rank, asked)
    for _ in range(asked.ranks):
        os.wait()


def run_parts(rank: int, asked: argparse.Namespace) -> None:
    device = asked.device
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        asked.backend, init_method=f"file://{asked.folder / 'store'}", rank=rank,
        world_size=asked.ranks, timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    where = {}
    if asked.ranks % 2 == 0 and asked.ranks > 2:
        where["hybrid"] = {"mesh": init_device_mesh(asked.device, (2, asked.ranks // 2))}
    here = Here(rank, asked.ranks, device, where, asked.seconds, asked.cases)
    for part in asked.parts:
        start = time.monotonic()
        globals()[part](here)
        print(f"{part}: {time.monotonic() - start:.1f} s", flush=True)
    print("done", flush=True)
    if asked.parts[-1] == "missing":
        os._exit(0)  # messages that wait for a dead rank would keep the process to their time-out
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
