"""Commands that need a GPU, and what is asked of its driver, on a GPU that is made up."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _calibrated, _dispatch, _user_tables
from archflash.__main__ import main
from archflash._api import find_device, make_problem
from archflash._dispatch import device as of_driver
from archflash.cli import replay
from archflash.cli import verify as verify_command
from archflash.verify import _machine
from archflash.verify._run import Runner

H200 = find_device("H200")


class OnCpu:
    """torch, whose CUDA devices are the CPU."""

    cuda = SimpleNamespace(mem_get_info=lambda device: (1 << 30, 1 << 30))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path / "tables"))
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: H200)
    _calibrated.read_again()


# --- replay ---


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FP8 = torch.float8_e4m3fn
ENDS = meta(3, dtype=torch.int32)
REPLAYED: dict[str, tuple[str, list[torch.Tensor], dict[str, Any]]] = {
    "plain": ("ampere", [meta(1, 2, 40, 64)] * 3, {"causal": True}),
    "lse": ("ampere", [meta(1, 2, 40, 64)] * 3, {"return_lse": True, "window": (9, 2)}),
    "fp8": ("ada", [meta(1, 2, 40, 64, dtype=FP8)] * 3, {"return_lse": True}),
    "one descale": (
        "ada", [meta(1, 2, 40, 64, dtype=FP8)] * 3, {"q_descale": meta(1, dtype=torch.float32)},
    ),
    "offsets": (
        "ampere", [meta(2, 2, 40, 64)] * 3,
        {"causal": True, "q_offset": meta(2, dtype=torch.int32), "return_lse": True},
    ),
    "approximate": (
        "ampere", [meta(1, 2, 40, 64)] * 3,
        {"approximate": "fp16_accumulate", "return_lse": True},
    ),
    "packed": (
        "ampere", [meta(40, 2, 64)] * 3, {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS},
    ),
}  # fmt: skip
Spoil = Callable[[torch.Tensor, torch.Tensor | None], object]


@pytest.fixture
def replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, Spoil], tuple[int, str, str]]:
    """What `archflash replay` says of the plan of a call that a kernel serves right, or that is
    spoiled.
    """
    monkeypatch.setattr(replay, "torch", OnCpu())

    def run(name: str, spoil: Spoil) -> tuple[int, str, str]:
        kernel, tensors, options = REPLAYED[name]
        plan = native.plan(kernel, make_problem(*tensors, **options).as_if_on_cuda(), H200)
        assert isinstance(plan, native.LaunchPlan), plan
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan.to_dict()))

        def executed(plan: native.LaunchPlan, inputs: replay.Inputs) -> Any:
            given = {
                k: v for k, v in inputs.options.items() if k not in ("return_lse", "approximate")
            }
            out, lse = archflash.attention(
                inputs.q, inputs.k, inputs.v, **given, return_lse=True, implementation="torch"
            )
            spoil(out, lse)
            return (out, lse) if inputs.options["return_lse"] else out

        monkeypatch.setattr(replay, "run_plan", executed)
        status = main(["replay", str(file)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def nothing(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    pass


def wrong_out(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out *= 1.5


def wrong_lse(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    assert lse is not None
    lse += 1


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replayed_plan_is_compared_with_float64(
    replayed: Callable[[str, Spoil], tuple[int, str, str]], name: str
) -> None:
    status, out, err = replayed(name, nothing)
    assert (status, err) == (0, ""), out
    assert f"{REPLAYED[name][0]}: " in out
    assert "runs on H200" in out
    assert "WRONG" not in out
    status, out, _ = replayed(name, wrong_out)
    assert status == 1
    assert "WRONG" in out
    if REPLAYED[name][2].get("return_lse"):
        status, out, _ = replayed(name, wrong_lse)
        assert status == 1
        assert "log-sum-exp: WRONG" in out


def test_a_plan_that_is_too_large_for_the_gpu_is_refused(
    replayed: Callable[[str, Spoil], tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnCpu.cuda, "mem_get_info", lambda device: (99, 99))
    status, out, err = replayed("plain", nothing)
    assert (status, out) == (2, "")
    assert "its tensors take " in err
    assert err.endswith(" bytes, and cpu has 99\n")


def test_a_plan_of_a_call_with_a_cache_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    q, cache = meta(2, 1, 4, 64), meta(2, 64, 2, 64)
    lengths = meta(2, dtype=torch.int32)
    found = archflash.explain(q, cache, cache, cache_seqlens=lengths, layout="bnhd", device="H200")
    assert found.plan is not None
    (tmp_path / "plan.json").write_text(json.dumps(found.plan.to_dict()))
    assert main(["replay", str(tmp_path / "plan.json")]) == 2
    assert "is the plan of a call with a KV cache" in capsys.readouterr().err


# --- verify ---


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    told = {"free_bytes": str(8 << 30), "compute_mode": "default", "cudnn": "9"}
    monkeypatch.setattr(_machine, "ask", lambda index: told)
    return told


@pytest.mark.rest  # it wants machine code for that GPU
@pytest.mark.usefixtures("machine")
def test_the_jobs_of_a_gpu_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list", "--only", "first calls: ampere"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(" (")[0] for line in lines) == [
        f"first calls: ampere {dtype}" for dtype in sorted(native.describe("ampere").dtypes)
    ]
    assert all(line.endswith(" items)") for line in lines)


@pytest.mark.rest  # it wants machine code for that GPU
def test_a_gpu_in_exclusive_mode_gets_one_process_at_a_time(machine: dict[str, str]) -> None:
    arguments = SimpleNamespace(simulate=None, device=0, full=False)
    setup, told = verify_command.make_setup(arguments)
    assert (setup.gpu, setup.device, setup.memory, setup.alone) == (
        "H200",
        "cuda:0",
        8 << 30,
        False,
    )
    assert told is machine
    machine["compute_mode"] = _machine.ALONE
    assert verify_command.make_setup(arguments)[0].alone
    assert "hopper" in setup.kernels


def test_a_gpu_without_code_in_this_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_command, "kernels_on", lambda capability: ())
    arguments = SimpleNamespace(simulate=None, device=0, full=False)
    with pytest.raises(ValueError, match=r"no kernel of this build has code for H200 .*9\.0"):
        verify_command.make_setup(arguments)


@pytest.mark.rest  # it wants machine code for that GPU
@pytest.mark.usefixtures("machine")
def test_a_full_run_tells_what_was_not_launched_and_where_it_kept_the_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(self: Runner, jobs: list[Any]) -> None:
        for job in jobs:
            for item in job.items:
                self._add(job, item, status="ok", kernels=[])
            self.finished.add(job.name)

    monkeypatch.setattr(Runner, "run", run)
    assert main(["verify", "--full", "--only", "decoding: simt"]) == 0
    out = capsys.readouterr().out
    assert " kernels were not launched: " in out
    assert "kept in " in out
    # Where nothing can be kept, that is said before the work and after it.
    (tmp_path / "file").touch()
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path / "file"))
    assert main(["verify", "--only", "decoding: simt"]) == 0
    said = capsys.readouterr()
    assert "what is proved will not be kept" in said.err
    assert "the proof is not kept" in said.err
    assert "kept in " not in said.out


def test_an_interrupted_run_tells_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Runner, jobs: list[Any]) -> None:
        self._add(jobs[0], jobs[0].items[0], status="wrong", detail="off\nby one")
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", run)
    status = main(["verify", "--simulate", "H200", "--only", "first calls: simt"])
    assert status == verify_command.INTERRUPTED
    out = capsys.readouterr().out
    assert "first calls: simt bfloat16: 0 ok, 1 wrong, " in out
    assert "off by one" in out
    assert "WRONG: 0 of " in out


# --- what torch and the driver say ---


class Driver:
    """libcuda: one device, in a compute mode."""

    def __init__(self, mode: int, error: int = 0) -> None:
        self.mode, self.error = mode, error

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return self.error

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        assert attribute == 20
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.mode
        return 0


@pytest.mark.parametrize(
    ("driver", "said"),
    [(Driver(0), "default"), (Driver(3), _machine.ALONE), (Driver(7), "unknown"),
     (Driver(3, error=101), "unknown")],
)  # fmt: skip
def test_the_facts_of_a_gpu_have_its_compute_mode(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, said: str
) -> None:
    monkeypatch.setattr(_machine.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5, 9))
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = _machine.describe(0)
    assert (found["free_bytes"], found["memory_bytes"], found["sms"]) == ("5", "9", "132")
    assert found["compute_mode"] == said


def test_a_torch_that_does_not_open_the_gpu_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*command: Any, **how: Any) -> None:
        raise subprocess.TimeoutExpired("x", how["timeout"])

    monkeypatch.setattr(_machine.subprocess, "run", late)
    with pytest.raises(ValueError, match="torch does not open cuda:1 within 180 s"):
        _machine.ask(1)
    done = SimpleNamespace(
        returncode=0, stdout='a library speaks\n{"free_bytes": "7"}\n', stderr=""
    )
    monkeypatch.setattr(_machine.subprocess, "run", lambda *command, **how: done)
    assert _machine.ask(0) == {"free_bytes": "7"}
    done.returncode = 1
    with pytest.raises(ValueError, match="it said nothing"):
        _machine.ask(0)


class Nvml:
    """libnvidia-ml: GPUs by name, and their limits in milliwatts; None is an error."""

    def __init__(self, *gpus: tuple[str | None, int | None], broken: bool = False) -> None:
        self.gpus, self.broken, self.at = gpus, broken, 0

    def nvmlInit_v2(self) -> int:
        return int(self.broken)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        self.at = index
        return int(self.gpus[index][0] is None)

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = (self.gpus[self.at][0] or "").encode()
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, limit: Any) -> int:
        told = self.gpus[self.at][1]
        ctypes.cast(limit, ctypes.POINTER(ctypes.c_uint))[0] = told or 0
        return int(told is None)


@pytest.mark.parametrize(
    ("nvml", "said"),
    [(Nvml(("T4", 70_000), ("H200", 699_600)), "700 W"), (Nvml(("T4", 70_000)), "unknown"),
     (Nvml(("H200", None), ("H200", 600_000)), "600 W"), (Nvml((None, 1), ("H200", 5000)), "5 W"),
     (Nvml(("H200", 700_000), broken=True), "unknown"), (Nvml(), "unknown")],
)  # fmt: skip
def test_a_table_holds_for_a_power_limit(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, said: str
) -> None:
    monkeypatch.setattr(_calibrated.ctypes, "CDLL", lambda name: nvml)
    assert _calibrated.key_of(H200)["power"] == said


def test_a_machine_without_the_drivers_library_has_an_unknown_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(_calibrated.ctypes, "CDLL", missing)
    assert _calibrated.key_of(H200)["power"] == "unknown"


# --- devices ---


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver describes them, to what asks it."""
    of_driver.query_device.cache_clear()
    status = SimpleNamespace(usable=True, problem="", device_count=2)
    names = ("H200", "B200")
    monkeypatch.setattr(native, "driver_status", lambda: status)
    monkeypatch.setattr(native, "query_device", lambda index: find_device(names[index]))
    monkeypatch.setattr(_dispatch, "query_device", of_driver.query_device)
    yield
    of_driver.query_device.cache_clear()


@pytest.mark.usefixtures("two_gpus")
def test_the_devices_are_listed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "  cuda:0  H200" in out
    assert "  cuda:1  B200" in out
    assert "none: " not in out
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"no device cuda:{index} here: cuda:0 to cuda:1 are"):
            of_driver.query_device(index)


def test_a_simulated_gpu_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "H9000")
    q = torch.zeros(1, 1, 8, 16, dtype=torch.float16)
    with pytest.raises(archflash.ForcedImplementationError, match="H9000 is no GPU in the table"):
        archflash.attention(q, q, q, implementation="ampere")
