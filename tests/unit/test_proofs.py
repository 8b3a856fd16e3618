"""Where the code of each kernel has run, and what dispatch does where it has not."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _dispatch, _fused_kernels, _overrides, _proofs, _registry, _user_tables
from archflash._api import find_device, make_problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the benchmarks

from bench import measured
from bench.day_one import jobs, record

DC = "blackwell_dc"
HALF, E4M3 = torch.float16, torch.float8_e4m3fn
NEW = pytest.mark.parametrize("device", ["B200", "B300", "Jetson Thor"])


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variable, file or earlier warning counts, and PyTorch asks cuDNN first on 10.x."""
    monkeypatch.delenv(_proofs.VARIABLE, raising=False)
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        _fused_kernels, "cudnn_comes_first", lambda capability: capability[0] in (9, 10)
    )
    monkeypatch.setattr(_proofs, "_warned", set())
    _user_tables.entries.cache_clear()
    yield
    _user_tables.entries.cache_clear()
    _user_tables.software.cache_clear()


def tensors(
    dtype: torch.dtype = HALF, *, nq: int = 2048, d: int = 128, grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.empty(2, 8, nq, d, dtype=dtype, device="meta", requires_grad=grad)
    k = torch.empty(2, 8, 2048, d, dtype=dtype, device="meta")
    return q, k, k


# --- the data ---


def test_what_is_chosen_where_it_never_ran_has_run_somewhere() -> None:
    ran = {(proof.implementation, proof.of) for proof in _proofs.committed()}
    names = _registry.kernel_names()
    elsewhere = [name for name in names if _registry.description(name).proved_by_any_gpu]
    assert elsewhere == [name for name in names if name not in ("hopper", DC)]
    for name in elsewhere:
        assert (name, _proofs.FORWARD) in ran
        assert ((name, _proofs.BACKWARD) in ran) == native.has_backward(name)


@pytest.mark.parametrize(
    ("name", "capability", "of", "expected"),
    [
        ("hopper", (9, 0), _proofs.FORWARD, True),
        ("hopper", (9, 0), _proofs.BACKWARD, True),
        ("ampere", (8, 0), _proofs.BACKWARD, True),  # it ran on 9.0
        ("ada", (8, 9), _proofs.FORWARD, True),
        ("blackwell_consumer", (12, 0), _proofs.FORWARD, True),
        ("simt", (7, 5), _proofs.BACKWARD, True),
        (DC, (10, 0), _proofs.FORWARD, False),
        (DC, (10, 3), _proofs.BACKWARD, False),
        (DC, (11, 0), _proofs.FORWARD, False),
    ],
    ids=str,
)
def test_who_is_proved_where(
    name: str, capability: tuple[int, int], of: str, expected: bool
) -> None:
    assert _proofs.proved(name, capability, of) == expected


def test_a_kernel_without_any_run_is_proved_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a run elsewhere would do is not enough, and one pass says nothing about the other."""
    forward = frozenset(x for x in _proofs.committed() if x[:2] != ("ampere", "backward"))
    monkeypatch.setattr(_proofs, "committed", lambda: forward)
    assert _proofs.proved("ampere", (8, 0))
    assert not _proofs.proved("ampere", (8, 0), _proofs.BACKWARD)
    q = tensors(grad=True)
    decision = archflash.explain(*q, device="A100", softcap=2.0)
    assert decision.chosen != "ampere"
    assert "backward pass of ampere has never run" in decision.reasons["ampere"][0]


def test_a_run_on_one_capability_says_nothing_about_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = _proofs.committed() | {_proofs.Proof(DC, _proofs.FORWARD, (10, 0))}
    monkeypatch.setattr(_proofs, "committed", lambda: ran)
    assert archflash.explain(*tensors(), device="B200").chosen == DC
    assert archflash.explain(*tensors(), device="B300").chosen == "torch"
    # The backward pass needs a run of its own.
    assert archflash.explain(*tensors(grad=True), device="B200", softcap=2.0).chosen == "ampere"


# --- the choice ---


def kinds() -> dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]]:
    """Calls that blackwell_dc would serve, with who serves them until it has run."""
    packed = torch.empty(4, dtype=torch.int32, device="meta")
    rows = torch.empty(100, 8, 128, dtype=HALF, device="meta")
    return {
        "plain": (tensors(), {}, "torch"),
        "bf16": (tensors(torch.bfloat16), {}, "torch"),
        "causal": (tensors(), {"causal": True}, "torch"),
        "d64": (tensors(d=64), {}, "torch"),
        "d256": (tensors(d=256), {}, "torch"),
        "one row": (tensors(nq=1), {}, "ampere"),  # it splits the keys, and makes no plan of cuDNN
        "other numbers of rows": (tensors(nq=100), {"causal": True}, "ampere"),  # PyTorch: a mask
        "window": (tensors(), {"window": (100, 0)}, "ampere"),
        "softcap": (tensors(), {"softcap": 30.0}, "ampere"),
        "sinks": (tensors(), {"sinks": torch.empty(8, device="meta")}, "ampere"),
        "LSE": (tensors(), {"return_lse": True}, "ampere"),
        "packed": ((rows,) * 3, {"cu_seqlens_q": packed, "cu_seqlens_k": packed}, "ampere"),
        "num_splits": (tensors(), {"num_splits": 1}, "ampere"),
        "e4m3": (tensors(E4M3), {}, "ada"),
    }


@pytest.mark.parametrize("kind", kinds())
@NEW
def test_who_serves_what_the_kernel_for_the_gpu_may_not_yet(device: str, kind: str) -> None:
    (q, k, v), options, expected = kinds()[kind]
    decision = archflash.explain(q, k, v, device=device, **options)
    assert decision.chosen == expected
    assert decision.unproved == (DC,)
    assert not decision.fallback
    (reason,) = decision.reasons[DC]
    assert "has never run on such a GPU" in reason
    assert "`archflash verify` compares it with float64 there" in reason
    assert f"{_proofs.VARIABLE}={DC} takes it at once" in reason
    # By name it serves, on a GPU and on the simulator.
    forced = archflash.explain(q, k, v, device=device, implementation=DC, **options)
    assert forced.plan is not None
    assert forced.unproved == ()


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("asked", ["1", DC, f"ampere, {DC}"])
def test_the_variable_asks_for_what_has_never_run(
    monkeypatch: pytest.MonkeyPatch, asked: str, kind: str
) -> None:
    monkeypatch.setenv(_proofs.VARIABLE, asked)
    (q, k, v), options, _ = kinds()[kind]
    decision = archflash.explain(q, k, v, device="B200", **options)
    assert decision.chosen == DC
    assert decision.unproved == ()


def test_the_variable_takes_names_of_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_proofs.VARIABLE, f"{DC},blackwel")
    with pytest.raises(ValueError, match=r"'blackwel' is no kernel of this build: give 1 for all"):
        archflash.explain(*tensors(), device="B200")
    monkeypatch.setenv(_proofs.VARIABLE, "0")
    assert archflash.explain(*tensors(), device="B200").chosen == "torch"


OTHERS = [row.device for row in native.known_devices() if row.device.capability[0] not in (10, 11)]


@pytest.mark.parametrize("device", [device.name for device in OTHERS])
def test_nothing_changes_where_the_kernels_have_run(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The variable makes no difference on GPUs that blackwell_dc is not made for."""
    calls = [*kinds().values(), (tensors(grad=True), {"softcap": 2.0}, "")]
    before = [archflash.explain(*given, device=device, **options) for given, options, _ in calls]
    assert all(decision.unproved == () for decision in before)
    monkeypatch.setenv(_proofs.VARIABLE, "1")
    after = [archflash.explain(*given, device=device, **options) for given, options, _ in calls]
    assert [str(decision) for decision in before] == [str(decision) for decision in after]


@NEW
def test_a_call_that_no_other_kernel_serves_falls_back_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    refuse = native.plan

    def plan(name: str, problem: Any, gpu: Any) -> Any:
        return refuse(name, problem, gpu) if name == DC else [f"{name} cannot"]

    monkeypatch.setattr(native, "plan", plan)
    problem = make_problem(*tensors(E4M3)).as_if_on_cuda()
    decision = _dispatch.select(problem, find_device(device))
    assert (decision.chosen, decision.fallback) == ("torch", True)
    with pytest.warns(UserWarning, match="has never run"):
        _, refusals = _dispatch.choose(problem, find_device(device), None, None)
    assert _dispatch.nearest(refusals, problem, find_device(device))[0] == DC


# --- what is said ---


def choose(device: str, *given: torch.Tensor, **options: Any) -> None:
    _dispatch.choose(
        make_problem(*given, **options).as_if_on_cuda(), find_device(device), None, None
    )


def test_one_warning_names_the_run_and_the_variable() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        choose("B200", *tensors())
        choose("B200", *tensors(), causal=True)
        choose("B200", *tensors(E4M3))
        choose("Jetson Thor", *tensors(), softcap=3.0)
    first, second = (str(warning.message) for warning in said)
    assert first == (
        "archflash: PyTorch serves calls on B200 (compute capability 10.0) that blackwell_dc is "
        "made for. blackwell_dc has never run on one; `archflash verify` compares it with float64 "
        "there, in minutes, and ARCHFLASH_UNPROVED=blackwell_dc takes it at once"
    )
    assert second.startswith("archflash: ampere serves calls on Jetson Thor (compute capability 11")


def test_the_operators_of_pytorch_warn_and_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device("B200")
    monkeypatch.setattr(_overrides, "_device_of", lambda problem, index: (device, None))
    problem = make_problem(*tensors(), return_lse=True).as_if_on_cuda()
    with pytest.warns(UserWarning, match=f"{_proofs.VARIABLE}={DC}"):
        answer = _overrides._decide(problem, 0, None)
    assert answer == _dispatch.why_torch(problem, device)
    monkeypatch.setenv(_proofs.VARIABLE, DC)
    plan = _overrides._decide(problem, 0, None)
    assert not isinstance(plan, str)
    assert plan.implementation == DC


def test_gradients_warn_where_the_backward_pass_alone_has_never_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = _proofs.committed() | {_proofs.Proof(DC, _proofs.FORWARD, (10, 0))}
    monkeypatch.setattr(_proofs, "committed", lambda: ran)
    with pytest.warns(UserWarning, match="backward pass of blackwell_dc has never run"):
        choose("B200", *tensors(grad=True), softcap=2.0)


@pytest.mark.parametrize("device", ["B200", "H200", "A100", "RTX 5090"])
def test_nothing_is_said_where_the_choice_is_the_same(device: str) -> None:
    """Calls that blackwell_dc does not serve, or that PyTorch serves before it; other GPUs."""
    mask = torch.empty(2048, 2048, dtype=torch.bool, device="meta")
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        (tensors(torch.float32), {}),
        (tensors(), {"attn_mask": mask}),
        (tensors(grad=True), {}),
        (tensors(d=384), {}),
    ]
    problem = make_problem(*tensors()).as_if_on_cuda()
    if device != "B200":
        calls += [(given, options) for given, options, _ in kinds().values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, options in calls:
            choose(device, *given, **options)
        if device == "B200":
            _dispatch.choose(problem, find_device(device), DC, None)


def test_explaining_says_nothing_aloud() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert archflash.explain(*tensors(), device="B200").unproved == (DC,)
        assert archflash.explain(*tensors(), device="B200", backward=True).unproved == (DC,)


# --- proofs of this machine ---


def gpu(name: str = "B200") -> native.Device:
    return find_device(name)


def test_a_proof_of_this_machine_counts_for_its_capability_and_passes() -> None:
    _proofs.keep(gpu(), [(DC, _proofs.FORWARD)])
    assert archflash.explain(*tensors(), device="B200").chosen == DC
    assert archflash.explain(*tensors(), device="B300").chosen == "torch"
    assert archflash.explain(*tensors(), device="B200", backward=True).chosen == "ampere"
    file = _proofs.keep(gpu(), [(DC, _proofs.BACKWARD)])
    assert archflash.explain(*tensors(), device="B200", backward=True).chosen == DC
    (entry,) = json.loads(file.read_text())["entries"]
    assert entry["key"]["gpu"] == "B200"
    assert entry["proved"] == [[DC, _proofs.BACKWARD], [DC, _proofs.FORWARD]]
    _proofs.keep(gpu(), [], refuted=[(DC, _proofs.FORWARD)])  # a later run
    decision = archflash.explain(*tensors(), device="B200")
    assert decision.chosen == "torch"
    assert "`calibrate` found blackwell_dc wrong on such a GPU" in decision.reasons[DC][0]
    _proofs.keep(gpu(), [(DC, _proofs.FORWARD)])
    assert archflash.explain(*tensors(), device="B200").chosen == DC


def test_what_was_found_wrong_here_is_not_chosen_though_it_is_proved_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert archflash.explain(*tensors(), device="A100", softcap=2.0).chosen == "ampere"
    _proofs.keep(gpu("A100"), [], refuted=[("ampere", _proofs.FORWARD)])
    decision = archflash.explain(*tensors(), device="A100", softcap=2.0)
    assert decision.chosen != "ampere"
    assert decision.unproved == ("ampere",)
    assert archflash.explain(*tensors(), device="RTX 3090", softcap=2.0).chosen == "ampere"
    monkeypatch.setenv(_proofs.VARIABLE, "ampere")
    assert archflash.explain(*tensors(), device="A100", softcap=2.0).chosen == "ampere"


def test_a_proof_with_other_software_does_not_count_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _proofs.keep(gpu(), [(DC, _proofs.FORWARD)])
    monkeypatch.setattr(_user_tables, "driver_version", lambda: "700.10")
    _user_tables.software.cache_clear()
    decision = archflash.explain(*tensors(), device="B200")
    assert decision.chosen == "torch"
    assert (
        "was proved here with other software (driver none, now 700.10); `archflash verify`"
        in (decision.reasons[DC][0])
    )


def test_a_list_of_proofs_without_passes_proves_nothing() -> None:
    key = _user_tables.key_of(gpu())
    _user_tables.put(_proofs.KIND, {"key": key})
    _user_tables.put(
        _proofs.KIND, {"key": key | {"capability": "ten"}, "proved": [[DC, "forward"]]}
    )
    assert archflash.explain(*tensors(), device="B200").chosen == "torch"


@pytest.mark.parametrize(
    "told",
    [{"refuted": None}, {"proved": 5}, {"proved": ["ab"]}, {"proved": [["a"]]},
     {"refuted": [[1, 2]]}, {"key": {"capability": "\u00b25.\u00b2"}}],
    ids=str,
)  # fmt: skip
def test_damaged_lists_of_proofs_prove_nothing_and_are_written_over(told: dict[str, Any]) -> None:
    _user_tables.put(_proofs.KIND, {"key": _user_tables.key_of(gpu()), **told})
    assert archflash.explain(*tensors(), device="B200").chosen == "torch"
    _proofs.keep(gpu(), [(DC, _proofs.FORWARD)])
    assert archflash.explain(*tensors(), device="B200").chosen == DC


def test_results_that_another_process_kept_meanwhile_stay() -> None:
    assert _proofs.own() == frozenset()  # from now on this process knows of none
    file = _user_tables.file_of(_proofs.KIND)
    assert file is not None
    file.parent.mkdir(exist_ok=True)
    entry = {"key": _user_tables.key_of(gpu()), "proved": [[DC, "backward"]]}
    file.write_text(json.dumps({"entries": [entry]}))
    _proofs.keep(gpu(), [(DC, _proofs.FORWARD)])
    assert {proof.of for proof in _proofs.own()} == {"forward", "backward"}


# --- proofs that are committed ---


def day(
    folder: Path,
    *,
    end: str = record.OK,
    left_out: int = 0,
    run_id: str = "20270101",
    dirty: str = "0",
) -> None:
    """The record of a day on a B200 whose last comparison ended so."""
    facts = {
        "implementation": DC, "dtypes": "float16", "capability": "10.0", "run_id": run_id,
        "dirty": dirty,
    }  # fmt: skip
    rows = [record.make_row("environment", "", "note", json.dumps(facts))]
    made = [
        job for job in jobs.make_jobs(DC, ("float16",), False) if job.part in measured.COMPARISONS
    ]
    statuses = itertools.chain([record.OK] * (len(made) - 1), [end])
    jobs_done = list(zip(made, statuses, strict=True))[left_out:]
    rows += [record.make_row(job.part, job.name, status, seconds=1.0) for job, status in jobs_done]
    record.append(folder / "b200-day-one.csv", rows)


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ({}, True),
        ({"end": "failed"}, False),
        ({"end": "timeout"}, False),
        ({"left_out": 1}, False),
        ({"dirty": "1"}, False),
    ],
    ids=str,
)
def test_a_day_is_a_proof_where_every_comparison_went_well(
    tmp_path: Path, told: dict[str, Any], counts: bool
) -> None:
    day(tmp_path, **told)
    expected = {
        "implementation": DC, "pass": "forward", "capability": [10, 0], "run_id": "20270101",
    }  # fmt: skip
    assert measured.proofs(tmp_path) == ([expected] if counts else [])


def test_rows_are_proofs_of_what_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"implementation": name, "features": features, "run_id": run_id}
        for name, features, run_id in (
            (DC, "", "20270102"), (DC, "gradients;sustained", "20270103"), ("torch-cudnn", "", "1"),
            ("ada-int8", "approximate=int8_qk", "1"),
        )
    ]  # fmt: skip
    monkeypatch.setattr(measured, "rows_by_capability", lambda results: {(10, 0): rows})
    of_rows = {(proof["pass"], proof["run_id"]) for proof in measured.proofs(tmp_path)}
    assert of_rows == {("forward", "20270102"), ("backward", "20270103")}
    day(tmp_path, end="failed")  # an earlier day does not speak against them
    assert len(measured.proofs(tmp_path)) == 2
    (tmp_path / "b200-day-one.csv").unlink()
    day(tmp_path, end="failed", run_id="20270104")
    assert [proof["pass"] for proof in measured.proofs(tmp_path)] == ["backward"]
