"""Traces of simulated CTAs, the files and pictures made of them, and `archflash sim`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from archflash import sim
from archflash.__main__ import main
from archflash.cli import sim as sim_command
from archflash.sim import _picture, _trace
from tests.sim.ptx import HEADER, program

KEYS, DIM, BLOCK_Q = 256, 128, 64  # a CTA of the variant d128_few has 64 query rows


def attention(**options: Any) -> sim.Run:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(1, 1, BLOCK_Q, DIM, generator=generator).to(torch.bfloat16)
    k, v = (torch.randn(1, 1, KEYS, DIM, generator=generator).to(q.dtype) for _ in range(2))
    # Its kernels are those in which one CTA has all keys of its rows.
    return sim.run(q, k, v, implementation="ampere", batch_invariant=True, **options)


@pytest.fixture(scope="module")
def traced() -> sim.Run:
    return attention(traced_ctas=1, stretch=16)


@pytest.fixture(scope="module")
def line(traced: sim.Run) -> _trace.Timeline:
    return _trace.timeline(traced.report, 0)


def chrome(run: sim.Run) -> dict[str, Any]:
    report = run.report
    lines = [_trace.timeline(report, cta) for cta in report.traces]
    return _trace.chrome_trace(lines, report.listing)


# --- what is recorded ---


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
def test_tracing_does_not_change_the_run(mode: str) -> None:
    plain = attention(mode=mode, seed=3)
    run = attention(mode=mode, seed=3, traced_ctas=1)
    assert torch.equal(run.out, plain.out)
    assert run.report.executed == plain.report.executed
    assert run.report.barrier_waits == plain.report.barrier_waits
    assert not plain.report.traces


def test_every_executed_instruction_is_in_the_trace_once(traced: sim.Run) -> None:
    report = traced.report
    seen = [0] * len(report.listing)
    times = []
    for event in report.traces[0].events:
        if event.kind == "run":
            times.append((event.begin, event.end))
            for pc in range(event.pc, event.pc + event.end - event.begin):
                seen[pc] += 1
    assert tuple(seen) == report.executed
    times.sort()
    assert times[0][0] == 0
    assert all(end == begin for (_, end), (begin, _) in pairwise(times))
    assert times[-1][1] == report.total_instructions


def test_copies_move_each_tile_once_and_end_after_they_begin(line: _trace.Timeline) -> None:
    moved: dict[str, int] = defaultdict(int)
    for batch in line.batches:
        moved[batch.label] += batch.bytes
        assert batch.begin == min(copy.begin for copy in batch.copies)
        assert batch.end == max(copy.end for copy in batch.copies)
        for copy in batch.copies:
            assert 0 <= copy.begin < copy.end <= copy.seen == batch.seen <= line.end
    row = DIM * 2
    assert moved == {"q": BLOCK_Q * row, "k": KEYS * row, "v": KEYS * row}


def test_lazy_copies_land_when_they_are_waited_for_and_eager_ones_at_once() -> None:
    lazy = _trace.timeline(attention(mode="lazy", traced_ctas=1).report, 0)
    eager = _trace.timeline(attention(mode="eager", traced_ctas=1).report, 0)
    assert lazy.batches
    assert eager.batches
    assert all(copy.end == copy.seen for batch in lazy.batches for copy in batch.copies)
    assert all(copy.end == copy.begin + 1 for batch in eager.batches for copy in batch.copies)
    assert any(copy.seen > copy.end for batch in eager.batches for copy in batch.copies)


def test_copies_are_in_flight_while_other_warps_multiply(line: _trace.Timeline) -> None:
    products = [piece for piece in line.slices if piece.region.role == "matrix"]
    assert any(
        piece.begin < batch.end and batch.begin < piece.end and batch.end - batch.begin > 1
        for piece in products
        for batch in line.batches
    )


def test_regions_are_the_functions_that_the_kernel_calls(
    traced: sim.Run, line: _trace.Timeline
) -> None:
    roles = {piece.region.name: piece.region.role for piece in line.slices}
    wanted = {
        "start_k": "copies",
        "multiply_qk": "matrix",
        "exponentiate_all_scores": "exponential",
        "multiply_pv": "matrix",
        "store_tile": "store",
    }
    assert wanted.items() <= roles.items()
    assert sum(piece.executed for piece in line.slices) == traced.report.total_instructions
    matrix = sum(piece.classes.get("matrix", 0) for piece in line.slices)
    assert matrix == traced.report.instructions["matrix"]
    assert matrix == sum(
        piece.classes.get("matrix", 0) for piece in line.slices if piece.region.role == "matrix"
    )


def test_the_same_seed_gives_the_same_trace_and_another_seed_another(traced: sim.Run) -> None:
    again = attention(traced_ctas=1, stretch=16)
    other = attention(traced_ctas=1, stretch=16, seed=1)
    assert json.dumps(chrome(again)) == json.dumps(chrome(traced))
    assert json.dumps(chrome(other)) != json.dumps(chrome(traced))


BARRIER = program(
    """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra LATE;
    bar.sync 3, 64;
    bra END;
    LATE:
    mov.u32 %r1, 1;
    mov.u32 %r2, 2;
    bar.sync 3, 64;
    END:
    """,
    parameters=0,
)


def test_a_wait_names_its_barrier_and_who_ended_it() -> None:
    report = sim.launch(sim.load(BARRIER), "test", [], block=(64,), mode="lazy", traced_ctas=1)
    waits = [event for event in report.traces[0].events if event.kind == "wait"]
    assert [(wait.label, wait.begin < wait.end) for wait in waits] == [("barrier 3", True)]
    tracks = report.traces[0].tracks
    assert {tracks[waits[0].track], tracks[waits[0].cause]} == {"warp 0", "warp 1"}
    assert report.listing[waits[0].pc]["opcode"].startswith("bar")


def test_a_wait_that_never_ends_is_in_the_trace() -> None:
    text = BARRIER.replace("bar.sync 3, 64;\n    END", "bar.sync 2, 64;\n    END")
    assert text != BARRIER
    report = sim.launch(sim.load(text), "test", [], block=(64,), check=False, traced_ctas=1)
    assert [finding.kind for finding in report.findings] == ["deadlock"]
    waits = [event for event in report.traces[0].events if event.kind == "wait"]
    assert sorted((wait.track, wait.label) for wait in waits) == [
        (0, "barrier 3, for ever"),
        (1, "barrier 2, for ever"),
    ]


def test_a_stretch_limits_a_warps_turn() -> None:
    text = program("\n".join(["add.u32 %r1, %r0, 1;"] * 200), parameters=0)
    for mode in ("lazy", "eager", "random", "priority"):
        report = sim.launch(
            sim.load(text), "test", [], block=(64,), mode=mode, stretch=8, traced_ctas=1
        )
        runs = [event for event in report.traces[0].events if event.kind == "run"]
        assert max(run.end - run.begin for run in runs) <= 8
        assert {run.track for run in runs} == {0, 1}


def test_chosen_ctas_are_traced_and_no_others() -> None:
    text = program("", parameters=0)
    report = sim.launch(sim.load(text), "test", [], grid=(5,), traced_ctas=[4, 1])
    assert sorted(report.traces) == [1, 4]
    with pytest.raises(ValueError, match=r"no CTA 5 in a grid of 5"):
        sim.launch(sim.load(text), "test", [], grid=(5,), traced_ctas=[5])
    with pytest.raises(ValueError, match=r"CTA 0 was not traced: 1, 4 of 5 were"):
        _trace.timeline(report, 0)


def test_without_names_of_functions_regions_are_classes_of_instructions() -> None:
    text = program("ex2.approx.f32 %f1, 0f3F800000;\nst.global.f32 [%rd10], %f1;")
    listing = sim.load(text).instructions("test")
    pairs = zip(listing, _trace.regions(listing), strict=True)
    names = {row["opcode"]: region for row, region in pairs}
    assert names["ex2.approx.f32"] == _trace.Region("exponentials", "exponential")
    assert names["st.global.f32"] == _trace.Region("stores", "store")
    assert names["mad.wide.u32"].role == "other"


@pytest.mark.parametrize(
    ("linkage", "name"),
    [
        ("_ZN9archflash6ampere11multiply_qkINS_3TwoIiLi64EEEEEvRAT_iRKT0_", None),
        ("_ZN2ns5innerIiE4stepEv", "step"),
        ("_ZN2ns4funcIfLi3EEEvT_", "func"),
        ("_Z5plainv", "plain"),
        ("_ZN12_GLOBAL__N_16hiddenEi", "hidden"),
        ("_ZNK2ns1AclEi", "operator()"),
        ("_ZZN2ns4mainEvENKUliE_clEi", "lambda"),
        ("as_it_is", "as_it_is"),
        ("_Znot mangled", "_Znot mangled"),
    ],
)
def test_names_of_inlined_functions_are_short(linkage: str, name: str | None) -> None:
    codes = ",".join(str(code) for code in [*linkage.encode(), 0])
    text = f"""{HEADER}
    .visible .entry test()
    {{
    .loc 1 5 0
    .loc 1 9 2, function_name $L__name, inlined_at 1 5 0
    ret;
    }}
    .file 1 "kernel.cu"
    .section .debug_str {{
    $L__other: .b8 97,0
    $L__name: .b8 {codes}
    }}
    """
    calls = sim.load(text).instructions("test")[0]["calls"]
    expected = [(name or linkage, "kernel.cu", 9), ("", "kernel.cu", 5)]
    assert [tuple(call) for call in calls] == expected


# --- files ---


def test_the_chrome_trace_is_valid_and_complete(traced: sim.Run, line: _trace.Timeline) -> None:
    text = json.dumps(chrome(traced))
    events = json.loads(text)["traceEvents"]
    kinds = [event["ph"] for event in events]
    assert set(kinds) == {"M", "X", "i", "s", "f", "C"}
    timed = [event for event in events if event["ph"] != "M"]
    assert kinds[: len(events) - len(timed)] == ["M"] * (len(events) - len(timed))
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(isinstance(event["ts"], int) and event["ts"] >= 0 for event in timed)
    assert all({"name", "pid", "tid"} <= event.keys() or event["ph"] in "sf" for event in events)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    tracks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["args"]
            tracks[names[event["pid"], event["tid"]]].append((event["ts"], event["dur"]))
    assert {f"warp {warp}" for warp in range(line.warps)} < set(tracks)
    assert {f"warp {warp} cp.async k" for warp in range(line.warps)} < set(tracks)
    assert set(tracks) == set(names.values())
    for spans in tracks.values():  # slices of a track do not overlap
        assert all(begin + length <= after for (begin, length), (after, _) in pairwise(spans))
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")
    assert len(set(starts)) == len(starts) > 0
    levels = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert levels[-1] == 0
    assert 0 < max(levels) <= (BLOCK_Q + 4 * KEYS) * DIM * 2
    waits = [event for event in events if event["ph"] == "X" and event["cat"] == "wait"]
    assert {event["name"] for event in waits} == {"waits for barrier 0"}
    assert all(event["args"]["ended by"].startswith("warp ") for event in waits)
    sources = ("main_loop.cuh:", "attention_fwd.cuh:")
    assert all(any(name in event["args"]["at"] for name in sources) for event in waits)


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg))


def test_the_picture_is_well_formed_and_stays_on_its_sheet(line: _trace.Timeline) -> None:
    drawing = _picture.draw(line, "a < b & c", ["one", "two"])
    shapes = elements(drawing.svg())
    texts = [shape.text for shape in shapes if shape.tag.endswith("text")]
    assert texts[:3] == ["a < b & c", "one", "two"]
    assert [f"warp {warp}" for warp in range(line.warps)] == [
        text for text in texts if text and text.startswith("warp ")
    ]
    assert any("not time on a GPU" in text for text in texts if text)
    for shape in shapes:
        get: Callable[[str], str | None] = shape.get
        if shape.tag.endswith("rect"):
            x, y, width, height = (float(get(name) or -1) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + width <= _picture.WIDTH + 0.01
            assert 0 <= y <= y + height <= drawing.height + 0.01
        if shape.tag.endswith("polygon"):
            points = [
                tuple(map(float, point.split(","))) for point in (get("points") or "").split()
            ]
            assert all(0 <= x <= _picture.WIDTH and 0 <= y <= drawing.height for x, y in points)
    # The legend explains every colour of the chart.
    axis = max(float(shape.get("y") or 0) for shape in shapes if shape.text == "0")
    chart, legend = set(), set()
    for shape in shapes:
        if shape.tag.endswith("rect"):
            y = float(shape.get("y") or 0)
        elif shape.tag.endswith("polygon"):
            y = float((shape.get("points") or "").split()[0].split(",")[1])
        else:
            continue
        (legend if y > axis else chart).add(shape.get("fill"))
    assert chart - {_picture.PAPER, "#f4f6f9"} == legend - {_picture.PAPER}
    assert len(legend) > 8


def test_the_picture_has_a_map_of_tensor_memory() -> None:
    q = torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(7)).half()
    run = sim.run(q, q, q, implementation="blackwell_dc", traced_ctas=1)
    line = _trace.timeline(run.report, 0)
    uses = [b for b in line.batches if b.track == _picture.TENSOR_MEMORY]
    written = {match[1] for b in uses if (match := _picture.USE.fullmatch(b.label))}
    assert {"allocated", "tcgen05.mma"} <= written <= set(_picture.WRITERS)
    shapes = elements(_picture.draw(line, "t").svg())
    (name,) = [x for x in shapes if x.text == _picture.TENSOR_MEMORY]
    top = float(name.get("y") or 0) - _picture.MAP / 2 - 5
    rows = [
        (float(x.get("y") or 0) - top, float(x.get("height") or 0), x.get("fill"))
        for x in shapes if x.tag.endswith("rect")
        and -0.01 <= float(x.get("y") or 0) - top < _picture.MAP
    ]  # fmt: skip
    scale = _picture.MAP / _picture.TENSOR_COLUMNS
    for batch in uses:  # each use is drawn at its columns
        match = _picture.USE.fullmatch(batch.label)
        if match is None or not any(use.end > use.begin for use in batch.copies):
            continue
        first, last = int(match[2]), int(match[3])
        place = (first * scale, (last + 1 - first) * scale)
        colour = _picture.WRITERS[match[1]][0]
        assert any(
            (y, height) == pytest.approx(place, abs=0.11) and fill == colour
            for y, height, fill in rows
        ), batch.label
    legend = [x.text for x in shapes if (x.text or "").startswith("tensor memory: ")]
    assert len(legend) == len(written)


def test_a_part_of_the_picture(line: _trace.Timeline) -> None:
    whole = elements(_picture.draw(line, "t").svg())
    part = elements(_picture.draw(line, "t", begin=line.end // 2).svg())
    assert 0 < len(part) < len(whole)
    with pytest.raises(ValueError, match=r"nothing to draw between"):
        _picture.draw(line, "t", begin=line.end)


def test_a_png_is_drawn_with_pillow(line: _trace.Timeline) -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    drawing = _picture.draw(line, "t")
    picture = image.open(io.BytesIO(drawing.png(1)))
    assert picture.size == (_picture.WIDTH, round(drawing.height))
    colours = {colour for _, colour in picture.getcolors(1 << 24)}
    blue = tuple(int(_picture.MATRIX[0][i : i + 2], 16) for i in (1, 3, 5))
    assert blue in colours


# --- the commands ---


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]
SMALL = ("--implementation", "ampere", "--dtype", "bfloat16", "--shape", "1,1,64,128")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Result:
        status = main(["sim", *arguments])
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return call


def test_sim_run_prints_the_report_and_checks_the_output(command: Run) -> None:
    result = command("run", *SMALL, "--causal", "--lse")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("ampere: bfloat16, batch 1, heads 1, 64 queries")
    assert lines[1] == "as on A100 (compute capability 8.0, 108 SMs), simulated"
    assert lines[2].startswith("ampere_attention_fwd_bf16_d128_shares: 1 CTAs, no errors, no lints")
    assert lines[-2].startswith("ok: max error")
    assert lines[-1].startswith("log-sum-exp: ok")


def test_what_a_kernel_did_wrong_is_printed_and_ends_with_status_1(
    command: Run, traced: sim.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = {"cta": 0, "warp": 1, "lane": 2, "line": 3, "instruction": "st", "source": ""}
    finding = sim.Finding(
        "error", "race", "two writes", "a kernel", **where, address=0, count=1, fatal=False
    )
    found = dataclasses.replace(traced.report, findings=(finding,))
    runs = [dataclasses.replace(traced, reports=(found,))]
    monkeypatch.setattr(sim_command, "_simulate", lambda *given: runs[-1])
    files = (tmp_path / "trace.json", tmp_path / "trace.svg")
    result = command("trace", *SMALL, *map(str, files))
    assert result.status == 1
    assert str(finding) in result.out
    assert all(file.stat().st_size > 1000 for file in files)
    stopped = dataclasses.replace(found, complete=False, traces={})
    runs.append(dataclasses.replace(traced, reports=(stopped,)))
    result = command("run", *SMALL)
    assert (result.status, result.err) == (1, "")
    assert "max error" not in result.out  # there is no output to compare
    result = command("trace", *SMALL, str(files[0]))
    assert result.status == 1
    assert "an error stopped the run before CTA 0" in result.err


def test_sim_run_plans_for_the_device_it_is_told(command: Run) -> None:
    result = command("run", *SMALL, "--device", "RTX 4090")
    assert result.status == 0
    assert "as on RTX 4090 (compute capability 8.9" in result.out


def test_sim_trace_writes_files_by_their_suffix(command: Run, tmp_path: Path) -> None:
    names = ["trace.json", "picture.svg"]
    result = command("trace", *SMALL, *(str(tmp_path / name) for name in names))
    assert (result.status, result.err) == (0, "")
    assert "4 warps" in result.out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert elements((tmp_path / "picture.svg").read_text())
    before = {name: (tmp_path / name).read_bytes() for name in names}
    command("trace", *SMALL, *(str(tmp_path / name) for name in names))
    assert before == {name: (tmp_path / name).read_bytes() for name in names}
    command("trace", *SMALL, "--seed", "1", *(str(tmp_path / name) for name in names))
    assert all(before[name] != (tmp_path / name).read_bytes() for name in names)


def test_sim_trace_of_several_ctas(command: Run, tmp_path: Path) -> None:
    shape = ("--implementation", "simt", "--dtype", "float32", "--shape", "1,3,16,32")
    file = tmp_path / "trace.json"
    assert command("trace", *shape, "--ctas", "2,0", str(file)).status == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.txt",), "its name must end in .json, .svg, .png"),
        (("--ctas", "one", "x.json"), "--ctas 'one': it must be indices"),
        (("--ctas", "7", "x.json"), "there is no CTA 7 in a grid of 1"),
        (("--part", "5", "x.svg"), "--part '5': it must be BEGIN,END"),
        (("--part", "99999999,", "x.svg"), "nothing to draw between 99999999 and"),
        (("--stretch", "-1", "x.svg"), "--stretch -1: it must be >= 0"),
        (("--device", "GTX 280", "x.svg"), "no GPU called 'GTX 280'"),
        (("--dtype", "float32", "x.svg"), "ampere"),
        (("--shape", "1,2", "x.svg"), "four integers"),
        (("/nowhere/x.json",), "No such file"),
    ],
)
def test_sim_trace_refuses(command: Run, arguments: tuple[str, ...], message: str) -> None:
    result = command("trace", *SMALL, *arguments)
    assert result.status == 2
    assert result.err.startswith("archflash: ")
    assert message in result.err


@pytest.mark.parametrize(
    "arguments", [(), ("walk",), ("trace", *SMALL), ("run", *SMALL, "--mode", "slow")]
)
def test_wrong_arguments_end_with_status_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["sim", *arguments])
    assert exit.value.code == 2


def test_a_png_without_pillow_is_refused_before_the_run(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    file = tmp_path / "x.png"
    result = command("trace", *SMALL, str(file))
    assert result.status == 2
    assert "pip install 'pillow>=10.1', or write an .svg" in result.err
    assert not file.exists()
