"""Which implementation serves a call on each compute capability, what is said, and forcing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _dispatch
from archflash._api import find_device, make_problem

PTX = "compute_75 PTX, compiled by the driver at first use"

# Each capability: a GPU of the table to start from, and the code that simt runs there.
CAPABILITIES = {
    (7, 5): ("T4", "sm_75"),
    (8, 0): ("A100", "sm_80"),
    (8, 6): ("RTX 3090", "sm_80"),
    (8, 7): ("Jetson AGX Orin", "sm_80"),
    (8, 9): ("L4", "sm_80"),
    (9, 0): ("H100", "sm_90"),
    (10, 0): ("B200", "sm_100"),
    (10, 3): ("B300", "sm_100"),
    (10, 7): ("B300", "sm_100"),
    (11, 0): ("Jetson Thor", PTX),
    (12, 0): ("RTX 5090", "sm_120"),
    (12, 1): ("GB10", "sm_120"),
    (13, 0): ("B300", PTX),
}
# The newest capability that PyTorch's fused kernels are built for.
PYTORCH_ENDS = (12, 1)


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


every_capability = pytest.mark.parametrize("capability", CAPABILITIES, ids=dotted)


def gpu(capability: tuple[int, int]) -> native.Device:
    facts = find_device(CAPABILITIES[capability][0]).to_dict()
    major, minor = capability
    name = f"GPU {dotted(capability)}"
    return native.Device.from_dict(facts | {"name": name, "major": major, "minor": minor})


def problem(
    dtype: torch.dtype = torch.float32,
    *,
    d: int = 64,
    nq: int = 128,
    nk: int = 128,
    grad: bool = False,
    **options: Any,
) -> native.Problem:
    """A call of 2 batches and 4 heads, as if on a GPU."""
    q = torch.empty(2, 4, nq, d, dtype=dtype, device="meta", requires_grad=grad)
    k = torch.empty(2, 4, nk, d, dtype=dtype, device="meta")
    return make_problem(q, k, k, **options).as_if_on_cuda()


def packed(dtype: torch.dtype = torch.float16) -> native.Problem:
    q = torch.empty(100, 4, 64, dtype=dtype, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    return make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends).as_if_on_cuda()


def sinks() -> torch.Tensor:
    return torch.empty(4, device="meta")


# --- the choice ---


@every_capability
def test_float32_is_served_by_simt_with_native_code(capability: tuple[int, int]) -> None:
    decision = _dispatch.select(problem(), gpu(capability))
    assert decision.chosen == "simt"
    assert decision.plan is not None
    assert decision.plan.implementation == "simt"
    assert decision.plan.code == CAPABILITIES[capability][1]
    assert decision.plan.device.capability == capability
    assert decision.reasons == {"torch": ["simt is expected to be faster"]}
    assert not decision.fallback


@every_capability
def test_only_thor_and_the_future_run_ptx(capability: tuple[int, int]) -> None:
    plan = _dispatch.select(problem(), gpu(capability)).plan
    assert plan is not None
    needs_driver_compiler = plan.code.startswith("compute_")
    assert needs_driver_compiler == (capability in [(11, 0), (13, 0)])


@every_capability
def test_plain_float16_goes_to_pytorch_where_its_fused_kernels_reach(
    capability: tuple[int, int],
) -> None:
    decision = _dispatch.select(problem(torch.float16), gpu(capability))
    if capability > PYTORCH_ENDS:
        assert decision.chosen == "simt"
        assert decision.reasons == {"torch": ["simt is expected to be faster"]}
        return
    assert decision.chosen == "torch"
    assert decision.plan is None
    assert not decision.fallback
    assert "tensor cores" in decision.why
    (reason,) = decision.reasons["simt"]
    assert reason.startswith("it leaves the tensor cores unused: ")


@every_capability
def test_plain_bfloat16_goes_to_pytorch_from_8_0_on(capability: tuple[int, int]) -> None:
    decision = _dispatch.select(problem(torch.bfloat16), gpu(capability))
    fused = (8, 0) <= capability <= PYTORCH_ENDS
    assert decision.chosen == ("torch" if fused else "simt")
    assert not decision.fallback


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda dtype: problem(dtype, sinks=sinks()), id="sinks"),
        pytest.param(lambda dtype: problem(dtype, softcap=30.0), id="softcap"),
        pytest.param(lambda dtype: problem(dtype, return_lse=True), id="lse"),
        pytest.param(packed, id="cu_seqlens"),
    ],
)
@every_capability
def test_what_pytorch_does_unfused_goes_to_simt(
    capability: tuple[int, int],
    make: Callable[[torch.dtype], native.Problem],
    dtype: torch.dtype,
) -> None:
    decision = _dispatch.select(make(dtype), gpu(capability))
    assert decision.chosen == "simt"
    assert decision.plan is not None
    assert decision.plan.code == CAPABILITIES[capability][1]


def test_grouped_heads_leave_the_only_fused_kernel_of_a_t4() -> None:
    """On 7.5 PyTorch has the memory-efficient kernel alone, and that takes no grouped heads."""
    q = torch.empty(2, 8, 128, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, 2, 128, 64, dtype=torch.float16, device="meta")
    grouped = make_problem(q, k, k).as_if_on_cuda()
    assert _dispatch.select(grouped, gpu((7, 5))).chosen == "simt"
    assert _dispatch.select(grouped, gpu((8, 0))).chosen == "torch"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(
            lambda: problem(torch.float8_e4m3fn),
            "dtype float8_e4m3fn: simt takes float32, float16 and bfloat16",
            id="fp8",
        ),
        pytest.param(
            lambda: problem(torch.float64),
            "dtype float64: simt takes float32, float16 and bfloat16",
            id="float64",
        ),
        pytest.param(
            lambda: problem(attn_mask=torch.empty(2, 4, 128, 128, dtype=torch.bool, device="meta")),
            "attn_mask: simt has causal and window masks only",
            id="mask",
        ),
        pytest.param(lambda: problem(grad=True), "no backward", id="grad"),
        pytest.param(
            lambda: problem(out_dtype=torch.float16),
            "out_dtype float16 with float32 inputs",
            id="out_dtype",
        ),
    ],
)
@every_capability
def test_what_no_kernel_serves_falls_back_to_torch_with_the_reason(
    capability: tuple[int, int], make: Callable[[], native.Problem], reason: str
) -> None:
    decision = _dispatch.select(make(), gpu(capability))
    assert decision.chosen == "torch"
    assert decision.fallback
    assert decision.plan is None
    assert decision.why == "no kernel of archflash serves this call"
    assert any(reason in said for said in decision.reasons["simt"])
    assert all("torch" in said for said in decision.reasons["simt"])  # what to do


@every_capability
def test_no_decision_ever_says_no_kernel_image(capability: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16, torch.float8_e5m2):
        assert "no kernel image" not in str(_dispatch.select(problem(dtype), gpu(capability)))


def test_a_gpu_older_than_every_target_is_told_what_the_build_serves() -> None:
    facts = find_device("T4").to_dict() | {"name": "V100", "major": 7, "minor": 0}
    decision = _dispatch.select(problem(), native.Device.from_dict(facts))
    assert decision.chosen == "torch"
    assert decision.fallback
    (reason,) = decision.reasons["simt"]
    assert reason == (
        "compute capability 7.0 (V100): simt is built for "
        "sm_75, sm_80, sm_90, sm_100, sm_120, compute_75"
    )


def test_tensors_on_the_cpu_go_to_torch_and_say_what_to_do() -> None:
    decision = archflash.explain(*[torch.randn(1, 2, 3, 8)] * 3)
    assert decision.chosen == "torch"
    assert decision.device is None
    assert not decision.fallback
    assert decision.reasons == {"simt": ["q, k and v are on the CPU: move them to a CUDA device"]}


# --- what is printed ---


def test_a_decision_reads_like_a_report() -> None:
    text = str(_dispatch.select(problem(causal=True), find_device("H200")))
    lines = text.splitlines()
    assert lines[0] == (
        "float32, batch 2, heads 4, 128 queries, 128 keys, head dim 64, causal "
        "on H200 (compute capability 9.0, 132 SMs)"
    )
    assert lines[1].startswith("  chosen  simt: exact fp32 attention on CUDA cores")
    assert "          code: sm_90" in lines
    (launch,) = [line for line in lines if line.startswith("          launch: ")]
    plan = _dispatch.select(problem(causal=True), find_device("H200")).plan
    assert plan is not None
    (step,) = plan.to_dict()["launches"]
    assert f"{step['kernel']}, grid {step['grid'][0]}, block {step['block'][0]}" in launch
    assert f"{step['shared_bytes']} bytes of shared memory" in launch
    assert lines[-1] == "  not     torch: simt is expected to be faster"


def test_a_problem_is_described_with_all_its_features() -> None:
    given = problem(
        torch.bfloat16, causal=True, window=(3, None), softcap=2.0, sinks=sinks(), return_lse=True
    )
    assert _dispatch.describe_problem(given) == (
        "bfloat16, batch 2, heads 4, 128 queries, 128 keys, head dim 64, "
        "causal, window, softcap, sinks, LSE"
    )
    assert _dispatch.describe_problem(packed()) == (
        "float16, 3 sequences packed into q (100, 4, 64) k (100, 4, 64) v (100, 4, 64)"
    )


# --- forcing ---


@every_capability
def test_a_forced_kernel_is_what_is_planned(capability: tuple[int, int]) -> None:
    decision = _dispatch.select(problem(torch.float16), gpu(capability), "simt")
    assert decision.chosen == "simt"
    assert decision.why == "it is forced"
    assert decision.plan is not None
    assert decision.plan.implementation == "simt"
    assert decision.plan.code == CAPABILITIES[capability][1]


def test_torch_can_be_forced_where_a_kernel_would_serve() -> None:
    decision = _dispatch.select(problem(), find_device("H200"), "torch")
    assert (decision.chosen, decision.plan, decision.fallback) == ("torch", None, False)


def test_a_forced_kernel_that_cannot_serve_raises_with_every_reason() -> None:
    given = problem(
        d=44, grad=True, attn_mask=torch.empty(128, 128, dtype=torch.bool, device="meta")
    )
    with pytest.raises(archflash.ForcedImplementationError) as caught:
        _dispatch.select(given, find_device("H200"), "simt")
    message = str(caught.value)
    assert message.startswith("simt is forced, but cannot serve float32, batch 2, heads 4")
    for reason in ("head_dim 44: ", "value head_dim 44: ", "attn_mask: ", "no backward: "):
        assert f"\n  {reason}" in message
    automatic = _dispatch.select(given, find_device("H200")).reasons["simt"]
    assert message.splitlines()[1:] == [f"  {reason}" for reason in automatic]


def test_a_forced_kernel_never_substitutes_on_the_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(archflash.ForcedImplementationError, match="on the CPU: move them"):
        archflash.attention(q, q, q, implementation="simt")
    with (
        archflash.force("simt"),
        pytest.raises(archflash.ForcedImplementationError, match="simt is forced"),
    ):
        archflash.attention(q, q, q)


@pytest.mark.parametrize("name", ["blackwell", "SIMT", "", 7, None], ids=repr)
def test_force_refuses_an_unknown_name_and_lists_the_known_ones(name: Any) -> None:
    with (
        pytest.raises(archflash.ForcedImplementationError) as caught,
        archflash.force(name),
    ):
        pass
    assert str(caught.value) == (
        f"no implementation is called {name!r}: this build has simt, torch"
    )


def test_an_unknown_name_as_argument_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(archflash.ForcedImplementationError, match=r"'fermi'.* has simt, torch"):
        archflash.attention(q, q, q, implementation="fermi")
    with pytest.raises(archflash.ForcedImplementationError, match="'fermi'"):
        archflash.explain(q, q, q, implementation="fermi", device="H200")


def test_a_forced_folder_without_kernels_was_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "targets", lambda name: [])
    with pytest.raises(archflash.NotCompiledError) as caught:
        _dispatch.select(problem(), find_device("H200"), "simt")
    assert str(caught.value) == (
        "simt is forced, but this build left it out: build again with ARCHFLASH_ARCHS=all"
    )


def test_force_nests_and_is_undone_after_an_error() -> None:
    assert _dispatch.forced() is None
    with archflash.force("simt"):
        with archflash.force("torch"):
            assert _dispatch.forced() == "torch"
        assert _dispatch.forced() == "simt"
        with pytest.raises(RuntimeError, match="inside"), archflash.force("torch"):
            raise RuntimeError("inside")
        assert _dispatch.forced() == "simt"
    assert _dispatch.forced() is None


def test_force_in_one_thread_leaves_the_others_alone() -> None:
    inside: list[object] = []
    outside: list[object] = []
    entered, seen = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)

    def forcing() -> None:
        with archflash.force("simt"):
            entered.wait()
            seen.wait()
            inside.append(_dispatch.forced())

    def free() -> None:
        entered.wait()
        outside.append(_dispatch.forced())
        q = torch.ones(1, 1, 2, 8)
        outside.append(bool((archflash.attention(q, q, q) == 1).all()))
        seen.wait()

    threads = [threading.Thread(target=work) for work in (forcing, free)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert inside == ["simt"]
    assert outside == [None, True]


def test_the_argument_beats_force() -> None:
    q = torch.ones(1, 1, 2, 8)
    with archflash.force("simt"):
        assert archflash.explain(q, q, q, implementation="torch", device="H200").chosen == "torch"
        assert torch.equal(archflash.attention(q, q, q, implementation="torch"), q)
    with archflash.force("torch"):
        assert archflash.explain(q, q, q, implementation="simt", device="H200").chosen == "simt"
        assert archflash.explain(q, q, q, device="H200").chosen == "torch"


def run_python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_force_and_the_argument_beat_the_environment() -> None:
    code = """
import torch, archflash
q = torch.ones(1, 1, 2, 8)
chosen = lambda **options: archflash.explain(q, q, q, device="H200", **options).chosen
print(chosen(), chosen(implementation="simt"))
with archflash.force("simt"):
    print(chosen(), chosen(implementation="torch"))
"""
    said = run_python(code, ARCHFLASH_FORCE_IMPLEMENTATION="torch").split()
    assert said == ["torch", "simt", "simt", "torch"]


def test_an_unknown_name_in_the_environment_refuses_calls_not_the_import() -> None:
    code = """
import torch, archflash
q = torch.ones(1, 1, 2, 8)
try:
    archflash.attention(q, q, q)
except archflash.ForcedImplementationError as error:
    print(error)
"""
    said = run_python(code, ARCHFLASH_FORCE_IMPLEMENTATION="fermi").strip()
    assert said == "no implementation is called 'fermi': this build has simt, torch"


# --- falling back aloud ---


@pytest.fixture
def on_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """decide() sees an A100, and nothing has been said yet."""
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: find_device("A100"))
    monkeypatch.setattr(_dispatch, "_noted", set())
    monkeypatch.delenv("ARCHFLASH_FALLBACK", raising=False)


def warned(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("on_an_a100")
def test_a_fallback_warns_once_per_reason() -> None:
    first = warned(lambda: _dispatch.decide(problem(grad=True), 0, None))
    assert len(first) == 1
    assert first[0].startswith("archflash: PyTorch serves this call. simt: no backward:")
    assert warned(lambda: _dispatch.decide(problem(grad=True, nq=64), 0, None)) == []
    second = warned(lambda: _dispatch.decide(problem(torch.float64), 0, None))
    assert [text.partition(": simt takes")[0] for text in second] == [
        "archflash: PyTorch serves this call. simt: dtype float64"
    ]
    both = warned(lambda: _dispatch.decide(problem(d=44, grad=True), 0, None))
    assert len(both) == 2  # the head dims of q and v are new, the gradient is not


@pytest.mark.usefixtures("on_an_a100")
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        pytest.param(problem, True, id="a kernel serves"),
        pytest.param(lambda: problem(torch.float16), False, id="PyTorch is faster"),
    ],
)
def test_a_choice_that_is_no_fallback_is_silent(
    make: Callable[[], native.Problem], plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    given = make()
    assert warned(lambda: _dispatch.decide(given, 0, None)) == []
    assert (_dispatch.decide(given, 0, None) is not None) == plan


@pytest.mark.usefixtures("on_an_a100")
def test_fallback_error_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    for _ in range(2):  # every time, not only the first
        with pytest.raises(archflash.UnsupportedError) as caught:
            _dispatch.decide(problem(grad=True), 0, None)
        assert "ARCHFLASH_FALLBACK=error: simt: no backward" in str(caught.value)
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "warn")
    assert len(warned(lambda: _dispatch.decide(problem(grad=True), 0, None))) == 1


def test_tensors_on_the_cpu_are_served_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_noted", set())
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    native.clear_cache()
    assert warned(lambda: archflash.attention(q, q, q)) == []


# --- the driver ---


class FakeDriver:
    """What the runtime says of the driver, and /proc's word on its version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.version_file = monkeypatch, folder / "version"
        monkeypatch.setattr(_dispatch, "Path", lambda name: self.version_file)

    def says(self, problem: str, cuda_version: int, version_text: str = "") -> None:
        status = SimpleNamespace(
            usable=not problem, problem=problem, cuda_version=cuda_version, device_count=0
        )
        if version_text:
            self.version_file.write_text(version_text)
        self.monkeypatch.setattr(native, "driver_status", lambda: status)
        _dispatch.driver_problem.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    yield FakeDriver(monkeypatch, tmp_path)
    monkeypatch.undo()
    _dispatch.driver_problem.cache_clear()


VERSION_TEXT = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n"
    "GCC version:  gcc version 12.2.0\n"
)


def test_an_old_driver_is_named_with_its_version_and_the_fix(driver: FakeDriver) -> None:
    driver.says("the NVIDIA driver is too old", 12040, VERSION_TEXT)
    sentence = "driver 550.90.07 is older than 580: update it"
    assert _dispatch.driver_problem() == sentence
    device, obstacle = _dispatch.device_of(problem(), 0)
    assert obstacle == sentence
    decision = _dispatch.select(problem(), device, None, obstacle)
    assert decision.chosen == "torch"
    assert decision.fallback
    assert decision.reasons == {"simt": [sentence]}
    with pytest.raises(archflash.ForcedImplementationError) as caught:
        _dispatch.select(problem(), device, "simt", obstacle)
    assert str(caught.value) == f"simt is forced, but {sentence}"


def test_an_old_driver_without_a_version_file_is_named_by_its_cuda(driver: FakeDriver) -> None:
    driver.says("the NVIDIA driver is too old", 12040)
    assert _dispatch.driver_problem() == "driver for CUDA 12.4 is older than 580: update it"


def test_another_driver_problem_is_passed_on_as_it_is(driver: FakeDriver) -> None:
    driver.says("no NVIDIA GPU on this machine", 13000)
    assert _dispatch.driver_problem() == "no NVIDIA GPU on this machine"
    driver.says("", 13000)
    assert _dispatch.driver_problem() is None


def test_asking_for_a_cuda_device_without_a_driver_names_the_way_out(driver: FakeDriver) -> None:
    driver.says("no NVIDIA driver on this machine", 0)
    q = torch.empty(1, 2, 3, 8, device="meta")
    for device in ("cuda:0", 0, torch.device("cuda", 1)):
        with pytest.raises(ValueError, match="no NVIDIA driver on this machine; name a GPU from"):
            archflash.explain(q, q, q, device=device)


def test_an_unknown_gpu_name_lists_the_known_ones() -> None:
    q = torch.empty(1, 2, 3, 8, device="meta")
    with pytest.raises(
        ValueError, match=r"'RTX 9090' in the table of known ones: T4, A100, .*GB10"
    ):
        archflash.explain(q, q, q, device="RTX 9090")
