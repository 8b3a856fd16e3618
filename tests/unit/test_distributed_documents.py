"""Documents over ranks: how they are dealt, and what is computed while messages travel."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unit.test_distributed import Arriving, dense, documents, of_dense_call
from tests.unit.test_distributed import in_threads as ranks_in_threads

import archflash.distributed as afd
from archflash.distributed import (
    _agree,
    _beside,
    _cost,
    _dealing,
    _exchange,
    _moving,
    _neighbours,
    _plan,
    _stages,
    _travel,
    _work,
)
from archflash.distributed._calls import Packed
from archflash.distributed._mask import Mask
from archflash.distributed._shards import rows_of

SHAPE = _cost.Shape(1, 64, 8, 128, 128, 2)
OPTIONS = _stages.Options(None, None, None)


def lengths(ends: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(ends) if b > a]


# --- who holds which documents ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 16])
def test_dealt_documents_are_whole(ranks: int, causal: bool) -> None:
    for seed in range(4):
        n = lengths(documents(4096 * ranks, seed))
        for rows, held in zip(n, _moving.deal_apart(n, ranks, causal), strict=True):
            pieces = sorted(piece for some in held.values() for piece in some)
            assert [0, *(b for _, b in pieces)] == [*(a for a, _ in pieces), rows]
            for some in held.values():
                assert some == _dealing.joined(some)


def test_few_messages_wait_where_few_ranks_have_documents() -> None:
    """Work, rows and what waits are never worse than by dealing alone, and much better on average;
    no rank has much more than the others.
    """
    for ranks in (2, 4, 8):
        before, after = [], []
        for seed in range(8):
            n = lengths(documents(8192 * ranks, seed))
            dealt, moved = (
                _moving._Loads(n, ranks, True, deal(n, ranks, True))
                for deal in (_dealing.deal, _moving.deal_apart)
            )
            assert moved.is_balanced() or moved.held == dealt.held
            before.append(dealt.cost())
            after.append(moved.cost())
            assert after[-1] <= before[-1]
        assert sum(after) < sum(before) - 0.03 * len(after), (ranks, before, after)


def test_the_benchmarks_documents_travel_little() -> None:
    ends = documents(32768, 1)
    shards = afd.Shards.documents(ends, 4)
    travels = _cost.traffic(shards, Mask(ends[-1], None, 0, tuple(ends)))
    assert max(map(max, travels)) <= 4096  # 5,888 by dealing alone
    pairs = [_cost.pairs_of(Mask(ends[-1], None, 0, tuple(ends)), x) for x in shards.pieces]
    assert max(pairs) <= 1.01 * sum(pairs) / 4
    # An exchange would take longer than 3% more work.
    ends = documents(16384, 1)
    shards = afd.Shards.documents(ends, 2)
    assert not any(_cost.traffic(shards, Mask(ends[-1], None, 0, tuple(ends)))[0])


# --- what is computed while messages travel ---


def plans_of(
    ends: list[int], ranks: int, left: int | None = None, right: int | None = 0,
    shards: afd.Shards | None = None,
) -> tuple[list[_plan.Plan], Mask]:  # fmt: skip
    mask = Mask(ends[-1], left, right, tuple(ends))
    held = afd.Shards.documents(ends, ranks) if shards is None else shards
    plans = [_plan.make(held, mask, r, [range(ranks)], [(0, 2)]) for r in range(ranks)]
    return [_beside.beside_messages(plan, True, 0) for plan in plans], mask


def test_documents_that_only_ranges_tell_apart_wait_with_the_others() -> None:
    """Their ranges would be those of all local rows."""
    ends = [*range(0, 241, 20), 340]
    shards = afd.Shards(340, (((0, 290),), ((290, 340),)))
    assert len(plans_of(ends, 2, 5, 3, shards)[0][0].stages) == 1


def test_very_many_documents_are_dealt_in_no_time() -> None:
    lengths = [*itertools.repeat(10, 3000), 20_000, 20_000]
    assert _moving.deal_apart(lengths, 8, True) == _dealing.deal(lengths, 8, True)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(None, 0), (None, None), (9, 0), (5, 3)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_see_what_the_mask_says_once(
    ranks: int, bounds: tuple[int | None, int | None]
) -> None:
    beside = 0
    for seed in range(12):
        ends = documents(90 * ranks, seed, shortest=1, longest=7)
        shards = None if seed % 3 else afd.Shards.contiguous(ends[-1], ranks)
        plans, mask = plans_of(ends, ranks, *bounds, shards)
        whole = dense(mask)[0]
        for rank, plan in enumerate(plans):
            assert plan.in_one
            assert [s.travels for s in plan.stages].count(True) == 1
            assert [s.travels for s in plan.stages_back].count(True) == 1
            rows, own = plan.shards.positions(rank), set(plan.shards.positions(rank).tolist())
            for stages in (plan.stages, plan.stages_back):
                counted = torch.zeros(len(rows), mask.n, dtype=torch.int64)
                ranged = False
                for stage in stages:
                    keys = rows_of(stage.keys)
                    here = torch.zeros(len(rows), len(keys), dtype=torch.int64)
                    for part in stage.parts:
                        packed = isinstance(part.call, Packed)
                        ranged |= not packed and not hasattr(part.call, "k0")
                        for call in part.call.calls if packed else (part.call,) * (not ranged):
                            of_dense_call(call, here)
                    counted[:, keys] += here
                    if not stage.travels:
                        beside += 1
                        assert set(keys.tolist()) <= own
                        assert _travel.where_alone(plan, stage) is not None
                        assert not stage.sends + stage.receives
                if not ranged:
                    assert torch.equal(counted, whole[rows].long())
                calls = sorted(
                    (part.call.q0, part.call.q1) for stage in stages for part in stage.parts
                )
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(calls)) or not plan.once
    assert beside > 12 or bounds == (9, 0) or bounds == (5, 3)


@pytest.mark.parametrize("seed", range(6))
def test_an_exchange_brings_the_keys_in_order(seed: int) -> None:
    ranks, ends = 4, documents(1200, seed, shortest=3, longest=9)
    pieces = [[(at, at + 30) for at in range(30 * r, ends[-1], 30 * ranks)] for r in range(ranks)]
    pieces = [[(a, min(b, ends[-1])) for a, b in some] for some in pieces]
    many = afd.Shards(ends[-1], tuple(map(tuple, pieces))) if seed % 2 else None
    plans, _ = plans_of(ends, ranks, shards=many)
    stages = [next(stage for stage in plan.stages if stage.travels) for plan in plans]
    found = [_travel.layout_of(plan, stage) for plan, stage in zip(plans, stages, strict=True)]
    sent = []
    for rank, layout in enumerate(found):
        mine = plans[rank].shards.positions(rank)
        rows = torch.cat([mine[a:b] for a, b in layout.sent] or [mine[:0]])
        sent.append(rows.split(layout.sent_rows))
    for rank, (layout, stage) in enumerate(zip(found, stages, strict=True)):
        assert layout.received_rows == [len(sent[source][rank]) for source in range(ranks)]
        mine = plans[rank].shards.positions(rank)
        arrived = torch.cat([sent[source][rank] for source in range(ranks)])
        buffer = torch.cat([arrived, *(mine[a:b] for a, b in layout.own)])
        keys = rows_of(stage.keys)
        assert torch.equal(buffer if layout.order is None else buffer[layout.order], keys)
        assert torch.equal(
            torch.cat([keys[a:b] for a, b in layout.received] or [keys[:0]]), arrived
        )


@pytest.mark.parametrize("backward", [False, True])
def test_rows_that_need_no_keys_do_not_wait(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, ranks = [0, 20, 48, 53, 80], 2
    # Rank 0 has two documents and the end of another one, whose start is rank 1's.
    shards = afd.Shards(80, (((0, 48), (70, 80)), ((48, 70),)))
    plans, _ = plans_of(ends, ranks, shards=shards)
    done: list[str] = []

    class Pending(_exchange.Pending):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def wait(self) -> None:
            done.append(f"{self._name} arrived")

    def start(group: Any, sends: _exchange.Block, receives: _exchange.Block) -> Pending:
        name = "gradients" if "keys start" in done else "keys"
        done.append(f"{name} start")
        receives.x.zero_()
        return Pending(name)

    def attention(q: Tensor, *others: Any, out: Tensor | None = None, **more: Any) -> Any:
        done.append(f"{len(q if q.ndim == 3 else q[0, 0])} rows")
        lse = q[..., 0].float()
        return out, lse.T if q.ndim == 3 else lse

    monkeypatch.setattr(_exchange, "start_in_one", start)
    monkeypatch.setattr(_stages, "attention", attention)
    monkeypatch.setattr(
        _stages, "attention_backward", lambda dout, q, *others, **more: attention(q)
    )
    n = shards.rows(0)
    q, k = torch.zeros(1, 4, n, 8), torch.zeros(1, 2, n, 8)
    lse = torch.zeros(1, 4, n)
    if backward:
        _stages.backward(plans[0], None, OPTIONS, q, None, q, k, k, q, lse)
        assert done == [
            "keys start", "48 rows", "keys arrived", "10 rows", "gradients start",
            "gradients arrived",
        ]  # fmt: skip
    else:
        _stages.forward(plans[0], None, OPTIONS, q, k, k, None, torch.empty_like(q))
        assert done == ["keys start", "48 rows", "keys arrived", "10 rows"]


def start_in_one(rank: Any, sends: _exchange.Block, receives: _exchange.Block) -> Arriving:
    for target, x in enumerate(sends.x.split(sends.rows)):
        if len(x):
            rank.to(target).put(x.clone())
    parts = enumerate(receives.x.split(receives.rows))
    return Arriving([(rank.of(source), x) for source, x in parts if len(x)])


@pytest.mark.parametrize("least", [0, 1e9])
@pytest.mark.parametrize("seed", range(4))
def test_one_exchange_gives_what_several_messages_give(
    seed: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least: with 1e9 all rows wait for messages, also those of a rank that only sends some."""
    ranks, ends = 3, [0, 20, 48, 53, 80 + seed, 110]
    # The second rank only receives, the third one only sends.
    shards = afd.Shards(110, (((0, 30), (100, 110)), ((30, 60),), ((60, 100),)))
    if seed % 2:
        shards = afd.Shards(110, (((0, 60),), ((60, 100),), ((100, 110),)))
    mask = Mask(110, None, 0, tuple(ends))
    plans = [_plan.make(shards, mask, r, [range(ranks)], [(0, 2)]) for r in range(ranks)]
    torch.manual_seed(seed)
    q, dout = torch.randn(2, 1, 4, 110, 8).unbind(0)
    k, v = torch.randn(2, 1, 2, 110, 8).unbind(0)

    def passes(number: int, rank: Any, plan: _plan.Plan) -> list[Tensor]:
        rows = shards.positions(number)
        a, b, c, d = (x[:, :, rows] for x in (q, k, v, dout))
        out = torch.empty_like(a)
        lse = _stages.forward(plan, rank, OPTIONS, a, b, c, None, out)
        return [out, lse, *_stages.backward(plan, rank, OPTIONS, d, None, a, b, c, out, lse)]

    monkeypatch.setattr(_exchange, "start_in_one", start_in_one)
    wanted = ranks_in_threads(ranks, lambda n, r: passes(n, r, plans[n]), monkeypatch)
    in_one = [_beside.beside_messages(plan, True, least) for plan in plans]
    found = ranks_in_threads(ranks, lambda n, r: passes(n, r, in_one[n]), monkeypatch)
    if least:  # also where nothing is computed beside messages
        in_one = [plan.changed(in_one=True) for plan in plans]
        found += ranks_in_threads(ranks, lambda n, r: passes(n, r, in_one[n]), monkeypatch)
    for number, results in enumerate(found):
        for x, y in zip(results, wanted[number % ranks], strict=True):
            torch.testing.assert_close(x, y)


def test_messages_are_one_exchange_where_documents_travel_in_short_calls() -> None:
    def is_in_one(ends: list[int], ranks: int, method: str = "all-gather") -> bool:
        mask = Mask(ends[-1], None, 0, tuple(ends))
        ranked = _work.Ranks(None, None, 0, ranks)
        shards = afd.Shards.documents(ends, ranks)
        return _work._planned(ranked, shards, mask, method, SHAPE)[0].in_one

    assert is_in_one(documents(32768, 1), 4)
    assert not is_in_one(documents(32768, 1), 4, "ring")
    assert not is_in_one([0, 8192, 16384], 2)  # nothing travels
    assert not is_in_one([0, 100000, 262144], 4)  # keys are received where they belong


def test_few_pairs_wait_with_the_others() -> None:
    ends, shards = [0, 4, 80], afd.Shards(80, (((0, 4), (40, 80)), ((4, 40),)))
    plan = _plan.make(shards, Mask(80, None, 0, tuple(ends)), 0, [range(2)], [(0, 2)])
    assert len(_beside.beside_messages(plan, True, 10).stages) == 2
    assert len(_beside.beside_messages(plan, True, 11).stages) == 1


# --- what ranks say before they listen ---


def test_an_agreement_is_heard_later_or_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work is done between; also a call that fails there leaves no answer to the next one."""
    ranks = 3
    group_of = threading.local()

    def call(rank: int, neighbours: _neighbours.Neighbours) -> list[Any]:
        group_of.beside = _agree._Beside(None, neighbours)
        found: list[Any] = []
        for number in range(3):
            words = f"call {number}"
            agreement = _agree.Agreement([None], _agree.Statement(rank, words), number)
            try:
                with agreement:
                    if number == 1 and rank == 0:
                        raise KeyError("meanwhile")
                    found.append(agreement.rows() if number != 2 else number)
            except KeyError as error:
                found.append(str(error))
        found.append(agreement.rows())
        return found

    monkeypatch.setattr(_agree, "_beside_of", lambda group: group_of.beside)
    monkeypatch.setattr(_agree, "_whole", lambda group: threading.current_thread())
    results = in_threads(ranks, call)
    assert results[0] == [[0, 1, 2], "'meanwhile'", 2, [0, 1, 2]]
    assert results[1] == results[2] == [[0, 1, 2], [0, 1, 2], 2, [0, 1, 2]]


def in_threads(ranks: int, call: Any) -> list[Any]:
    """What each rank's call gives, which gets its number and its neighbours."""
    said: list[list[str]] = [[""] * ranks for _ in range(3)]
    barrier, results = threading.Barrier(ranks), [None] * ranks

    def run(rank: int) -> None:
        rounds = iter(said)

        def tell(text: str) -> list[str]:
            here = next(rounds)
            here[rank] = text
            barrier.wait(timeout=30)
            return here

        neighbours = _neighbours.meet(rank, ranks, 5.0, tell)
        assert neighbours is not None
        results[rank] = call(rank, neighbours)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
