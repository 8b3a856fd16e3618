"""`archflash calibrate`: from made-up times of a card to choices, and the life of its file."""

from __future__ import annotations

import csv
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _calibrated, _dispatch, _measured, _proofs, _user_tables
from archflash.__main__ import main
from archflash._api import find_device, make_problem
from archflash._calibrate import fit, grid, measuring, worker
from archflash._calibrate.calls import Call
from archflash._calibrate.grid import Point
from archflash._calibrate.lab import Result
from archflash._call_times import BOTH, FORWARD, Family, Kind, Measured, Sizes
from archflash.cli import bench as bench_command
from archflash.cli import calibrate as command

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the benchmarks

from bench import calibrated

SMS = 132
SPEED = 5e8  # operations a microsecond


# --- a card of which only a formula is known ---


def card_us(name: str, point: Point, noise: random.Random | None = None) -> float:
    """Microseconds of a kernel on a card that does not exist. Kernels differ in their start, tiles,
    speed, and in what a tile costs beside its keys.
    """
    start, rows, speed, fixed = {
        "hopper": (6.5, 192, 1.0, 90.0),
        "torch-cudnn": (5.0, 128, 0.83, 30.0),
        "ampere": (4.0, 64, 0.62, 10.0),
        "torch-flash": (6.0, 128, 0.55, 20.0),
    }[name]
    b, hq, hkv, nq, nk = point.shape
    sizes, head_dims = point.sizes, point.d + point.dv
    if point.kind.passes == BOTH:
        speed, start = speed / 3.6, 4 * start
        # One kernel of ours reads K and V of shared heads once for each head of q.
        speed *= 0.8 if name == "hopper" and hq > hkv else 1.0
    tiles = b * hq * nq / rows
    seen = min(nk, sizes.seen + rows / 2) if point.kind.causal else sizes.seen
    of_tile = 2 * rows * (seen + fixed) * head_dims / (SPEED / SMS * speed)
    us = start + of_tile * max(tiles / SMS, 1.0)
    us = max(us, start + point.bytes() / 4e6)
    return us * (noise.gauss(1.0, 0.008) if noise else 1.0)


CANDIDATES = ("hopper", "torch-cudnn", "ampere", "torch-flash")
HOSTS = ("hopper", "ampere", "torch")  # which differ on the host, too


def measured_card(count: int) -> list[Measured]:
    noise = random.Random(1)
    dense = [p for p in grid.points(SMS, SPEED) if p.kind.dtype == "16 bits"]
    dense = [p for p in dense if p.kind.mask == "none" and p.kind.way == "dense"]
    return [
        Measured(p.kind, p.d, p.dv, p.sizes, {n: card_us(n, p, noise) for n in CANDIDATES})
        for p in dense[:count]
    ]


def made_up_entry(device: native.Device, count: int = 316) -> dict[str, Any]:
    host = {(p, name): 1.0 + (name == "torch") for p in (FORWARD, BOTH) for name in HOSTS}
    key = _calibrated.key_of(device)
    return fit.entry(key, "2026-11-28", SMS, measured_card(count), host, {})


def unmeasured(count: int) -> Iterator[Point]:
    chance = random.Random(7)
    known = set(grid.points(SMS, SPEED))
    while count:
        rows, heads = round(2 ** chance.uniform(7.5, 13.5)), round(2 ** chance.uniform(2, 10))
        d, causal = chance.choice((64, 128)), chance.random() < 0.5
        kind = Kind("16 bits", chance.choice((FORWARD, BOTH)), "many", causal)
        group = chance.choice((1, 1, 4))
        shape = (max(1, heads // 8), 8, 8 // group, rows, rows)
        point = Point(kind, shape, d, d)
        if point not in known and point.flops() < 4000 * SPEED:
            count -= 1
            yield point


@pytest.fixture(scope="module")
def card() -> _calibrated.Table:
    return _calibrated.Table.read(made_up_entry(find_device("H200")))


def test_the_choice_for_sizes_that_were_not_measured_is_the_fastest(
    card: _calibrated.Table,
) -> None:
    losses = []
    winners = set()
    for point in unmeasured(300):
        prediction = card.predict(point.kind, point.sizes, point.d, point.dv)
        assert prediction is not None
        chosen = prediction.in_order(CANDIDATES)[0]
        true = {name: card_us(name, point) for name in CANDIDATES}
        winners.add(min(true, key=true.__getitem__))
        losses.append(true[chosen] / min(true.values()) - 1)
    losses.sort()
    # PyTorch's kernel is often faster by less than what its plans cost.
    assert sum(loss <= 0.02 for loss in losses) >= 0.9 * len(losses)
    assert sum(losses) <= 0.01 * len(losses)
    assert losses[-5] <= 0.10
    assert len(winners) >= 3  # the card has crossovers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(None, None), (64, None), (None, 10), (64, 10), (0, 0), (5000, 9)]
)
@pytest.mark.parametrize(("nq", "nk"), [(200, 200), (50, 300), (300, 50), (1, 40)])
def test_the_keys_that_a_row_sees_on_average(
    nq: int, nk: int, window: tuple[int | None, int | None], causal: bool
) -> None:
    row, key = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    seen = torch.ones(nq, nk, dtype=torch.bool)
    if causal:
        seen &= key <= row
    if window[0] is not None:
        seen &= key >= row - window[0]
    if window[1] is not None:
        seen &= key <= row + window[1]
    expected = max(1.0, float(seen.sum() / nq))
    found = Sizes.of((1, 1, 1, nq, nk), causal, window).seen
    assert found == pytest.approx(expected)


# --- crossovers ---


def test_show_tells_where_the_fastest_changes(card: _calibrated.Table) -> None:
    kind = Kind("16 bits", FORWARD, "many", True)
    told = command.crossovers(card, kind, 64, 64)
    for name, rows in told:
        point = Point(kind, (16_384 // rows, 16, 16, rows, rows), 64, 64)
        true = {other: card_us(other, point) for other in CANDIDATES}
        assert true[name] <= 1.06 * min(true.values())
    assert len({name for name, _ in told}) > 1
    assert f"{told[0][0]} to {told[0][1]}, " in command.describe(card)


def square(rows: int, heads: int, d: int = 128) -> Point:
    return Point(Kind("16 bits", FORWARD, "many", False), (1, heads, heads, rows, rows), d, d)


def test_a_candidate_that_is_far_behind_is_left_out_and_predicted_as_a_multiple() -> None:
    points = [square(rows, 16) for rows in (512, 1024, 2048, 4096)]
    known = [(p, {"a": p.flops() / 1e6, "slow": p.flops() / 6e5}) for p in points]
    assert worker.is_enough("slow", known, lambda: True)
    assert not worker.is_enough("slow", known[:3], lambda: True)
    assert not worker.is_enough("a", known, lambda: True)
    assert worker.is_enough("a", known, lambda: False)
    assert not worker.is_enough("a", known[:3], lambda: False)
    assert not worker.is_enough("new", known, lambda: True)
    measured = [Measured(p.kind, p.d, p.dv, p.sizes, times) for p, times in known]
    measured += [
        Measured(p.kind, p.d, p.dv, p.sizes, {"a": p.flops() / 1e6})
        for p in (square(8192, 16), square(256, 16), square(300, 16), square(6144, 8))
    ]
    start, reference, fits = fit.fits(measured, SMS)
    assert reference == "a"
    there = square(6000, 16)
    family = Family(tuple(measured), start, reference, fits, SMS)
    times = family.predict(there.kind, there.sizes, 128, 128)
    assert times.us["slow"] == pytest.approx(1.67 * times.us["a"], rel=0.05)
    assert times.us["a"] == pytest.approx(there.flops() / 1e6, rel=0.1)
    near = family.predict(points[0].kind, points[0].sizes, 128, 128)
    assert times.doubt["slow"] > 0.02
    assert near.doubt["slow"] == 0
    assert times.doubt["a"] == 0


# --- dispatch ---


@pytest.fixture
def no_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path))
    _calibrated.read_again()
    yield
    _calibrated.read_again()


H200 = find_device("H200")


def problem(
    *, nq: int = 2048, d: int = 128, grad: bool = False, heads_kv: int = 16, **options: Any
) -> native.Problem:
    q = torch.empty(4, 16, nq, d, dtype=torch.bfloat16, device="meta", requires_grad=grad)
    k = torch.empty(4, heads_kv, 2048, d, dtype=torch.bfloat16, device="meta")
    return make_problem(q, k, k, **options).as_if_on_cuda()


def table_with(
    us: dict[str, float], passes: str = FORWARD, device: native.Device = H200, **key: str
) -> dict[str, Any]:
    """An entry by which calls of any size take so long."""
    measured = [
        Measured(Kind("16 bits", passes, rows, causal), 128, 128, Sizes.of(shape, causal), us)
        for rows, shape in (("many", (4, 16, 16, 2048, 2048)), ("few", (4, 16, 16, 1, 2048)))
        for causal in (False, True)
        if rows == "many" or not causal
    ]
    entry = fit.entry(_calibrated.key_of(device) | key, "2026-11-28", 132, measured, {}, {})
    return entry


def keep(entry: dict[str, Any]) -> None:
    _user_tables.put(_calibrated.TABLE, entry)
    _calibrated.read_again()


@pytest.mark.usefixtures("no_user")
def test_what_the_user_measured_comes_before_what_others_did() -> None:
    given = problem(causal=True)
    before = _dispatch.select(given, H200)
    assert before.chosen == "hopper"
    keep(table_with({"hopper": 100.0, "ampere": 60.0, "torch-cudnn": 80.0}))
    decision = _dispatch.select(given, H200)
    assert decision.chosen == "ampere"
    assert list(decision.reasons)[:2] == ["torch", "hopper"]
    assert "`archflash calibrate` on this H200, 2026-11-28, driver" in decision.why
    assert "ampere 59.3, torch-cudnn 79.1, hopper 98.9 us" in decision.why
    assert decision.reasons["hopper"] == [
        "ampere is faster by what was measured here: 59.3, 98.9 us"
    ]
    assert decision.reasons["torch"] == [
        "ampere is faster by what was measured here: 59.3, 79.1 us"
    ]
    keep(table_with({"hopper": 100.0, "ampere": 90.0, "torch-cudnn": 80.0}))
    torchs = _dispatch.select(given, H200)
    assert (torchs.chosen, torchs.fallback) == ("torch", False)
    assert torchs.why.startswith("PyTorch's cuDNN kernel; the fastest measured")


def test_a_measured_order_yields_to_a_small_difference_where_times_are_known_well() -> None:
    kind = Kind("16 bits", FORWARD, "many", False)

    def chosen(rows: int, order_is_measured: bool = True) -> str:
        measured = [
            Measured(kind, 64, 64, x, {"hopper": x.nq * 1.05, "ampere": float(x.nq)})
            for x in (Sizes.of((4, 16, 16, 512 + 8 * n, 512 + 8 * n), False) for n in range(8))
        ]
        entry = fit.entry({"gpu": "NVIDIA H200"}, "2026-11-29", SMS, measured, {}, {})
        table = _calibrated.Table.read(entry)
        found = table.predict(kind, Sizes.of((4, 16, 16, rows, rows), False), 64, 64)
        assert found is not None
        return found.in_order(("hopper", "ampere"), order_is_measured)[0]

    assert chosen(4096) == "hopper"  # nothing near was measured
    assert chosen(4096, order_is_measured=False) == "ampere"
    assert chosen(540) == "ampere"


@pytest.mark.usefixtures("no_user")
def test_equally_fast_candidates_keep_the_order_of_before() -> None:
    keep(table_with({"hopper": 101.5, "ampere": 100.0, "torch-cudnn": 100.5}))
    decision = _dispatch.select(problem(), H200)
    assert decision.chosen == "hopper"
    assert "about as fast" in decision.reasons["ampere"][0]
    keep(table_with({"hopper": 103.7, "ampere": 100.0, "torch-cudnn": 109.0}))
    assert _dispatch.select(problem(), H200).chosen == "ampere"


@pytest.mark.usefixtures("no_user")
def test_host_time_decides_between_short_calls() -> None:
    entry = table_with({"ampere": 6.0, "torch-cudnn": 5.0})
    entry["host_us"] = [[FORWARD, "ampere", 10.0], [FORWARD, "torch", 40.0]]
    keep(entry)
    assert _dispatch.select(problem(nq=1), H200).chosen == "ampere"
    entry = table_with({"ampere": 60.0, "torch-cudnn": 58.0})
    keep(entry)
    assert _dispatch.select(problem(nq=1), H200).chosen == "ampere"  # cuDNN plans each length anew
    entry = table_with({"ampere": 60.0, "torch-cudnn": 45.0})
    entry["host_us"] = [[FORWARD, "ampere", 10.0], [FORWARD, "torch", 40.0]]
    keep(entry)
    assert _dispatch.select(problem(nq=1), H200).chosen == "torch"
    entry = table_with({"hopper": 5.0, "ampere": 6.0})
    entry["host_us"] = [[FORWARD, "hopper", 14.0], [FORWARD, "ampere", 10.0]]
    keep(entry)
    assert _dispatch.select(problem(nq=1), H200).chosen == "ampere"


@pytest.mark.usefixtures("no_user")
@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"return_lse": True}, {"window": (100, 0)}, {"num_splits": 2}],
    ids=lambda options: next(iter(options)),
)
def test_where_pytorch_was_not_measured_it_keeps_its_place(options: dict[str, Any]) -> None:
    given = problem(**options)
    usual = _dispatch.order.of(given, (9, 0))
    keep(table_with({"hopper": 100.0, "ampere": 60.0, "torch-cudnn": 5.0}))
    asked = _dispatch.order.of(given, (9, 0), H200)
    assert asked.index("torch") == usual.index("torch")
    assert asked.index("ampere") < asked.index("hopper")
    assert _dispatch.select(given, H200).chosen == "ampere"


@pytest.mark.usefixtures("no_user")
def test_what_must_not_depend_on_sizes_or_was_not_measured_is_as_before() -> None:
    calls = [
        problem(batch_invariant=True),
        problem(d=256),
        problem(grad=True),
        problem(dropout_p=0.1, rng_state=torch.empty(2, dtype=torch.int64, device="meta")),
    ]
    before = [_dispatch.select(call, H200).chosen for call in calls]
    keep(table_with({"hopper": 100.0, "ampere": 60.0, "simt": 1.0, "torch-cudnn": 5.0}))
    assert [_dispatch.select(call, H200).chosen for call in calls] == before


@pytest.mark.usefixtures("no_user")
def test_gradients_go_by_both_passes() -> None:
    given = problem(grad=True)
    keep(table_with({"hopper": 100.0, "ampere": 60.0, "torch-cudnn": 80.0}, BOTH))
    assert _dispatch.select(given, H200).chosen == "ampere"
    keep(table_with({"hopper": 100.0, "ampere": 90.0, "torch-cudnn": 80.0}, BOTH))
    assert _dispatch.select(given, H200).chosen == "torch"


@pytest.mark.usefixtures("no_user")
def test_where_pytorchs_kernel_gave_wrong_numbers_it_comes_last() -> None:
    entry = table_with({"hopper": 60.0})
    entry["wrong_kinds"] = [["torch-cudnn", list(Kind("16 bits", FORWARD, "many", False))]]
    keep(entry)
    assert _dispatch.order.of(problem(), (9, 0), H200)[-1] == "torch"
    entry["wrong_kinds"][0][0] = "torch"
    keep(entry)
    assert _dispatch.order.of(problem(), (9, 0), H200)[-1] == "torch"
    assert _dispatch.order.of(problem(causal=True), (9, 0), H200)[-1] != "torch"


@pytest.mark.usefixtures("no_user")
def test_kernels_of_other_gpus_serve_what_the_user_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 9.0 they serve kinds that were measured, here by nobody but the user."""
    monkeypatch.setattr(_measured, "_table", dict)
    assert _dispatch.select(problem(), H200).chosen == "ampere"
    keep(table_with({"hopper": 60.0, "ampere": 100.0, "torch-cudnn": 80.0}))
    assert _dispatch.select(problem(), H200).chosen == "hopper"


# --- the file ---


@pytest.mark.usefixtures("no_user")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("word", ["driver", "torch", "archflash", "cudnn", "power"])
def test_a_table_of_other_software_does_not_count_and_a_sentence_says_so(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(table_with({"ampere": 60.0, "hopper": 100.0}, **{word: "another"}))
    with caplog.at_level(logging.WARNING, "archflash"):
        assert _dispatch.select(problem(), H200).chosen == "hopper"
        assert _dispatch.select(problem(causal=True), H200).chosen == "hopper"
    (record,) = caplog.records
    assert f"does not count any more ({word} another, now " in record.message
    assert "`archflash calibrate --forget`" in record.message


@pytest.mark.usefixtures("no_user")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("families"),
        lambda entry: entry["families"][0].pop("fits"),
        lambda entry: entry["families"][0]["calls"].pop(),
        lambda entry: entry.update(sms="many"),
        lambda entry: entry["families"].append("x"),
        lambda entry: entry.update(sms=0),
        lambda entry: entry.update(sms=math.inf),
        lambda entry: entry["families"][0]["calls"][0].__setitem__(3, "2"),
        lambda entry: entry["families"][0]["calls"][0].__setitem__(1, 0),
        lambda entry: entry["families"][0]["fits"]["ampere"].pop(),
        lambda entry: entry["families"][0]["fits"]["ampere"].__setitem__(0, math.nan),
        lambda entry: entry["families"][0]["fits"]["ampere"][2].__setitem__(0, 8e9),
        lambda entry: entry["families"][0].update(reference="cudnn"),
        lambda entry: entry["families"][0].update(start=-1),
        lambda entry: entry["families"][0].update(start=0),
        lambda entry: entry["families"][0]["fits"]["ampere"].__setitem__(0, 800.0),
        lambda entry: entry["families"][0]["fits"]["ampere"].__setitem__(1, -99.0),
        lambda entry: entry["families"][0]["calls"][0].__setitem__(3, 10**308),
    ],
)
def test_a_damaged_table_does_not_count(
    damage: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    entry = table_with({"ampere": 60.0, "hopper": 100.0})
    damage(entry)
    keep(entry)
    assert _dispatch.select(problem(), H200).chosen == "hopper"
    assert "is damaged" in caplog.text


@pytest.mark.usefixtures("no_user")
def test_a_table_of_another_format_asks_for_a_new_one(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    keep(table_with({"ampere": 60.0, "hopper": 100.0}) | {"format": 1})
    assert _dispatch.select(problem(), H200).chosen == "hopper"
    for text in (caplog.text, archflash_says(capsys, "calibrate", "--show")[1]):
        assert "was measured by another version of archflash" in text
        assert "damaged" not in text


@pytest.mark.usefixtures("no_user")
def test_predictions_of_any_table_are_finite(capsys: pytest.CaptureFixture[str]) -> None:
    entry = table_with({"ampere": 60.0, "hopper": 100.0})
    for told in entry["families"][0]["fits"].values():
        told[2] = [900.0 for _ in told[2]]
    keep(entry)
    assert _dispatch.select(problem(), H200).chosen
    assert archflash_says(capsys, "calibrate", "--show")[0] == 0


@pytest.mark.usefixtures("no_user")
def test_each_gpu_has_its_table_and_a_new_one_takes_the_place_of_its_own() -> None:
    h100 = find_device("H100")
    command.keep(table_with({"ampere": 60.0, "hopper": 100.0}))
    command.keep(table_with({"ampere": 100.0, "hopper": 60.0}, device=h100))
    assert _dispatch.select(problem(), H200).chosen == "ampere"
    assert _dispatch.select(problem(), h100).chosen == "hopper"
    for number in range(9):
        command.keep(table_with({"ampere": 100.0, "hopper": 60.0}, torch=f"older {number}"))
    command.keep(table_with({"ampere": 100.0, "hopper": 60.0}))
    kept = _user_tables.entries(_calibrated.TABLE)
    assert [entry["key"]["gpu"] for entry in kept].count("H100") == 1
    mine = [entry["key"]["torch"] for entry in kept if entry["key"]["gpu"] == "H200"]
    assert len(mine) == command._TABLES  # environments with other versions share the file
    assert mine[0] == "older 2"
    assert _dispatch.select(problem(), H200).chosen == "hopper"


@pytest.mark.usefixtures("no_user")
def test_a_table_of_a_gpu_with_other_sms_does_not_count() -> None:
    entry = table_with({"ampere": 60.0, "hopper": 100.0})
    keep(entry | {"sms": 66})
    assert _dispatch.select(problem(), H200).chosen == "hopper"


@pytest.mark.usefixtures("no_user")
def test_calls_without_heads_have_an_order_too() -> None:
    keep(table_with({"hopper": 100.0, "ampere": 60.0}, BOTH))
    q = torch.empty(2, 0, 64, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert _dispatch.order.of(make_problem(q, q, q).as_if_on_cuda(), (9, 0), H200)


@pytest.mark.usefixtures("no_user")
def test_the_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(table_with({"ampere": 60.0, "hopper": 100.0}))
    opened = []
    read = Path.read_text

    def counted(path: Path, *given: Any, **named: Any) -> str:
        opened.append(path.name)
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", counted)
    for causal in (False, True):
        for nq in (512, 1024, 2048):
            _dispatch.select(problem(nq=nq, causal=causal), H200)
    assert opened.count("calibration.json") == 1


# --- measuring in another process ---

FAKE = """
import json, sys, time
asked = json.loads(sys.stdin.read())
skip = {name for name, passes in asked["skip"]}
kind = ["16 bits", "forward", "many", False, "none", "dense"]
if not asked["host"]:
    print(json.dumps({"host": ["forward", "ampere", 9.0]}), flush=True)
for number in range(len(asked["known"]), 3):
    point = [kind, [1, 16, 16, 512 + number, 512], 64, 64]
    times = {}
    for name in ("hopper", "ampere", "blackwell_dc"):
        if name in skip:
            continue
        print(json.dumps({"trying": [point, name]}), flush=True)
        if number == 1 and name == BROKEN:
            HOW
        times[name] = 10.0
    print(json.dumps({"point": point, "graph_us": times}), flush=True)
print(json.dumps({"done": True}), flush=True)
"""


def fake_worker(broken: str, how: str) -> tuple[str, ...]:
    return (sys.executable, "-c", FAKE.replace("BROKEN", repr(broken)).replace("HOW", how))


@pytest.mark.parametrize(
    ("how", "said"),
    [("sys.exit('CUDA error: an illegal memory access')", "illegal memory access"),
     ("time.sleep(60)", "it hung")],
    ids=["crash", "hang"],
)  # fmt: skip
def test_a_kernel_that_breaks_or_hangs_is_left_out_and_measuring_goes_on(
    how: str, said: str
) -> None:
    told: list[str] = []
    found = measuring.measure(0, 100.0, told.append, fake_worker("blackwell_dc", how), silent_s=2.0)
    assert [set(times) for _, times in found.times] == [
        {"hopper", "ampere", "blackwell_dc"}, {"hopper", "ampere"}, {"hopper", "ampere"},
    ]  # fmt: skip
    assert found.host_us == {(FORWARD, "ampere"): 9.0}
    assert said in found.wrong["blackwell_dc", FORWARD]
    assert "blackwell_dc" in told[0]
    # What was measured of it before does not count either.
    assert all("blackwell_dc" not in one.graph_us for one in found.measured())


def test_a_process_that_cannot_start_is_an_error_with_its_last_words() -> None:
    with pytest.raises(archflash.LaunchError, match="ended at its start: no such device"):
        measuring.measure(0, 9.0, worker=(sys.executable, "-c", "exit('no such device')"))


def test_nobody_is_blamed_for_what_ends_the_process_between_kernels() -> None:
    told: list[str] = []
    between = FAKE.replace(
        "    times = {}", "    if number == 2: sys.exit('out of luck')\n    times = {}"
    )
    between = "print('a library speaks')\n" + between.replace("BROKEN", "''").replace("HOW", "pass")
    found = measuring.measure(0, 100.0, told.append, (sys.executable, "-c", between), silent_s=9.0)
    assert len(found.times) == 2
    assert found.wrong == {}
    assert "ended early: out of luck" in told[-1]


def test_the_process_that_measures_sees_no_variable_that_makes_pytorchs_kernels_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARCHFLASH_SDPA", "1")
    monkeypatch.setenv("ARCHFLASH_FORCE_IMPLEMENTATION", "ampere")
    shows = "import os; exit(' '.join(sorted(x for x in os.environ if x.startswith('ARCHFLASH_'))))"
    with pytest.raises(archflash.LaunchError) as caught:
        measuring.measure(0, 9.0, worker=(sys.executable, "-c", shows))
    assert "ARCHFLASH_SDPA" not in str(caught.value)
    assert "FORCE" not in str(caught.value)


def test_silence_lasts_longer_where_the_driver_compiles() -> None:
    assert measuring.silence_on((9, 0)) == measuring._SILENT_S
    assert measuring.silence_on((13, 0)) == measuring._PATIENCE * measuring._SILENT_S


def test_a_kernel_is_proved_by_many_right_results_and_no_wrong_one() -> None:
    found = measuring.Findings()
    for rows in range(measuring._RIGHT):
        found.times.append((square(512 + rows, 4), {"blackwell_dc": 9.0, "ampere": 9.0}))
    assert set(found.proved()) == {("blackwell_dc", "forward"), ("ampere", "forward")}
    found.times.pop()
    assert found.proved() == []
    found.times.append((square(512, 4), {"blackwell_dc": 9.0, "ampere": 9.0}))
    found.wrong["blackwell_dc", BOTH] = "dq is off"
    assert found.proved() == [("ampere", "forward")]
    assert found.refuted() == [("blackwell_dc", "backward")]


def test_wrong_numbers_of_pytorch_count_for_their_kind_of_call_and_ours_for_all() -> None:
    found, told = measuring.Findings(), []
    for point in (square(512, 4), square(512, 4, 64)._replace(kind=CAUSAL)):
        found.times.append((point, {"torch-cudnn": 9.0, "ampere": 9.0, "simt": 90.0}))
    for name in ("torch-cudnn", "ampere"):
        found.note_wrong(name, square(512, 4), "max error 3", told.append)
    assert [set(one.graph_us) for one in found.measured()] == [{"simt"}, {"torch-cudnn", "simt"}]
    assert found.refuted() == [("ampere", "forward")]
    assert told[0].startswith("torch-cudnn: max error 3, at Point(")


CAUSAL = Kind("16 bits", FORWARD, "many", True)

# --- what is compared ---

SMALL = [
    *(Kind(dtype, FORWARD, "many", causal)
      for dtype in ("16 bits", "float32", "fp8") for causal in (False, True)),
    *(Kind(dtype, BOTH, "many", causal)
      for dtype in ("16 bits", "float32") for causal in (False, True)),
    *(Kind("16 bits", FORWARD, "many", False, mask)
      for mask in ("bool", "added", "ranges", "blocks", "slopes")),
    Kind("16 bits", FORWARD, "many", True, way="packed"),
    Kind("16 bits", FORWARD, "few", False, way="cache"),
]  # fmt: skip


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: "-".join(map(str, kind)))
def test_wrong_numbers_of_every_kind_of_call_are_seen(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch, "query_device", lambda index: H200)
    rows = 4 if kind.rows == "few" else 100
    shape = (2, 4, 4 if kind.mask != "none" else 2, rows, 100)
    call = Call(Point(kind, shape, 32, 32), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(80_000, generator=generator, dtype=torch.float32)
    pool = pool.to(torch.bfloat16).to(call.dtype) if kind.dtype != "float32" else pool
    inputs = call.inputs(pool, 2)[1]
    outputs = call.function("torch")(*inputs)
    known: dict[str, Any] = {}
    assert call.wrong(inputs, outputs, known) is None
    assert call.wrong(inputs, tuple(1.5 * x for x in outputs), known)
    for number, x in enumerate(outputs):
        spoiled = list(outputs)
        spoiled[number] = x.clone()
        spoiled[number][(-1,) * x.ndim] = math.nan
        assert call.wrong(inputs, tuple(spoiled), known) == "NaN or infinite numbers"
    if kind.passes == BOTH:
        for number in range(3):
            spoiled = list(outputs)
            spoiled[number] = torch.zeros_like(outputs[number])
            assert call.wrong(inputs, tuple(spoiled), known)


# --- the commands ---


def archflash_says(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.usefixtures("no_user")
@pytest.mark.parametrize("name", ["calibrate", "bench"])
def test_without_a_gpu_the_commands_say_so_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: "no NVIDIA driver on this machine")
    status, out, err = archflash_says(capsys, name)
    assert (status, out) == (2, "")
    assert err.startswith("archflash: there is no GPU to ")
    assert err.endswith(": no NVIDIA driver on this machine\n")


@pytest.fixture
def card_here(monkeypatch: pytest.MonkeyPatch, no_user: None) -> None:
    """As if an H200 were here, whose process that measures is FAKE."""
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: H200)
    monkeypatch.setattr(
        measuring, "_run_worker",
        lambda found, index, seconds, progress, worker, silent_s: _run(
            found, index, seconds, progress, fake_worker(_broken[0], "exit('CUDA error')"), silent_s
        ),
    )  # fmt: skip
    monkeypatch.setattr(f"{__name__}._broken", [""])


_run = measuring._run_worker
_broken = [""]  # the kernel that breaks


@pytest.mark.usefixtures("card_here")
def test_calibrate_keeps_shows_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = archflash_says(capsys, "calibrate", "--seconds", "30")
    assert (status, err) == (0, "")
    assert "16 bits, forward, d 64: of 3 sizes" in out
    (entry,) = _user_tables.entries(_calibrated.TABLE)
    assert entry["key"] == _calibrated.key_of(H200)
    table = _calibrated.table_of(H200)
    assert table is not None
    assert table.host_us == {(FORWARD, "ampere"): 9.0}
    assert "H200, " in archflash_says(capsys, "calibrate", "--show")[1]
    assert archflash_says(capsys, "calibrate", "--forget")[0] == 0
    assert _user_tables.entries(_calibrated.TABLE) == ()
    assert "nothing was measured here yet" in archflash_says(capsys, "calibrate", "--show")[1]
    file = _user_tables.file_of(_calibrated.TABLE)
    assert file is not None
    file.write_text("damaged")
    _calibrated.read_again()
    assert "emptied" in archflash_says(capsys, "calibrate", "--forget")[1]
    assert "damaged" not in file.read_text()


@pytest.mark.usefixtures("card_here")
def test_show_says_which_tables_count_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archflash_says(capsys, "calibrate", "--forget")[1] == "nothing was kept\n"
    status = SimpleNamespace(device_count=1, cuda_version=13000, usable=True, problem="")
    monkeypatch.setattr(native, "driver_status", lambda: status)
    times = {"ampere": 60.0, "hopper": 100.0}
    keep(table_with(times))
    assert " count" not in archflash_says(capsys, "calibrate", "--show")[1]
    keep(table_with(times, device=find_device("H100")))
    keep(table_with(times, driver="500.1"))
    out = archflash_says(capsys, "calibrate", "--show")[1]
    assert out.count("it does not count: there is no such GPU here") == 1
    assert "does not count any more (driver 500.1, now " in out


@pytest.mark.usefixtures("no_user")
def test_packed_sequences_and_caches_have_the_sizes_of_one_sequence() -> None:
    keep(table_with({"ampere": 60.0, "hopper": 100.0}))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    q = torch.empty(4 * 2048, 16, 128, dtype=torch.bfloat16, device="meta")
    given = make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends).as_if_on_cuda()
    # Nothing is known of packed ones: then the dense call of the same sizes is asked.
    expected = _calibrated.find(problem(), H200)
    assert expected is not None
    assert _calibrated.find(given, H200) == expected
    cache = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    for layout, rows in (("bnhd", q[:4][:, None]), ("packed", q[:20])):
        more = {"cu_seqlens_q": ends} if layout == "packed" else {}
        asked = make_problem(rows, cache, cache, cache_seqlens=lengths, layout="bnhd", **more)
        assert _calibrated.find(asked.as_if_on_cuda(), H200) is None  # no cache was measured
    assert _calibrated.find(given, find_device("A100")) is None


@pytest.mark.usefixtures("card_here")
def test_a_kernel_that_was_right_becomes_a_default_of_that_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    b200 = find_device("B200")
    monkeypatch.setattr(_dispatch, "query_device", lambda index: b200)
    assert "blackwell_dc" in _dispatch.select(problem(), b200).unproved
    monkeypatch.setattr(measuring, "_RIGHT", 3)
    status, out, _ = archflash_says(capsys, "calibrate")
    assert status == 0
    assert "proved here: blackwell_dc (forward pass)" in out
    assert _dispatch.select(problem(return_lse=True), b200).chosen == "blackwell_dc"
    # What verify found wrong stays so.
    _proofs.keep(b200, [], [("blackwell_dc", _proofs.FORWARD)])
    status, out, _ = archflash_says(capsys, "calibrate")
    assert "proved here" not in out
    assert _dispatch.select(problem(return_lse=True), b200).chosen != "blackwell_dc"


@pytest.mark.usefixtures("card_here")
def test_a_kernel_that_broke_is_never_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert _dispatch.select(problem(), H200).chosen == "hopper"
    _broken[0] = "hopper"
    status, out, err = archflash_says(capsys, "calibrate")
    assert status == 0
    assert "hopper: it broke: CUDA error, at Point(" in err
    assert "hopper, forward: WRONG: it broke" in out
    for given in (problem(), problem(causal=True, grad=True), problem(d=64), problem(softcap=3.0)):
        decision = _dispatch.select(given, H200)
        assert decision.chosen != "hopper"
        assert (
            "`archflash verify` or `calibrate` found hopper wrong"
            in (decision.reasons["hopper"][0])
        )


@pytest.mark.usefixtures("card_here")
def test_what_cannot_be_kept_is_said_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path / "file"))
    status, out, err = archflash_says(capsys, "calibrate")
    assert (status, out) == (2, "")
    assert "cannot be written" in err
    assert _user_tables.VARIABLE in err
    for seconds in ("0", "nan", "1e9"):
        assert archflash_says(capsys, "calibrate", "--seconds", seconds)[0] == 2
    for given in (("calibrate",), ("verify",), ("bench",), ("replay", "plan.json")):
        with pytest.raises(SystemExit, match="2"):
            archflash_says(capsys, *given, "--device", "first")
        assert "such as cuda:0" in capsys.readouterr().err


@pytest.mark.usefixtures("card_here")
def test_bench_prints_and_writes_every_candidate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Point] = []

    class Measures:
        def __init__(self, *given: Any, **named: Any) -> None:
            pass

        def measure(self, point: Point, eager: bool, more: tuple[str, ...]) -> Result:
            asked.append(point)
            return Result({"ampere": 20.0, "hopper": 10.0}, {"hopper": 12.5}, {}, {"simt": "no"})

    monkeypatch.setattr(bench_command, "Lab", Measures)
    assert Call(bench_command.standard()[0], torch.device("cuda", 0)).decision().chosen == "hopper"
    file = tmp_path / "times.csv"
    status, out, _ = archflash_says(
        capsys, "bench", "--shape", "2,16,1024,128", "--heads-kv", "4", "--causal", "--csv",
        str(file),
    )  # fmt: skip
    assert status == 0
    (point,) = asked
    assert point == Point(Kind("16 bits", FORWARD, "many", True), (2, 16, 4, 1024, 1024), 128, 128)
    assert "2x16/4 1024 d128, 16 bits, forward, causal" in out
    assert out.index("hopper *") < out.index("ampere") < out.index("simt")
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["candidate"] for row in rows] == ["hopper", "ampere", "simt"]
    assert [row["chosen"] for row in rows] == ["1", "0", "0"]
    assert float(rows[0]["tflops"]) == pytest.approx(point.flops() / 10.0 / 1e6, rel=0.01)
    assert rows[2]["note"] == "not run: no"
    assert archflash_says(capsys, "bench")[0] == 0
    assert len(asked) == 1 + len(bench_command.standard())


@pytest.mark.usefixtures("card_here")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--shape", "1,2,3"), "four integers"), (("--shape", "1,0,3,8"), "at least 1"),
     (("--shape", "1,3,8,8", "--heads-kv", "2"), "must divide"),
     (("--shape", "1,3,8,16", "--dtype", "float8_e4m3fn", "--gradients"), "FP8 has none")],
    ids=["three", "empty", "heads", "fp8"],
)  # fmt: skip
def test_bench_refuses_what_is_no_call(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = archflash_says(capsys, "bench", *arguments)
    assert status == 2
    assert said in err


# --- bench.calibrated ---


def test_the_figure_is_of_calls_that_are_not_measured() -> None:
    asked = calibrated.calls(60, SMS)
    assert len(set(asked)) == 60
    assert not set(asked) & set(grid.points(SMS, SPEED))
    assert {point.kind.passes for point in asked} == {FORWARD, BOTH}
    assert any(point.kind.rows == "few" for point in asked)


def test_losses_are_of_what_was_chosen() -> None:
    result = Result({"a": 10.0, "b": 11.0}, {"a": 44.0, "b": 10.0})
    assert calibrated.losses(result, "b") == pytest.approx((0.1, 0.0, 0.0))
    graph, eager, both = calibrated.losses(result, "a")
    assert (graph, eager) == pytest.approx((0.0, 3.4))
    assert both == pytest.approx((440 / 110) ** 0.5 - 1)
    assert calibrated.losses(result, "c") == (math.inf,) * 3
    good = [(0.0, 0.0, 0.0)] * 38 + [(0.0, 0.0, 0.1)] * 2
    assert calibrated.is_good(good)
    assert not calibrated.is_good(good[1:] + [(0.0, 0.0, 0.03)] * 2)
    assert not calibrated.is_good([*good, (0.0, 0.0, 0.11)])
    assert "both: 38 of 40 calls (95.0%) lose at most 2%, the worst 10.0%" in (
        calibrated.summary(good)
    )
