"""archflash.distributed: plans of 1 to 1,024 ranks, and what several processes compute."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

# The worker is no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed_worker import run_ranks, run_with_forks

import archflash.distributed as afd
from archflash import _merge
from archflash.distributed import (
    _agree,
    _cost,
    _exchange,
    _neighbours,
    _partial,
    _plan,
    _stages,
    _travel,
    _turns,
)
from archflash.distributed._calls import Dense, Packed
from archflash.distributed._heads import Split
from archflash.distributed._mask import Mask
from archflash.distributed._plan import Stage

ROOT = Path(__file__).parents[2]
MANY = (1, 2, 3, 4, 8, 64, 1000, 1024)
SHAPE = _cost.Shape(1, 64, 8, 128, 128, 2)


def documents(n: int, seed: int = 0, shortest: int = 8, longest: int = 14) -> list[int]:
    """Where documents start whose lengths' logarithms are uniform, and n."""
    generator, ends = torch.Generator().manual_seed(seed), [0]
    while ends[-1] < n:
        bits = float(torch.empty(1).uniform_(shortest, longest, generator=generator))
        ends.append(min(n, ends[-1] + int(2**bits)))
    return ends


# --- shards ---


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("n", [0, 1, 37, 1501])
def test_every_row_belongs_to_one_rank(n: int, ranks: int) -> None:
    for shards in (
        afd.Shards.contiguous(n, ranks),
        afd.Shards.zigzag(n, ranks),
        afd.Shards.documents(documents(n, shortest=1, longest=12), ranks),
        afd.Shards.of_positions(torch.randperm(n).tensor_split(ranks)),
    ):
        of_ranks = [shards.positions(r) for r in range(ranks)]
        assert torch.equal(torch.cat(of_ranks).sort().values, torch.arange(n))
        assert [shards.rows(r) for r in range(ranks)] == [len(x) for x in of_ranks]


def test_positions_keep_their_order() -> None:
    rows = [torch.tensor([5, 3, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 1, 2])]
    shards = afd.Shards.of_positions(rows)
    assert [shards.positions(r).tolist() for r in range(3)] == [[5, 3, 4], [], [0, 1, 2]]
    assert not shards.sorted
    assert shards.in_order().positions(0).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[0, 1], [1, 2]], "belong to one rank"), ([[0, 1], [3]], "belong to one rank"),
     ([[[0]], [[1]]], "shape"), ([[0, 2]], "belong to one rank")],
)  # fmt: skip
def test_shards_that_are_none_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        afd.Shards.of_positions([torch.tensor(x) for x in rows])
    with pytest.raises(ValueError, match="must start with 0"):
        afd.Shards.documents([3, 5], 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_work_is_balanced(ranks: int) -> None:
    n = 8192 * ranks
    zigzag = _cost.explain(afd.Shards.zigzag(n, ranks), Mask(n, None, 0), SHAPE, afd.Speeds())
    assert zigzag.estimates[0].balance <= 1.001
    for seed in range(3 if ranks < 200 else 1):
        ends = documents(n, seed, longest=15)
        shards = afd.Shards.documents(ends, ranks)
        said = _cost.explain(shards, Mask(n, None, 0, tuple(ends)), SHAPE, afd.Speeds())
        gathering = next(e for e in said.estimates if e.method == "all-gather")
        assert gathering.balance <= 1.05
        assert max(shards.rows(r) for r in range(ranks)) <= 1.06 * 8192


# --- masks ---


def drawn_mask(seed: int, n: int) -> Mask:
    generator = torch.Generator().manual_seed(seed)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=generator))]

    cuts = torch.randint(0, n + 1, (of(1, 4, 15),), generator=generator).sort().values.tolist()
    ends = of(None, (0, *cuts, n))
    ranges = None
    if of(0, 0, 1):
        shape = of(1, 2), 1, of(1, n), of(1, 3), 2
        ranges = torch.randint(0, n + 1, shape, generator=generator).sort(-1).values.int()
    return Mask(n, of(None, None, 0, 3, 20), of(None, 0, 0, 2), ends, ranges)


def dense(mask: Mask) -> Tensor:
    """Which keys each row sees: bool (batch, rows, keys)."""
    i, j = torch.arange(mask.n)[:, None], torch.arange(mask.n)
    seen = torch.ones(mask.n, mask.n, dtype=torch.bool)
    if mask.left is not None:
        seen &= j >= i - mask.left
    if mask.right is not None:
        seen &= j <= i + mask.right
    if mask.ends is not None:
        number = torch.bucketize(j, torch.tensor(mask.ends), right=True)
        seen &= number[:, None] == number
    if mask.key_ranges is None:
        return seen[None]
    begin, end = mask.key_ranges[:, 0].unbind(-1)
    return seen & ((j >= begin[..., None]) & (j < end[..., None])).any(2)


def of_dense_call(call: Dense, mask: Tensor) -> None:
    """Adds the pairs of a call to numbers (rows, keys)."""
    row = torch.arange(call.q1 - call.q0)[:, None] + call.offset
    key = torch.arange(call.k1 - call.k0)
    seen = torch.ones(len(row), len(key), dtype=torch.bool)
    if call.left is not None:
        seen &= key >= row - call.left
    if call.right is not None:
        seen &= key <= row + call.right
    mask[call.q0 : call.q1, call.k0 : call.k1] += seen


def drawn_shards(seed: int, n: int, ranks: int, ends: tuple[int, ...] | None) -> afd.Shards:
    generator = torch.Generator().manual_seed(seed)
    made: list[Callable[[], afd.Shards]] = [
        lambda: afd.Shards.contiguous(n, ranks),
        lambda: afd.Shards.zigzag(n, ranks),
        lambda: afd.Shards.documents(ends or (0, n), ranks),
        lambda: afd.Shards.of_positions([torch.arange(n)[r::ranks] for r in range(ranks)]),
        lambda: afd.Shards.of_positions(torch.randperm(n, generator=generator).tensor_split(ranks)),
    ]
    return made[seed % len(made)]().in_order()


@pytest.mark.parametrize("seed", range(60))
def test_calls_see_what_the_mask_says_once(seed: int) -> None:
    n, ranks = (1, 7, 40, 90)[seed % 4], (1, 2, 3, 5)[seed // 4 % 4]
    mask = drawn_mask(seed, n)
    shards, whole = drawn_shards(seed // 3, n, ranks, mask.ends), dense(mask)
    pairs = [_cost.pairs_of(mask, shards.pieces[r]) for r in range(ranks)]
    if len(whole) == 1:
        assert pairs == [int(whole[:, shards.positions(r)].sum()) for r in range(ranks)]
    everyone = list(range(ranks))
    for sources in ([everyone], [[r] for r in everyone], [everyone[:1], everyone[1:]]):
        plans = [_plan.make(shards, mask, r, sources) for r in everyone]
        for rank, plan in enumerate(plans):
            rows = shards.positions(rank)
            counted = torch.zeros(len(rows), n, dtype=torch.int64)
            ranged = torch.zeros(len(rows), n, dtype=torch.bool)
            for stage in plan.stages:
                keys = torch.cat([torch.arange(a, b) for a, b in stage.keys] or [rows[:0]])
                here = torch.zeros(len(rows), len(keys), dtype=torch.int64)
                for part in stage.parts:
                    if isinstance(part.call, (Dense, Packed)):
                        packed = isinstance(part.call, Packed)
                        for call in part.call.calls if packed else (part.call,):
                            of_dense_call(call, here)
                            assert call.bottom_right or not packed
                    else:
                        ranged[:, keys] = True
                counted[:, keys] += here
            # What ranges tell is the tensor's business; each pair is in one call.
            assert torch.equal(counted * ~ranged, whole.any(0)[rows].long() * ~ranged)
            assert not (counted.bool() & ranged).any()
            assert whole.any(0)[rows][:, ~ranged.any(0)].sum() == counted.sum() or ranged.any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_ranks_send_what_others_wait_for(seed: int) -> None:
    n, ranks = 400, 4
    mask = drawn_mask(seed, n)
    shards = drawn_shards(seed, n, ranks, mask.ends)
    sent, received = _cost.traffic(shards, mask)
    everyone = list(range(ranks))
    for sources in ([everyone], [[r] for r in everyone]):
        plans = [_plan.make(shards, mask, r, sources) for r in everyone]
        for number in range(len(sources)):
            stages: list[Stage] = [plan.stages[number] for plan in plans]
            sends = {(r, t): pieces for r, s in enumerate(stages) for t, pieces in s.sends}
            waits = {(t, r): pieces for r, s in enumerate(stages) for t, pieces in s.receives}
            assert sends == waits
        for rank, plan in enumerate(plans):
            for words, total in (("sends", sent), ("receives", received)):
                rows = sum(
                    b - a
                    for stage in plan.stages
                    for _, pieces in getattr(stage, words)
                    for a, b in pieces
                )
                assert rows == total[rank]


def test_a_ring_sends_only_what_is_seen() -> None:
    n, ranks = 4096, 8
    window, causal = Mask(n, 255, 0), Mask(n, None, 0)
    shards = afd.Shards.contiguous(n, ranks)
    assert _cost.traffic(shards, window)[1] == [0] + [255] * 7
    assert _cost.traffic(shards, causal)[1] == [512 * r for r in range(ranks)]
    plan = _plan.make(shards, window, 3, [[r] for r in range(ranks)])
    assert [bool(stage.receives) for stage in plan.stages] == [False, True] + [False] * 6


@pytest.mark.parametrize("ranks", [r for r in MANY if r > 1])
def test_plans_of_many_ranks(ranks: int) -> None:
    n = 64 * ranks + 5
    shards, mask = afd.Shards.zigzag(n, ranks), Mask(n, None, 0)
    for rank in {0, ranks // 2, ranks - 1}:
        gathering = _plan.make(shards, mask, rank, [range(ranks)])
        assert gathering.once
        assert len(gathering.stages[0].parts) == 1  # both pieces in one launch
        ring = _plan.make(shards, mask, rank, [[r] for r in range(ranks)])
        assert sum(stage.key_rows for stage in ring.stages) == gathering.stages[0].key_rows
        assert all(len(stage.parts) <= 1 for stage in ring.stages)
    said = _cost.explain(shards, mask, SHAPE, afd.Speeds())
    assert {e.method for e in said.estimates} == {"all-gather", "ring", "ulysses"}
    for estimate in said.estimates:
        assert sum(estimate.sent) == sum(estimate.received)
        assert sum(estimate.pairs) == 64 * n * (n + 1) // 2


def test_heads_of_fewer_kv_heads_than_ranks() -> None:
    assert Split.make(8, 2, 4).of_kv == ((0,), (0,), (1,), (1,))
    assert Split.make(8, 2, 4).repeats
    assert Split.make(8, 4, 2).of_kv == ((0, 1), (2, 3))
    assert not Split.make(8, 4, 2).repeats
    # Query heads 2, 3 and 4 of three ranks are of two heads of k, one of them twice.
    assert Split.make(8, 4, 3).of_kv[1] == (1, 1, 2)
    for heads, heads_kv, ranks in itertools.product((1, 4, 6), (1, 2), (1, 3, 8)):
        if heads % heads_kv:
            continue
        split = Split.make(heads, heads_kv, ranks)
        assert split.of_q[0][0] == 0
        assert split.of_q[-1][1] == heads
        for (first, end), groups in zip(split.of_q, split.of_kv, strict=True):
            each = (end - first) // max(1, len(groups))
            found = [groups[i // each] for i in range(end - first)]
            assert found == [h // (heads // heads_kv) for h in range(first, end)]


def test_explain_says_what_speaks_for_a_method() -> None:
    q = torch.empty(1, 64, 65536, 128, device="meta", dtype=torch.bfloat16)
    said = afd.explain(q, q[:, :8], q[:, :8], ranks=8, shards="zigzag", causal=True)
    text = str(said)
    assert text.startswith(f"65536 rows on 8 ranks, 8192 to 8192 each: {said.chosen}")
    assert all(method in text for method in ("all-gather", "ring", "ulysses"))
    slow = afd.explain(
        q, q[:, :8], q[:, :8], ranks=128, shards="zigzag", speeds=afd.Speeds(room=1e6)
    )
    by_name = {e.method: e.reason for e in slow.estimates}
    assert "buffers" in by_name["all-gather"]
    assert "heads" in by_name["ulysses"]
    assert slow.chosen == "ring"
    hybrid = afd.explain(q, q[:, :8], q[:, :8], ranks=(2, 4), shards="zigzag", causal=True)
    assert hybrid.chosen == "hybrid"
    assert hybrid.estimates[0].balance == pytest.approx(1.0)


# --- many ranks in threads ---


class Rank:
    """A rank of a group whose messages go through queues, one for each number of a message."""

    def __init__(self, number: int, wires: Wires) -> None:
        self.number, self.wires = number, wires
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def to(self, target: int) -> queue.Queue[Tensor]:
        self._sent[target] += 1
        return self.wires[self.number, target, self._sent[target]]

    def of(self, source: int) -> queue.Queue[Tensor]:
        self._received[source] += 1
        return self.wires[source, self.number, self._received[source]]


class Wires(dict[tuple[int, int, int], "queue.Queue[Tensor]"]):
    _lock = threading.Lock()

    def __missing__(self, key: tuple[int, int, int]) -> queue.Queue[Tensor]:
        with self._lock:
            return self.setdefault(key, queue.Queue())


class Arriving:
    def __init__(self, receives: list[tuple[queue.Queue[Tensor], Tensor]]) -> None:
        self._receives = receives

    def let_start(self) -> None:
        pass

    def wait(self) -> None:
        receives, self._receives = self._receives, []
        for wire, x in receives:
            x.copy_(wire.get(timeout=30))


def start(rank: Rank, sends: Any, receives: Any) -> Arriving:
    for target, x in sends:
        rank.to(target).put(x.clone())
    return Arriving([(rank.of(source), x) for source, x in receives])


def in_threads(
    ranks: int, call: Callable[[int, Rank], Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    wires = Wires()
    monkeypatch.setattr(_exchange, "start", start)
    results: list[Any] = [None] * ranks

    def run(number: int) -> None:
        results[number] = call(number, Rank(number, wires))

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results
    return results


def attend_in_threads(
    ranks: int,
    tensors: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    implementation: str | None = None,
) -> list[Tensor]:
    """Output and gradients of a ring under a causal mask."""
    q, k, v, dout = tensors
    n, heads_kv = q.shape[2], k.shape[1]
    shards = afd.Shards.zigzag(n, ranks)
    options = _stages.Options(None, None, implementation)
    shares = [(head, head + 1) for head in range(heads_kv)]

    def of_rank(number: int, rank: Rank) -> list[Tensor]:
        sources = [[r] for r in range(ranks)]
        plan = _plan.make(shards, Mask(n, None, 0), number, sources, shares)
        a, b, c, d = (x[:, :, shards.positions(number)] for x in (q, k, v, dout))
        out = torch.empty_like(a)
        lse = _stages.forward(plan, rank, options, a, b, c, None, out)  # type: ignore[arg-type]
        dq, dkv = _stages.backward(plan, rank, options, d, None, a, b, c, out, lse)  # type: ignore[arg-type]
        return [out, dq.to(q.dtype), *(x.to(q.dtype) for x in _travel.columns(dkv, q.shape[3]))]

    found = in_threads(ranks, of_rank, monkeypatch)
    order = torch.cat([shards.positions(r) for r in range(ranks)]).argsort()
    return [torch.cat(parts, 2)[:, :, order] for parts in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "implementation", "n", "ranks"),
    [
        (torch.float32, None, 192, (1, 3, 16)),
        (torch.bfloat16, None, 192, (1, 7, 16)),
        (torch.bfloat16, "ampere", 32, (1, 8)),
    ],
)
def test_the_error_does_not_grow_with_the_ranks(
    dtype: torch.dtype, implementation: str | None, n: int, ranks: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    heads_q, heads_kv = (4, 2) if implementation is None else (1, 1)
    wide = [
        torch.randn(1, heads, n, 16, generator=generator)
        for heads in (heads_q, heads_kv, heads_kv, heads_q)
    ]
    tensors = [x.to(dtype) for x in wide]
    q, k, v, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(heads_q // heads_kv, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, dout)]
    errors = []
    for count in ranks:
        found = attend_in_threads(count, tensors, monkeypatch, implementation)
        errors.append(
            [float((x - y).square().mean().sqrt()) for x, y in zip(found, wanted, strict=True)]
        )
    # Partial outputs of 16 bits would make it 1.25 times as large with 16 ranks.
    for alone, *several in zip(*errors, strict=True):
        assert max(several) <= 1.15 * alone, (alone, several)


@pytest.mark.parametrize("backward", [False, True])
def test_messages_travel_while_kernels_run(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages and kernels that each take a while, nothing but the first message of keys, and
    the last one of gradients, is waited for.
    """
    delay, ranks, rows = 0.02, 6, 8
    waited = []

    class Message:
        def __init__(self) -> None:
            self._end: float | None = time.monotonic() + delay

        def let_start(self) -> None:
            pass

        def wait(self) -> None:
            left = 0.0 if self._end is None else self._end - time.monotonic()
            self._end = None
            if left > delay / 4:
                waited.append(left)
            time.sleep(max(0.0, left))

    def start(_: Any, sends: Any, receives: Any) -> Any:
        return Message() if sends or receives else Arriving([])

    def attention(q: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        time.sleep(1.5 * delay)
        return q.float(), q[..., 0].float()

    monkeypatch.setattr(_exchange, "start", start)
    monkeypatch.setattr(_stages, "attention", attention)
    monkeypatch.setattr(_stages, "attention_backward", lambda *x, **y: attention(x[1]))
    x = torch.zeros(1, 1, rows, 8)
    shards = afd.Shards.contiguous(rows * ranks, ranks)
    plan = _plan.make(shards, Mask(rows * ranks), 2, [[r] for r in range(ranks)])
    options, lse = _stages.Options(None, None, None), torch.zeros(1, 1, rows)
    if backward:
        _stages.backward(plan, None, options, x, None, x, x, x, x, lse)
    else:
        _stages.forward(plan, None, options, x, x, x, None, torch.empty_like(x))
    assert len(waited) <= (1 if backward else 0), waited


class KeysInMemory(TorchDispatchMode):
    """Counts memory of the size of the keys, or values, of a stage, beside some tensors."""

    def __init__(self, size: int, *beside: Tensor) -> None:
        super().__init__()
        self.most, self._size = 0, size
        self._beside = {x.untyped_storage().data_ptr() for x in beside}
        self._live: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() == self._size:
                self._live[x.untyped_storage().data_ptr()] = StorageWeakRef(x.untyped_storage())
        self._live = {
            at: x for at, x in self._live.items() if not x.expired() and at not in self._beside
        }
        self.most = max(self.most, len(self._live))
        return found


@pytest.mark.parametrize(("rows_outermost", "most"), [(True, 4), (False, 6)])
def test_a_ring_has_the_keys_of_two_stages_at_a_time(
    rows_outermost: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ranks = 32, 6
    shape = (1, rows, 2, 16) if rows_outermost else (1, 2, rows, 16)
    k, v = torch.zeros(shape), torch.zeros(shape)
    k, v = (x.transpose(1, 2) if rows_outermost else x for x in (k, v))
    q = torch.zeros(1, 6, rows, 16)
    plan = _plan.make(
        afd.Shards.contiguous(rows * ranks, ranks), Mask(rows * ranks), 2,
        [[r] for r in range(ranks)], [(0, 2)],
    )  # fmt: skip
    monkeypatch.setattr(_exchange, "start", lambda *messages: Arriving([]))
    monkeypatch.setattr(
        _stages, "attention", lambda q, *others, **options: (q.float(), q[..., 0].float())
    )
    options, out = _stages.Options(None, None, None), torch.empty_like(q)
    with KeysInMemory(k.numel() * 4, k, v) as counted:
        _stages.forward(plan, None, options, q, k, v, None, out)
    assert counted.most == most  # two of each


def test_all_gather_sends_from_the_buffer_that_it_computes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank's own rows are copied once."""
    rows, ranks = 32, 3
    k, v = torch.zeros(2, 1, 2, rows, 16).unbind(0)
    shards = afd.Shards.contiguous(rows * ranks, ranks)
    plan = _plan.make(shards, Mask(rows * ranks), 1, [range(ranks)], [(0, 2)])
    said = []
    monkeypatch.setattr(_exchange, "start", lambda *messages: said.append(messages) or Arriving([]))
    turns = _turns.Turns(None)
    keys = _travel.Arrivals(plan, plan.stages, None, k, v, turns)
    with KeysInMemory(rows * 2 * 32 * 4, k) as counted:
        keys.take(0)
    assert counted.most == 0
    _, sends, receives = said[0]
    buffers = {x.untyped_storage().data_ptr() for x in (keys.k, keys.v)}
    assert {x.untyped_storage().data_ptr() for _, x in (*sends, *receives)} == buffers
    assert [rank for rank, _ in sends] == [2, 0]  # keys and values together


@pytest.mark.parametrize("together", [True, False])
def test_many_pieces_for_a_rank_are_one_message(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of one process: what they send fits what they receive, and each one has the keys
    that its rows see, in order; own ones are added up where they belong.
    """
    ranks, ends = 4, (0, 150, 170, 204, 340, 347, 525, 559, 706, 775, 815, 820)
    mask = Mask(ends[-1], None, 0, ends)
    pieces = [[(at, at + 10) for at in range(10 * r, ends[-1], 10 * ranks)] for r in range(ranks)]
    shards = afd.Shards(ends[-1], tuple(map(tuple, pieces)))
    k, v = torch.arange(2 * ends[-1] * 6.0).view(2, 1, 2, ends[-1], 3).unbind(0)
    sources = [range(ranks)] if together else [[r] for r in range(ranks)]
    plans = [_plan.make(shards, mask, r, sources, [(0, 2)]) for r in range(ranks)]
    said: list[Any] = []
    monkeypatch.setattr(_exchange, "start", lambda *messages: said.append(messages) or Arriving([]))
    held = [shards.positions(r) for r in range(ranks)]
    for number in range(len(sources)):
        said.clear()
        keys = []
        for r, plan in enumerate(plans):
            stages = plan.stages[number : number + 1]
            keys.append(
                _travel.Arrivals(
                    plan, stages, None, k[:, :, held[r]], v[:, :, held[r]], _turns.Turns(None)
                )
            )
            keys[r]._together = together
            keys[r]._ask(1)
        sent = {(r, to): [] for r in range(ranks) for to in range(ranks)}
        for r, (_, sends, _) in enumerate(said):
            for to, x in sends:
                sent[r, to].append(x)
        most = max(map(len, sent.values()))
        # Keys and values together, or apart; a ring begins with the own ones.
        assert most == (1 if together else 2 if number else 0)
        for r, (_, _, receives) in enumerate(said):
            for source, x in receives:
                x.copy_(sent[source, r].pop(0))
        assert not any(sent.values())
        for plan, arrived in zip(plans, keys, strict=True):
            arrived.take(0)
            arrived.arrive()
            rows = torch.cat([torch.arange(*piece) for piece in plan.stages[number].keys])
            assert torch.equal(arrived.k, k[:, :, rows])
            assert torch.equal(arrived.v, v[:, :, rows])


class Streams:
    """What the streams of turns have done, and which of it each knows to be done."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wait_stream(self, other: Streams) -> None:
        self.done |= other.done


def test_turns_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one frees, the other still read: the next call may come from another stream."""
    current, beside = Streams(), Streams()
    monkeypatch.setattr(_turns, "_stream_beside", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    with _turns.Turns(torch.device("cuda", 0)):
        current.done.add("read")
        beside.done.add("written")
    assert current.done == beside.done == {"read", "written"}


def test_a_share_is_merged_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would read the results of its calls while they are computed."""
    here: list[int | str] = ["outside"]
    merged: list[int | str] = []
    added: list[int | str] = []

    class Turns:
        def __bool__(self) -> bool:
            return True

        def now(self) -> None:
            return None

        @contextlib.contextmanager
        def of(self, number: int) -> Iterator[None]:
            here.append(number)
            yield
            here.pop()

        def __enter__(self) -> None:
            here.append("current")

        def __exit__(self, *error: object) -> None:
            here.pop()

    def noted(notes: list[int | str], call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: notes.append(here[-1]) or call(*given)  # type: ignore[func-returns-value]

    rows, ranks = 12, 2
    shards = afd.Shards.zigzag(rows * ranks, ranks)
    plan = _plan.make(shards, Mask(rows * ranks, None, 0), 0, [range(ranks)], [(0, 1), (1, 2)])
    plan = dataclasses.replace(plan, once=False)
    q, k, v = torch.randn(3, 1, 2, rows, 16).unbind(0)
    monkeypatch.setattr(_exchange, "start", lambda *messages: Arriving([]))
    monkeypatch.setattr(_stages, "turns_of", lambda *_: Turns())
    for name in ("__init__", "_merge"):
        whole = getattr(_partial.Merged, name)
        monkeypatch.setattr(_partial.Merged, name, noted(merged, whole))
    monkeypatch.setattr(_travel.Returned, "add", noted(added, _travel.Returned.add))
    options, out = _stages.Options(None, None, None), torch.empty_like(q)
    lse = _stages.forward(plan, None, options, q, k, v, None, out)
    assert merged == [0, 0, 1, 1]
    _stages.backward(plan, None, options, q, None, q, k, v, out, lse)
    assert added == ["current"] * 2  # before the end, at which the streams wait


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("back", [False, True])
def test_shares_of_the_heads(heads: int, back: bool) -> None:
    """Little work is one share, and so is work beside which the messages take little time. Else a
    quarter is waited for, and there is room for two shares of keys at a time, in the backward pass
    with their gradients.
    """
    shape = _cost.Shape(1, 8 * heads, heads, 128, 128, 2)

    def shares(n: int, room: float, link: float = 30e9) -> tuple[tuple[int, int], ...]:
        shards = afd.Shards.zigzag(n, 2)
        speeds = _cost.Speeds(room=room, link=link)
        found = _cost.head_shares(shards, Mask(n, None, 0), shape, speeds, back=back)
        assert found[0][0] == 0
        assert found[-1][1] == heads
        assert all(a[1] == b[0] and b[1] > b[0] for a, b in itertools.pairwise(found))
        return found

    assert len(shares(512, 8e9)) == len(shares(65536, 8e9, 1e15)) == 1
    many = shares(65536, 8e9)
    assert many[0][1] == -(-heads // 4)
    assert len(many) <= _turns._MOST_TURNS
    if back and heads > 1:
        assert heads - many[-1][0] <= many[0][1]
    row = 256 * (2 + 4 * back)  # bytes of a head
    most = max(end - first for first, end in shares(65536, 2 * row * 32768 * 2))
    assert most <= 2


def test_float64_is_merged_by_plain_operations() -> None:
    """The kernel would read it as numbers of 16 bits."""
    parts = [torch.ones(1, 1, 2, 4, dtype=torch.float64) for _ in range(2)]
    reason = _merge._why_not(parts, [torch.zeros(1, 1, 2)] * 2, simulated=True)
    assert reason is not None
    assert "float64" in reason


# --- neighbours ---


def met(ranks: int, seconds: float = 5.0) -> list[_neighbours.Neighbours | None]:
    """What each rank gets, one thread for each."""
    said: list[list[str]] = [[""] * ranks for _ in range(3)]
    all_said = threading.Barrier(ranks)

    def rank(number: int) -> _neighbours.Neighbours | None:
        turns = iter(said)

        def tell(text: str) -> list[str]:
            texts = next(turns)
            texts[number] = text
            all_said.wait(10)
            return texts

        return _neighbours.meet(number, ranks, seconds, tell)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(rank, range(ranks)))


def test_neighbours_tell_each_other_bytes_in_the_order_of_ranks() -> None:
    found = met(3)
    for text in ("abcd", "efgh"):
        with ThreadPoolExecutor(3) as threads:
            mine = [f"{text}{r}".encode() for r in range(3)]
            said = list(threads.map(lambda x, y: x.gather(y), found, mine))  # type: ignore[union-attr]
        assert said == [mine] * 3


def test_a_neighbour_that_is_gone_or_late_is_an_error_on_the_others() -> None:
    one, other, third = met(3, seconds=0.1)
    assert one is not None
    assert other is not None
    assert third is not None
    with pytest.raises(TimeoutError, match=r"rank 1 did not come within 0.1 s"):
        one.gather(b"a")
    with pytest.raises(OSError):  # noqa: PT011, its kind depends on who wrote first
        other.gather(b"b")
    with pytest.raises(OSError):  # noqa: PT011
        third.gather(b"c")


def test_an_interrupted_neighbour_takes_no_late_answer_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = met(2)
    assert one is not None
    assert other is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_neighbours, "_let_others_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.gather(b"a")
    for each in (other, one):
        with pytest.raises(OSError):  # noqa: PT011, its kind depends on who wrote first
            each.gather(b"b")


def test_neighbours_wait_at_descriptors_of_any_number() -> None:
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("the system gives no descriptor so high")
    fcntl = pytest.importorskip("fcntl")
    mine, theirs = socket.socketpair()
    with mine, theirs:
        high = socket.socket(fileno=fcntl.fcntl(mine, fcntl.F_DUPFD, 1024))
        late = threading.Timer(0.05, theirs.sendall, (b"b",))
        late.start()
        assert _neighbours.Neighbours({1: high}, 0, 5.0).gather(b"a") == [b"a", b"b"]
        late.join()


def test_a_group_that_was_given_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    class Late:
        def takes(self, size: int) -> bool:
            return True

        def gather(self, mine: bytes) -> list[bytes]:
            raise errors.pop()

    def call(group: Any) -> None:
        _agree.agree([group], _agree.Statement(1, "f()"), 0)

    monkeypatch.setattr(_agree, "_beside_of", lambda group: _agree._Beside(None, Late()))  # type: ignore[arg-type]
    late, stopped = Group(), Group()
    errors = [KeyboardInterrupt(), TimeoutError("rank 1 did not come within 5 s")]
    with pytest.raises(afd.GroupError, match=r"make a new group .*rank 1 did not come within 5 s"):
        call(late)
    with pytest.raises(KeyboardInterrupt):
        call(stopped)
    for group, why in ((late, "rank 1 did not come within 5 s"), (stopped, "KeyboardInterrupt")):
        with pytest.raises(afd.GroupError, match=f"given up in an earlier call .*new_group.*{why}"):
            call(group)


def test_ctrl_c_while_a_rank_plans_waits_for_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = type("Group", (), {})()
    monkeypatch.setattr(_agree, "_beside_of", lambda group: _agree._Beside(None))
    with pytest.raises(KeyboardInterrupt), _agree.Agreement([group], _agree.Statement(1, "f()"), 0):
        raise KeyboardInterrupt
    with pytest.raises(afd.GroupError, match=r"given up in an earlier call .*KeyboardInterrupt"):
        _agree.agree([group], _agree.Statement(1, "f()"), 0)


@pytest.mark.parametrize("options", [None, SimpleNamespace(_timeout=timedelta(seconds=7))])
def test_the_time_out_of_a_backend_with_and_without_options(options: Any) -> None:
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    expected = torch.distributed.default_pg_timeout if options is None else timedelta(seconds=7)
    assert _agree._timeout(group, "cpu") == expected


def test_ranks_that_do_not_see_each_others_folders_have_no_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say so before any of them waits for a caller."""
    monkeypatch.setattr(_neighbours, "_MEETING", 60.0)
    monkeypatch.setattr(_neighbours.os, "access", lambda path, mode: False)
    began = time.monotonic()
    assert met(3) == [None] * 3
    assert time.monotonic() - began < 30


def test_a_caller_that_dies_while_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(socket.socket):
        def sendall(self, *_: Any) -> None:
            self.close()
            raise ConnectionError

    monkeypatch.setattr(_neighbours.socket, "socket", Dying)
    assert met(2) == [None, None]


def test_ranks_of_two_hosts_have_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = itertools.count()
    monkeypatch.setattr(_neighbours, "_host", lambda: f"host {next(hosts)}")
    assert met(2) == [None, None]
    monkeypatch.undo()
    monkeypatch.setattr(_neighbours.tempfile, "tempdir", "/there/is/none")
    assert met(2) == [None, None]


# --- several processes ---


@pytest.mark.slow
@pytest.mark.parametrize("cases", [8, pytest.param(80, marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        (
            2,
            "random_calls kernels positions_of_each_rank watched_calls broken_in_the_middle "
            "missing",
        ),
        (
            4,
            "random_calls shards_of_tensors same_bits faults gloo_beside_groups "
            "transformer_engines_call",
        ),
    ],
)
def test_ranks_give_what_one_process_gives(
    ranks: int, parts: str, cases: int, tmp_path: Path
) -> None:
    for text in run_ranks(ranks, tmp_path, *parts.split(), "--cases", str(cases)):
        assert text.endswith("done\n"), text[-3000:]


@pytest.mark.slow
def test_models_of_transformers_run_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for text in run_ranks(2, tmp_path, "models_of_transformers"):
        assert text.endswith("done\n"), text[-3000:]


@pytest.mark.slow
def test_the_example_trains_as_one_process_does(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # The ranks that torchrun starts: one process imports torch for both.
    program = f"""
import os, runpy, sys, torch
rank = int(os.fork() == 0)
os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                "MASTER_PORT": "{port}"}}
sys.argv = ["long_context.py", "--check"]
try:
    runpy.run_path({str(ROOT / "examples/long_context.py")!r}, run_name="__main__")
except SystemExit as end:
    print("rank", rank, "ends with", end.code, flush=True)
if rank == 0:
    os.wait()
"""
    said = run_with_forks(["-c", program], tmp_path)
    assert "a difference of" in said, said[-3000:]
    assert {"rank 0 ends with 0", "rank 1 ends with 0"} <= set(said.splitlines()), said[-3000:]


def test_a_call_without_a_process_group_says_so() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("another test made a process group")
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="init_process_group"):
        afd.attention(x, x, x)


def test_a_default_device_moves_no_plan() -> None:
    q = torch.empty(1, 4, 64, 16, device="meta")
    ranges = torch.zeros(1, 1, 64, 1, 2, dtype=torch.int32)
    ranges[..., 1] = torch.arange(64)[:, None] + 1

    def plans() -> list[str]:
        ways = ({"causal": True}, {"window": (9, 0)}, {"key_ranges": ranges})
        documents = afd.Shards.documents([0, 40, 64], 4)
        shards = ("zigzag", "contiguous", documents)
        return [
            str(afd.explain(q, q, q, ranks=4, shards=x, **way))
            for x, way in itertools.product(shards, ways)
        ]

    usual = plans()
    with torch.device("meta"):
        assert plans() == usual
