"""`archflash verify` without a GPU: its processes, maps, verdicts and archive."""

from __future__ import annotations

import dataclasses
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the benchmarks

from bench import measured, receive

from archflash import __main__ as program
from archflash import _archflash as native
from archflash import _dispatch, _proofs, _user_tables, reference
from archflash._errors import ForcedImplementationError, LaunchError
from archflash.cli import verify
from archflash.verify import _checks, _jobs, _machine, _run, _times, _verdict, _worker, _wrong
from archflash.verify._making import Maker
from archflash.verify._run import Row, Runner
from archflash.verify._setup import Item, Job, NotHereError, Setup, Told, kernels_on
from archflash.verify._wrong import WrongError

DC = "blackwell_dc"


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path / "tables"))
    monkeypatch.setattr(Setup, "planned_for", property(lambda made: made.gpu))  # by its name
    _user_tables.entries.cache_clear()
    yield
    _user_tables.entries.cache_clear()


def setup(gpu: str = "B200", full: bool = False) -> Setup:
    known = native.find_known_device(gpu)
    assert known is not None
    capability = known.device.capability
    return Setup(gpu, "cuda:0", capability, 8 << 30, full, kernels_on(capability))


# --- where values are wrong ---


def test_the_map_names_heads_tiles_quarters_and_slabs() -> None:
    expected = torch.zeros(1, 2, 300, 128, dtype=torch.float64)
    got = expected.clone()
    got[0, 1, 128 + 64 : 128 + 96, 64:] = 1.0  # quarter 2 of tile 1, the second slab, of head 1
    got[0, 1, 130, 0] = torch.nan
    found = _wrong.where(~(got == expected), got)
    assert (found["wrong"], found["of"], found["nan"], found["infinite"]) == (2049, 76800, 1, 0)
    assert list(found["heads"]) == ["1"]
    assert list(found["tiles of 128 rows"]) == ["1"]
    assert set(found["lane quarters"]) == {"0", "2"}
    assert found["lane quarters"]["2"] == 1 / 8  # half of two tiles, two heads and two slabs each
    assert found["slabs of 64 columns"]["1"] > 50 * found["slabs of 64 columns"]["0"]
    text = "\n".join(_wrong.as_text(found))
    assert "2049 of 76800 elements wrong; the result has 1 NaN" in text
    assert "wrong by lane quarters: 0: 0.00407%, 2: 12.5%" in text
    assert "first: (1, 130, 0) nan; (1, 192, 64) 1" in text
    json.dumps(found)  # it goes through a pipe


def test_a_result_that_is_wrong_by_its_mean_has_a_map_too() -> None:
    right = torch.randn(2, 40, 64, dtype=torch.float64, generator=torch.manual_seed(0))
    got = (right + 0.004).half()
    report = reference.check(got, right, right.half())
    assert not report.ok
    with pytest.raises(WrongError, match="output: WRONG") as caught:
        _wrong.judge("output", got, right, report)
    assert caught.value.where["wrong"] > 0


@pytest.mark.parametrize(("times", "right"), [(1.5, True), (2.5, False), (torch.nan, False)])
def test_an_element_a_little_beyond_the_bound_is_right_if_the_mean_is(
    times: float, right: bool
) -> None:
    expected = torch.ones(64, 64, dtype=torch.float64)
    base = (expected + 1e-6).float()
    got = expected.float()
    got[1, 1] += times * reference.check(got, expected, base).bound
    report = reference.check(got, expected, base)
    assert not report.ok
    if right:
        _wrong.judge("output", got, expected, report)
    else:
        with pytest.raises(WrongError, match="1 of 4096 elements bad"):
            _wrong.judge("output", got, expected, report)


def test_runs_that_differ_are_wrong() -> None:
    first = torch.tensor([[1.0, torch.nan], [3.0, 4.0]])
    _wrong.same_bits("output", first, first.clone())
    again = first.clone()
    again[1, 0] = 3.5
    with pytest.raises(WrongError, match="1 of 4 elements differ between two runs"):
        _wrong.same_bits("output", first, again)


# --- jobs ---


@pytest.mark.parametrize(
    ("gpu", "planned"),  # whether the thousands of calls of all kernels are planned
    [
        ("T4", True), ("A100", False), ("RTX 4090", False), ("H200", False), ("B200", False),
        ("Jetson Thor", False), ("GB10", False), pytest.param("GB10", True, marks=pytest.mark.rest),
    ],
)  # fmt: skip
def test_every_gpu_has_jobs_for_all_that_runs_on_it(gpu: str, planned: bool) -> None:
    made = setup(gpu)
    jobs = _jobs.make_jobs(made)
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        if job.part != _jobs.KERNELS or planned:
            assert len({item.name for item in job.items}) == len(job.items) > 0
    for kernel in made.kernels:
        parts = {job.part for job in jobs if job.kernel == kernel}
        assert {_jobs.FIRST, _jobs.KERNELS, _jobs.LONG, _jobs.DECODING} <= parts
        assert (_jobs.GRADIENTS in parts) == native.has_backward(kernel)
    names = [job.name for job in _jobs.make_jobs(setup(gpu, full=True))]
    assert {job.name for job in jobs} <= {*names}


def test_sizes_follow_the_memory() -> None:
    rows = [_checks.long_rows("ampere", (256, 256), (8, 2), gib << 30) for gib in (1, 2, 7, 100)]
    assert rows == [4059, 8155, 16347, 16347]
    small, large = (
        dataclasses.replace(setup("RTX 4090"), memory=gib << 30, kernels=("ada",))
        for gib in (1, 100)
    )
    calls = [
        [x.name for job in _jobs.jobs_of(_jobs.KERNELS, "ada", made) for x in job.items]
        for made in (small, large)
    ]
    kernels = [{name.partition(":")[0] for name in names} for names in calls]
    assert len(kernels[0]) > 0.8 * len(kernels[1])


def test_the_same_name_has_the_same_numbers_in_every_process() -> None:
    simulated = Setup("H200", "cpu", (9, 0), 1 << 30, False, ("simt",))
    first, again = (Maker(simulated, "a name").rand(3, 4) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, Maker(simulated, "another").rand(3, 4))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WrongError("output: off", {"wrong": 1}), _worker.WRONG),
        (ValueError("a reason"), _worker.FAILED),
        (NotHereError("a reason"), _worker.NOT_HERE),
        (ForcedImplementationError("a reason"), _worker.NOT_HERE),
        (torch.OutOfMemoryError("a reason"), _worker.NOT_RUN),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), _worker.NOT_RUN),
        (LaunchError("CUDA: out of memory"), _worker.NOT_RUN),
    ],
)
def test_what_an_item_raises_is_its_result(error: Exception, status: str) -> None:
    def run(made: Setup) -> Told:
        raise error

    told, alive = _worker.try_item(Item("x", run), Setup("H200", "cpu", (9, 0), 0, False, ()))
    assert alive
    assert told["status"] == status
    assert str(error) in told["detail"]


def test_an_error_that_cuda_keeps_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(made: Setup) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Setup, "synchronize", broken)
    told, alive = _worker.try_item(Item("x", lambda made: Told()), setup())
    assert not alive
    assert told["status"] == _worker.FAILED
    assert "illegal memory access" in told["detail"]


# --- processes ---

# A worker that speaks as _worker does, and does what the names of items say.
WORKER = """
import json, os, sys, time
answer = os.fdopen(int(sys.argv[1]), "w")
def tell(**told):
    print(json.dumps(told), file=answer, flush=True)
first = json.loads(sys.stdin.readline())
print("ahead" if first["ahead"] else "alone", flush=True)
tell(said="ready")
line = sys.stdin.readline()
if not line: sys.exit()
asked = json.loads(line)
if asked["job"].endswith("stillborn"): sys.exit("no luck")
for item in asked["items"]:
    tell(said="begin", item=item)
    if item.startswith("hang"): time.sleep(60)
    if item.startswith("die"):
        print("last words", flush=True)
        os.kill(os.getpid(), 11)
    status = "wrong" if item.startswith(("wrong", "break")) else "ok"
    tell(said="end", item=item, status=status, detail="", seconds=0.0)
    if item.startswith("break"): sys.exit(1)
"""


@pytest.fixture
def worker(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return (str(script),)


def made(what: str, *items: str, part: str = _jobs.FIRST) -> Job:
    nothing = [Item(name, lambda setup: Told(), 0.3) for name in items]
    return Job(part, "simt", _proofs.FORWARD, what, lambda: nothing)


def statuses(worker: tuple[str, ...], *jobs: Job, go_on: bool = False) -> dict[str, str]:
    told: list[Row] = []
    runner = Runner(setup(), told.append, go_on, worker)
    runner.run([*jobs])
    assert told == runner.rows
    return {row.item: row.status for row in told}


def test_what_a_process_does_to_itself_is_blamed_on_its_item_alone(worker: tuple[str, ...]) -> None:
    found = statuses(
        worker,
        made("one", "fine", "wrong a", "die a", "after a", "break a", "after b"),
        made("stillborn", "never begun", "nor this"),
        made("two", "wrong b", "die b", "end"),
    )
    assert found == {
        "fine": "ok", "wrong a": "wrong", "die a": "crashed", "after a": "ok", "break a": "wrong",
        "after b": "ok", "never begun": "crashed", "nor this": "crashed", "wrong b": "wrong",
        "die b": "crashed", "end": "ok",
    }  # fmt: skip


def test_a_job_whose_items_all_die_is_left_after_the_third(worker: tuple[str, ...]) -> None:
    found = statuses(worker, made("one", "die a", "b", "die c", "die d", "e"), made("two", "f"))
    assert found == {
        "die a": "crashed", "b": "ok", "die c": "crashed", "die d": "crashed", "e": "not run",
        "f": "ok",
    }  # fmt: skip


def test_the_last_words_of_a_process_are_kept(worker: tuple[str, ...]) -> None:
    runner = Runner(setup(), lambda row: None, worker=worker)
    runner.run([made("one", "die a")])
    assert "exit status -11: ahead\nlast words" in runner.rows[0].detail


def test_no_process_opens_a_gpu_ahead_that_takes_one_at_a_time(worker: tuple[str, ...]) -> None:
    on = dataclasses.replace(setup(), memory=80 << 30)
    alone = dataclasses.replace(on, alone=True)
    assert _run.processes_ahead(dataclasses.replace(on, memory=7 << 30)) == 1
    assert 1 <= _run.processes_ahead(on) <= _run.AHEAD
    assert _run.processes_ahead(alone) == 1
    runner = Runner(alone, lambda row: None, worker=worker)
    runner.run([made("one", "die a"), made("two", "b")])
    assert "alone" in runner.rows[0].detail
    assert runner.rows[1].status == "ok"


@pytest.mark.slow
def test_two_hangs_in_correctness_end_the_run_and_one_does_not(worker: tuple[str, ...]) -> None:
    jobs = [made("one", "hang a", "after a"), made("two", "hang b", "after b"), made("end", "c")]
    assert statuses(worker, *jobs) == {
        "hang a": "timeout", "after a": "ok", "hang b": "timeout", "after b": "not run",
        "c": "not run",
    }  # fmt: skip
    times = [made("times", "hang a", "hang b", "after a", part=_jobs.TIMES)]
    assert statuses(worker, *times)["after a"] == "ok"
    assert statuses(worker, *jobs, go_on=True)["c"] == "ok"


# --- verdicts ---

WANTED = [("simt", "forward", _jobs.FIRST), ("simt", "forward", _jobs.LONG)]


def row(status: str, part: str = _jobs.FIRST, kernel: str = "simt", of: str = "forward") -> Row:
    return Row(part, kernel, f"{part}: {kernel}", "an item", of, status)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("ok"), row("ok", _jobs.LONG)], _verdict.PROVED),
        ([row("ok"), row("not here"), row("ok", _jobs.LONG)], _verdict.PROVED),
        ([row("ok")], _verdict.UNTRIED),  # --only left the long calls out
        ([row("ok"), row("not run", _jobs.LONG)], _verdict.UNTRIED),
        ([row("ok"), row("not run"), row("ok", _jobs.LONG)], _verdict.UNTRIED),
        ([row("wrong"), row("ok", _jobs.LONG)], _verdict.FAILED),
        ([row("timeout"), row("not run", _jobs.LONG)], _verdict.FAILED),
        ([row("crashed", kernel="ada"), row("ok"), row("ok", _jobs.LONG)], _verdict.PROVED),
        ([row("wrong", of="backward"), row("ok"), row("ok", _jobs.LONG)], _verdict.PROVED),
        ([row("not here"), row("not here", _jobs.LONG)], _verdict.UNTRIED),
        ([], _verdict.UNTRIED),
    ],
)
def test_a_pass_is_proved_where_every_part_of_it_went_well(rows: list[Row], said: str) -> None:
    (verdict,) = _verdict.verdicts(rows, WANTED)
    assert verdict.said == said


def test_a_pass_is_not_proved_where_a_job_did_not_come_to_its_end() -> None:
    rows = [row("ok"), row("ok", _jobs.LONG)]
    (verdict,) = _verdict.verdicts(rows, WANTED, [("simt", "forward", "first calls: simt float16")])
    assert verdict.said == _verdict.UNTRIED
    assert verdict.why.endswith("the first: first calls: simt float16")
    (verdict,) = _verdict.verdicts(rows, WANTED, [("simt", "backward", "gradients: simt float16")])
    assert verdict.said == _verdict.PROVED


def test_a_runner_knows_the_jobs_that_it_finished(worker: tuple[str, ...]) -> None:
    def tell(row: Row) -> None:
        if row.item == "c":
            raise KeyboardInterrupt

    runner = Runner(setup(), tell, worker=worker)
    with pytest.raises(KeyboardInterrupt):
        runner.run([made("one", "a"), made("two", "b", "c", "d")])
    assert runner.finished == {made("one").name}


def test_nvidia_smi_is_cleared_of_what_names_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    told = """==============NVSMI LOG==============
Timestamp                   : Sat Nov 28 2026
GPU 00000000:01:00.0
    Product Name            : NVIDIA B200
    Serial Number           : 1234567
    GPU UUID                : GPU-abc
    Platform Info
        Chassis Serial      : 99x
        Slot Number         : 98x
        Host ID             : 97x
        MAC address         : 96x
    Clocks
        SM                  : 1965 MHz
    Processes
        Process ID          : 77
            Name            : secret
    Capabilities
        EGM                 : disabled
"""
    monkeypatch.setattr(
        _verdict.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=told, returncode=0)
    )
    kept = _verdict.nvidia_smi()
    assert "NVIDIA B200" in kept
    assert "1965 MHz" in kept
    assert "disabled" in kept
    private = {"1234567", "GPU-abc", "secret", "77", "Nov", "99x", "98x", "97x", "96x"}
    assert not private & {*kept.split()}


def test_texts_name_no_folder_of_a_person_and_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr(_verdict.platform, "node", lambda: "anns-pc")
    text = f"{sys.prefix}/lib/x.py: no /home/ann/y on anns-pc, but /home/anna"
    assert _verdict.without_names(text) == "PREFIX/lib/x.py: no HOME/y on MACHINE, but /home/anna"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("1980, 512.33, 700.00, 61\n", {
            "clock_mhz": 1980.0, "power_w": 512.33, "power_limit_w": 700.0, "celsius": 61.0,
        }),
        ("1300, [N/A], [Not Supported], 50\n", {"clock_mhz": 1300.0, "celsius": 50.0}),
        ("", {}),
    ],
)  # fmt: skip
def test_the_state_of_the_gpu_has_what_nvidia_smi_says(
    monkeypatch: pytest.MonkeyPatch, told: str, expected: dict[str, float]
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=told)

    monkeypatch.setattr(_times.subprocess, "run", run)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34")
    )
    assert _times.gpu_state(1) == expected
    assert asked[0][-1] == "--id=GPU-12-34"


# --- archives ---


def of_one_kernel() -> Setup:
    """A run about one kernel, whose calls are planned in no time."""
    return dataclasses.replace(setup("B200"), kernels=(DC,))


def rows_of_a_run(made: Setup, status: str = "ok") -> list[Row]:
    """Rows as of a run where all was right, but for the last comparison of the forward pass."""
    rows = []
    for job in _jobs.make_jobs(made):
        rows += [Row(job.part, job.kernel, job.name, x.name, job.of, "ok") for x in job.items]
    [row for row in rows if row.of == _proofs.FORWARD][-1].status = status
    for one in rows:
        if one.part == _jobs.TIMES:
            one.numbers = {"p50_us": 10.0, "clock_mhz": 1965.0, "power_limit_w": 1000.0}
    return rows


def archive(folder: Path, made: Setup, rows: list[Row], **changed: str) -> Path:
    wanted = sorted({(job.kernel, job.of, job.part) for job in _jobs.make_jobs(made) if job.of})
    facts = {
        "date": "2027-01-02T03:04Z", "gpu": made.gpu, "driver": "590.1", "torch": "2.13",
        "capability": "{}.{}".format(*made.capability), "archflash": native.version,
        "memory_bytes": str(made.memory), "kernels": " ".join(made.kernels),
    }  # fmt: skip
    file = folder / "card.tar.gz"
    _verdict.write_archive(file, facts | changed, rows, _verdict.verdicts(rows, wanted))
    return file


def test_an_archive_becomes_rows_with_their_origin_and_proofs_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = of_one_kernel()
    file = archive(tmp_path, made, rows_of_a_run(made))
    arguments = [str(file), "--origin", "issue 7", "--output", str(tmp_path)]
    assert receive.main(arguments) == 0
    assert "proved   blackwell_dc backward" in capsys.readouterr().out
    rows = receive.load(tmp_path / "b200-verify.csv")
    assert {row["origin"] for row in rows} == {"issue 7"}
    assert {row["kind"] for row in rows} == {"verdict", "time"}
    assert json.loads(rows[-1]["numbers"])["clock_mhz"] == 1965
    found = {(x["implementation"], x["pass"]) for x in measured.proofs(tmp_path)}
    assert {(DC, "forward"), (DC, "backward")} <= found
    assert receive.main(arguments) == 2
    assert "has run 20270102T0304Z-b200-" in capsys.readouterr().err


def test_a_failure_becomes_a_row_and_proves_nothing(tmp_path: Path) -> None:
    made = of_one_kernel()
    rows = rows_of_a_run(made, "wrong")
    bad = next(row for row in rows if row.status == "wrong")
    bad.detail, bad.where = "off by 1", {"wrong": 1, "of": 2, "nan": 0, "infinite": 0, "first": []}
    assert receive.main([str(archive(tmp_path, made, rows)), "--output", str(tmp_path)]) == 0
    (failure,) = [
        row for row in receive.load(tmp_path / "b200-verify.csv") if row["kind"] == "failure"
    ]
    assert (failure["kernel"], failure["pass"]) == (DC, _proofs.FORWARD)
    assert failure["detail"].startswith("off by 1 1 of 2 elements wrong")
    found = {(x["implementation"], x["pass"]) for x in measured.proofs(tmp_path)}
    assert (DC, "forward") not in found
    assert (DC, "backward") in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"archflash": "0.0.1"}, "it is of archflash 0.0.1"),
        ({"capability": "12.0"}, "B200 has no compute capability 12.0"),
        ({"driver": ""}, "it does not say driver"),
        ({"date": "9999"}, "'9999' is no date"),
    ],
)
def test_an_archive_that_is_not_of_this_version_or_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], said: str
) -> None:
    made = of_one_kernel()
    file = archive(tmp_path, made, rows_of_a_run(made), **changed)
    assert receive.main([str(file), "--output", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv"))


def test_rows_that_are_made_up_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = of_one_kernel()
    every = rows_of_a_run(made)
    some = [row for row in every if "plain" not in row.item]
    renamed = [*every, Row(_jobs.FIRST, DC, f"first calls: {DC} float16", "y", "forward", "ok")]
    for rows, said in ((some, "items of that pass are missing"), (renamed, "has no such item")):
        assert receive.main([str(archive(tmp_path, made, rows)), "--output", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed", [{"only": "simt"}, {"unfinished": f"long calls: {DC}"}], ids=str
)
def test_a_part_of_a_run_proves_nothing_for_all(tmp_path: Path, changed: dict[str, str]) -> None:
    made = of_one_kernel()
    file = archive(tmp_path, made, rows_of_a_run(made), **changed)
    _, said = receive.rows_of(receive.read_archive(file), "")
    assert _verdict.UNTRIED in {verdict.said for verdict in said if verdict.of == _proofs.FORWARD}


def test_what_another_gpu_of_its_kind_refuted_later_is_not_proved(tmp_path: Path) -> None:
    made = of_one_kernel()
    early, late = "2027-01-02T03:04Z", "2027-01-03T03:04Z"
    # The file of the older run comes last in the order of names.
    for status, date, name in (("wrong", late, "a"), ("ok", early, "z")):
        file = archive(tmp_path, made, rows_of_a_run(made, status), date=date)
        assert receive.main([str(file), "--output", str(tmp_path)]) == 0
        (tmp_path / "b200-verify.csv").rename(tmp_path / f"{name}-verify.csv")
    found = {(x["implementation"], x["pass"]) for x in measured.proofs(tmp_path)}
    assert (DC, "forward") not in found
    assert (DC, "backward") in found


def test_damaged_archives_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = of_one_kernel()
    rows = rows_of_a_run(made)
    good = archive(tmp_path, made, rows)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(good.read_bytes()[:300])
    assert receive.main([str(cut), "--output", str(tmp_path)]) == 2
    assert "is not of `archflash verify --send`" in capsys.readouterr().err
    with pytest.raises(ValueError, match="it has no facts"):
        receive.rows_of({"facts": 3, "rows": []}, "")
    told = receive.read_archive(good)
    told["rows"][0]["where"] = 3
    with pytest.raises(ValueError, match="a row is malformed"):
        receive.rows_of(told, "")


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other = tmp_path / "a.txt", tmp_path / "b.tar.gz"
    text.write_text("nothing")
    with tarfile.open(other, "w:gz") as file:
        file.add(text, "other.json")
    for path in (text, other, tmp_path / "missing"):
        assert receive.main([str(path), "--output", str(tmp_path)]) == 2
        assert "is not of `archflash verify --send`" in capsys.readouterr().err


# --- the command ---


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: "no NVIDIA driver on this machine")
    assert program.main(["verify"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "archflash: there is no GPU to verify: no NVIDIA driver on this machine (--simulate goes "
        "the same way without one)\n"
    )


@pytest.mark.slow
def test_a_torch_that_cannot_use_the_gpu_is_named_with_what_it_says() -> None:
    with pytest.raises(ValueError, match=r"torch .* cannot use cuda:7 \(install one .*\): .*Error"):
        _machine.ask(7)


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["verify", "--simulate", "--only", "nothing like it"]) == 2
    assert "no job matches --only 'nothing like it'" in capsys.readouterr().err
    assert program.main(["verify", "--simulate", "RTX 9090"]) == 2
    assert "RTX 9090" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["verify", "--only", "("])


@pytest.mark.slow
def test_what_a_run_proved_is_chosen_afterwards_and_what_it_refuted_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known = native.find_known_device("B200")
    assert known is not None
    made = of_one_kernel()
    monkeypatch.setattr(_dispatch, "query_device", lambda index: known.device)
    monkeypatch.setattr(verify, "make_setup", lambda arguments: (made, {}))
    monkeypatch.setattr(_verdict, "facts", lambda made, machine: dict.fromkeys(
        ("date", "gpu", "capability", "driver", "torch", "archflash"), "x"))  # fmt: skip
    for status, expected, proved in (("ok", 0, True), ("wrong", 1, False)):
        bad = rows_of_a_run(made)
        of_dc = [one for one in bad if one.kernel == DC and one.of == _proofs.FORWARD]
        of_dc[0].status = status

        def run(self: Runner, jobs: list[Job], rows: list[Row] = bad) -> None:
            self.finished.update(job.name for job in jobs)
            for one in rows:
                self.rows.append(one)
                self._tell(one)

        monkeypatch.setattr(Runner, "run", run)
        send = tmp_path / f"{status}.tar.gz"
        assert program.main(["verify", "--send", str(send)]) == expected
        said = capsys.readouterr().out
        assert f"{'proved' if proved else 'failed'}   {DC}: " in said
        assert said.splitlines()[-1].startswith("RIGHT: " if proved else "WRONG: ")
        assert _proofs.proved(DC, (10, 0)) == proved
        assert _proofs.proved(DC, (10, 0), _proofs.BACKWARD)
        with tarfile.open(send) as archive:
            assert ("failures.txt" in archive.getnames()) != proved


@pytest.mark.slow
def test_the_whole_way_on_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of probes and one of calls, in processes of their own."""
    file = tmp_path / "sent.tar.gz"
    only = "probes|first calls: simt"
    assert program.main(["verify", "--simulate", "--only", only, "--send", str(file)]) == 0
    said = capsys.readouterr().out
    assert "[1/2] probes: instructions: 50 ok" in said
    assert "[2/2] first calls: simt" in said
    assert "proved   simt: 1 of 1 right" in said
    assert "not run  hopper: nothing tried" in said
    assert not (tmp_path / "tables").exists()  # a simulated run proves nothing
    told = receive.read_archive(file)
    assert [row["status"] for row in told["rows"]] == ["ok"] * 51
