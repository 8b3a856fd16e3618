"""The order in which row tiles are computed, and the model of how evenly it fills a GPU."""

from __future__ import annotations

import random
import re
import struct
from typing import Any

import pytest
import torch
from bench import walks
from plan_cases import DEVICES, call, plan_of, serves, tile_of
from tests.many_cases import check_all, one_test_for_each

from archflash import _archflash as native
from archflash._api import find_device, make_problem

ORDER_OFFSET = 260  # of AttentionParams::order
FOLDERS = {  # with 16-bit kernels that choose an order, each with the GPUs whose plans are checked
    "ampere": ("A100", "RTX 3090", "H200"),
    "ada": ("L4", "RTX 4090"),
    "blackwell_consumer": ("RTX 5090", "RTX 5060 laptop", "GB10", "H200"),
    "blackwell_dc": ("B200", "B300"),
    "hopper": ("H200", "H100"),
}
HERE = [(k, d) for k, devices in FOLDERS.items() for d in devices if serves(k, d)]
# hopper chooses by what was measured on an H200 (src/hopper/NOTES.md), the others by the model.
BY_THE_MODEL = [(k, d) for k, d in HERE if k != "hopper"]


def order_of(plan: native.LaunchPlan) -> tuple[int, int, int]:
    """(heads_per_group, turned_begin, turned_end): the plan's, which its kernels are told."""
    tile = tile_of(plan)
    for launch in plan.to_dict()["launches"][-1:]:
        told = struct.unpack_from("<3i", bytes.fromhex(launch["params"]), ORDER_OFFSET)
        assert told == (tile.heads_per_group, tile.turned_begin, tile.turned_end)
    return tile.heads_per_group, tile.turned_begin, tile.turned_end


# --- the model ---


def slow_makespan(times: list[float], workers: int, rounds: bool) -> float:
    until = [0.0] * workers
    for number, time in enumerate(times):
        turn, place = divmod(number, workers)
        if not rounds:
            place = until.index(min(until))
        elif turn % 2:
            place = workers - 1 - place
        until[place] += time
    return max(until)


@pytest.mark.parametrize("rounds", [False, True], ids=["queue", "rounds"])
def test_the_makespan_is_that_of_workers_one_by_one(rounds: bool) -> None:
    dice = random.Random(1)
    for _ in range(200):
        times = [float(dice.randint(0, 40)) for _ in range(dice.randint(1, 60))]
        workers = dice.randint(1, 20)
        model = native.makespan_of(times, workers, rounds)
        assert model.time == slow_makespan(times, workers, rounds)
        assert model.ideal == max(sum(times) / workers, *times, 0.0)
        assert model.workers == workers
    assert native.makespan_of([], 4, rounds).share == 1
    assert native.makespan_of([3.0, 1.0], 2, rounds).share == 1
    assert native.makespan_of([2.0, 2.0, 2.0], 2, rounds).share == 0.75


@pytest.mark.parametrize(
    ("times", "workers", "message"),
    [
        ([1.0], 0, "0 workers: a walk has from 1 to"),
        ([1.0], -3, "-3 workers: a walk has from 1 to"),
        ([2.0, -1.0], 2, "a tile that takes -1: times are finite and not negative"),
        ([float("nan")], 2, "a tile that takes nan: times are finite"),
        ([float("inf")], 2, "a tile that takes inf: times are finite"),
    ],
)
def test_workers_and_times_that_cannot_be_are_refused(
    times: list[float], workers: int, message: str
) -> None:
    for rounds in (False, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            native.makespan_of(times, workers, rounds)


def test_the_walk_of_a_plan_wants_the_lengths_of_its_sequences() -> None:
    q = torch.empty(100, 2, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    packed = plan_of(make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends), "A100", "ampere")
    plain = plan_of(call("bfloat16", nq=100), "A100", "ampere")
    nothing = plan_of(call("bfloat16", nq=0), "A100", "ampere")
    for plan, lengths, message in (
        (packed, ([], []), "q_lengths has 0 lengths: this plan has 2 packed sequences"),
        (packed, ([60, 40], [100]), "k_lengths has 1 lengths: this plan has 2"),
        (packed, ([60, -1], [60, 40]), "q_lengths has the length -1: all sequences together"),
        (packed, ([60, 40], [60, 41]), "k_lengths has the length 41: all sequences together"),
        (plain, ([100], [100]), "q_lengths has 1 lengths: this plan has 0 packed sequences"),
        (nothing, ([], []), "this plan computes nothing by tiles"),
    ):
        for ask in (native.makespan, native.tile_times):
            with pytest.raises(ValueError, match=re.escape(message)):
                ask(plan, *lengths)
    assert native.makespan(packed, [60, 40], [60, 40]).time > 0
    with pytest.raises(ValueError, match="packed sequences: there is no model"):
        native.reads_of_keys(packed)


def visited_keys(plan: native.LaunchPlan, nq: int, nk: int, first: int, see: Any) -> float:
    """Keys of the blocks from the first to the last key that a row of a tile sees."""
    tile = tile_of(plan)
    rows = torch.arange(first, min(first + tile.block_q, nq))[:, None]
    seen = see(rows, torch.arange(nk)[None, :], nk - nq).expand(len(rows), nk).any(0).nonzero()
    if len(seen) == 0:
        return 0.0
    blocks = int(seen[-1]) // tile.block_k - int(seen[0]) // tile.block_k + 1
    return float(blocks * tile.block_k)


def causal(row: torch.Tensor, key: torch.Tensor, offset: int) -> torch.Tensor:
    return key <= row + offset


def window(row: torch.Tensor, key: torch.Tensor, offset: int) -> torch.Tensor:
    return (key >= row + offset - 300) & (key <= row + offset + 50)


@pytest.mark.parametrize(("kernel", "device"), HERE)
@pytest.mark.parametrize(
    ("options", "see", "nq", "nk"),
    [
        ({}, lambda row, key, offset: (row + key) >= 0, 900, 700),
        ({"causal": True}, causal, 1500, 1500),
        ({"causal": True}, causal, 700, 1900),
        ({"causal": True, "q_offset": -250}, lambda r, k, _: k <= r - 250, 1100, 900),
        ({"window": (300, 50)}, window, 1300, 1300),
    ],
    ids=["all", "causal", "causal-more-keys", "causal-late", "window"],
)
def test_the_times_of_tiles_are_their_keys_in_the_order_of_the_kernel(
    kernel: str, device: str, options: dict[str, Any], see: Any, nq: int, nk: int
) -> None:
    problem = call("bfloat16", b=2, hq=6, hkv=3, nq=nq, nk=nk, d=64, num_splits=1, **options)
    plan = plan_of(problem, device, kernel)
    group, begin, end = order_of(plan)
    tile = tile_of(plan)
    rows = -(-nq // tile.block_q)
    expected = []
    for first in range(0, 12, group):
        for place in range(rows):
            from_last = begin + end - 1 - place if begin <= place < end else place
            keys = visited_keys(plan, nq, nk, (rows - 1 - from_last) * tile.block_q, see)
            for head in range(first, min(first + group, 12)):
                expected.append((head // 2, native.TILE_KEYS + keys))
    assert native.tile_times(plan) == expected


def test_the_times_of_packed_tiles_are_those_of_their_sequences() -> None:
    lengths = [70, 1000, 0, 3, 513]
    q = torch.empty(sum(lengths), 2, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(6, dtype=torch.int32, device="meta")
    problem = make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
    plan = plan_of(problem, "A100", "ampere")
    rows = tile_of(plan).block_q
    times = native.tile_times(plan, lengths, lengths)
    assert len(times) <= tile_of(plan).tiles
    found = [time for head, time in times if head == 0 and time > 0]
    expected = []
    for n in lengths:
        for first in reversed(range(0, n, rows)):
            expected.append(native.TILE_KEYS + visited_keys(plan, n, n, first, causal))
    assert found == expected
    assert sorted(time for _, time in times) == sorted(
        time for head, time in times if head == 0 for _ in range(2)
    )


def test_the_keys_of_a_group_that_fits_l2_are_read_once() -> None:
    small = plan_of(call("float16", b=1, hq=8, hkv=8, nq=4096, nk=4096, d=128, causal=True), "B200",
                    "blackwell_dc")  # fmt: skip
    assert native.reads_of_keys(small) == 1
    fields = plan_of(call("float16", b=1, hq=32, hkv=32, nq=32768, nk=32768, d=128, causal=True),
                     "A100", "ampere").to_dict()  # fmt: skip
    reads = []
    for heads in (1, 32):
        fields["tile"]["heads_per_group"] = heads
        reads.append(native.reads_of_keys(native.LaunchPlan.unchecked_from_dict(fields)))
    assert reads[0] == 1
    assert reads[1] > 4  # the tiles of 32 heads that run together are few for each head


# --- the order that plans choose ---


def changed(plan: native.LaunchPlan, **tile: int) -> native.LaunchPlan:
    fields = plan.to_dict()
    fields["tile"] |= tile
    return native.LaunchPlan.unchecked_from_dict(fields)


def queue_time(plan: native.LaunchPlan) -> float:
    """The time if the next tile goes to whoever is free first."""
    times = [time for _, time in native.tile_times(plan)]
    return float(native.makespan_of(times, native.makespan(plan).workers, False).time)


GRID = [
    (b, hq, hkv, n, d)
    for b, hq, hkv in ((1, 8, 8), (1, 12, 12), (1, 32, 8), (2, 16, 16), (3, 12, 12))
    for n in (1000, 2048, 4001, 8192)
    for d in (64, 128, 256)
]


def causal_plan(
    kernel: str, device: str, b: int, hq: int, hkv: int, n: int, d: int
) -> native.LaunchPlan:
    problem = call("bfloat16", b=b, hq=hq, hkv=hkv, nq=n, nk=n, d=d, causal=True, num_splits=1)
    return plan_of(problem, device, kernel)


@one_test_for_each({f"{k} on {d}": [(k, d, *row) for row in GRID] for k, d in HERE})
def test_the_chosen_order_is_never_much_worse_than_groups_that_fit_l2(
    kernel: str, device: str, b: int, hq: int, hkv: int, n: int, d: int
) -> None:
    plan = causal_plan(kernel, device, b, hq, hkv, n, d)
    group, begin, end = order_of(plan)
    kv_heads = b * hkv
    assert group % (hq // hkv) == 0
    assert 0 <= begin <= end <= -(-n // tile_of(plan).block_q)
    fitting = find_device(device).l2_bytes // 2 // (n * 2 * d * 2)
    size = min(max(fitting, 1), kv_heads) * hq // hkv
    simple = changed(plan, heads_per_group=size, turned_begin=0, turned_end=0)
    worst = 1.021 if kernel != "hopper" else 1.07  # its groups are smaller, for L2
    assert queue_time(plan) <= worst * queue_time(simple)


@one_test_for_each({f"{k} on {d}": [(k, d, *row) for row in GRID] for k, d in HERE})
def test_what_a_group_reads_stays_in_l2_or_is_shared_by_tiles(
    kernel: str, device: str, b: int, hq: int, hkv: int, n: int, d: int
) -> None:
    plan = causal_plan(kernel, device, b, hq, hkv, n, d)
    group = order_of(plan)[0]
    in_group = group * hkv // hq
    fits = in_group * n * 2 * d * 2 <= find_device(device).l2_bytes // 2
    shared = native.makespan(plan).workers // in_group >= 4
    # Where there are few tiles, those of all heads make one group on hopper.
    few = kernel == "hopper" and tile_of(plan).tiles <= 6 * find_device(device).sm_count
    assert in_group == 1 or fits or shared or few


@pytest.mark.parametrize(("kernel", "device"), BY_THE_MODEL)
def test_tiles_of_equal_time_go_head_by_head(kernel: str, device: str) -> None:
    """With sinks, without which ampere's grid says where a tile lies."""
    problem = call("bfloat16", b=2, hq=32, hkv=8, nq=4096, nk=4096, d=128, sinks=True)
    assert order_of(plan_of(problem, device, kernel)) == (4, 0, 0)
    few_keys = call("bfloat16", b=2, hq=16, hkv=16, nq=4096, nk=77, d=64, num_splits=1, sinks=True)
    assert order_of(plan_of(few_keys, device, kernel)) == (32, 0, 0)


def test_groups_have_one_size_where_that_is_possible() -> None:
    """A remnant of heads would start with its longest tiles when all others are done."""
    problem = call("bfloat16", b=2, hq=16, hkv=16, nq=4001, nk=4001, d=128, causal=True)
    plan = plan_of(problem, "H200", "ampere")
    assert 32 % order_of(plan)[0] == 0
    assert native.makespan(plan).share > 0.95
    long = call("bfloat16", b=2, hq=16, hkv=16, nq=8192, nk=8192, d=64, causal=True)
    of_hopper = plan_of(long, "H100", "hopper")
    assert order_of(of_hopper)[0] == 8
    assert native.makespan(of_hopper).share > 0.96
    assert native.makespan(changed(of_hopper, heads_per_group=5)).share < 0.91
    assert native.makespan(changed(plan, heads_per_group=15)).share < 0.75  # two are left over


def test_a_part_of_the_order_is_turned_where_the_longest_tiles_divide_badly() -> None:
    problem = call("float16", b=4, hq=12, hkv=12, nq=2048, nk=2048, d=64, causal=True)
    plan = plan_of(problem, "B200", "blackwell_dc")
    _, begin, end = order_of(plan)
    assert end - begin >= 2
    straight = queue_time(changed(plan, turned_begin=0, turned_end=0))
    assert queue_time(plan) < 0.95 * straight
    assert f"but number {begin + 1} to {end} of them" in dict(plan.notes)["order"]


def test_explain_says_how_even_a_walk_is() -> None:
    problem = call("bfloat16", b=1, hq=32, hkv=8, nq=4096, nk=4096, d=128, causal=True)
    plan = plan_of(problem, "A100", "ampere")
    share = round(100 * native.makespan(plan).share)
    assert dict(plan.notes)["balance"].startswith(f"{share}% of the best")


# --- the shapes of the benchmark ---


def test_the_walks_of_the_benchmark_are_even_enough() -> None:
    def check(row: tuple[walks.Shape, str, str]) -> None:
        shape, gpu, name = row
        plan = walks.plans(shape)[gpu, name]
        walk = walks.walk_of(plan, shape.lengths)
        if walk.tiles >= 2 and not walks.in_rounds(plan):
            goal = shape.goal if walk.tiles >= 4 else walks.OTHER_GOAL
            assert walk.share >= goal, f"{walk.share:.3f} of {walk.tile}"

    rows = [(shape, *key) for shape in walks.shapes() for key in walks.plans(shape)]
    assert len(rows) > 60
    check_all(rows, check, name=lambda row: f"{row[0].name}, {row[2]} on {row[1]}")


def test_the_table_of_walks_is_up_to_date() -> None:
    assert walks.TABLE.read_text() == walks.table(), "run python -m bench.walks --write"


def test_every_device_is_known() -> None:
    assert {device for _, device in HERE} <= set(DEVICES)
