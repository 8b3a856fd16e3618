"""Attention on the simulator: the ways in, what a run reports, and the host's instruction sets.

What attention means is in tests/core_set, which runs on the simulator too.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash_sim as _simulator
from archflash import sim
from archflash.sim import _attention

from ..core_set.checks import assert_close
from ..core_set.executors import Simulator

SIMULATOR = Simulator()
SHARED_KILOBYTES = {"A100": 163, "RTX 4090": 99, "H200": 227, "RTX 5090": 99}  # for a CTA

# --- the public way in ---


def test_attention_runs_forced_kernels_on_the_simulator_and_says_so_once() -> None:
    _attention._announced.clear()
    q, k, v = (SIMULATOR.rand(1, 2, n, 32, seed=n) for n in (20, 30, 30))
    with pytest.warns(UserWarning, match="PTX simulator, as on A100"):
        out = archflash.attention(q, k, v, implementation="simt", causal=True)
    assert_close(out, None, q, k, v, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, lse = archflash.attention(
            q, k, v, implementation="simt", causal=True, return_lse=True
        )
        with archflash.force("simt"):
            assert torch.equal(archflash.attention(q, k, v, causal=True), out)
    assert torch.equal(again, out)
    assert lse.shape == (1, 2, 20)
    decision = archflash.explain(q, k, v, implementation="simt")
    assert "simulator" in decision.why
    assert decision.device is not None
    assert decision.device.name == "A100"
    assert archflash.explain(q, k, v).chosen == "torch"


def test_the_simulated_gpu_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = SIMULATOR.qkv(33, 65, 256, dtype="bfloat16")
    for name, kilobytes in SHARED_KILOBYTES.items():
        monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", name)
        run = sim.run(q, k, v, implementation="ampere", return_lse=True)
        assert run.plan.device.name == name
        assert run.plan.device.shared_per_block == kilobytes * 1024
        assert_close(run.out, run.lse, q, k, v)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "Riva 128")
    with pytest.raises(archflash.ForcedImplementationError, match="Riva 128"):
        archflash.attention(q, k, v, implementation="ampere")


def test_too_much_work_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    q = SIMULATOR.rand(1, 4, 4096, 64, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", "1")
    with pytest.raises(archflash.LaunchError, match=r"more than the limit of 1 s.*SIM_LIMIT"):
        archflash.attention(q, q, q, implementation="simt")


@pytest.mark.parametrize("given", ["soon", "nan", "-NaN", "-1", "-inf", "60 s", " "])
def test_a_limit_that_is_no_number_of_seconds_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = SIMULATOR.rand(1, 1, 8, 16, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", given)
    with pytest.raises(ValueError, match=f"ARCHFLASH_SIM_LIMIT={given} is no number of seconds"):
        archflash.attention(q, q, q, implementation="simt")


@pytest.mark.parametrize("given", ["inf", "1e400", "", "0.5"])
def test_a_limit_may_be_any_number_of_seconds_or_none(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = SIMULATOR.rand(1, 1, 8, 16, seed=0)
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", given)
    assert archflash.attention(q, q, q, implementation="simt").isfinite().all()
    assert _attention.limit_seconds() == {"": 60.0, "0.5": 0.5}.get(given, math.inf)


def test_reports_count_instructions_transactions_conflicts_and_waits() -> None:
    q = SIMULATOR.rand(1, 1, 64, 64, seed=0, dtype="bfloat16")
    report = sim.run(q, q, q, implementation="ampere").report
    assert report.ctas == 1
    assert report.instructions["matrix"] > 0
    assert report.total_instructions == sum(report.instructions.values())
    assert report.transactions["global"] >= 4 * 64 * 64 * 2 / 32
    assert report.transactions["shared"] > 0
    loads = {name: counts for name, counts in report.bank_conflicts.items() if "ldmatrix" in name}
    assert loads
    # The swizzle is there for this.
    assert all(wavefronts == ideal for wavefronts, ideal in loads.values())
    assert report.barrier_waits > 0
    assert "ldmatrix" in str(report.opcodes)


@pytest.mark.parametrize(
    ("implementation", "device"),
    [("ampere", "A100"), ("ada", "H100"), ("blackwell_consumer", "RTX 5090")],
)
@pytest.mark.parametrize(("rows", "keys", "options"), [(5, 7, {}), (70, 9, {"q_offset": -40})])
def test_rows_that_pass_through_q_wait_for_all_that_read_it(
    implementation: str, device: str, rows: int, keys: int, options: dict[str, int]
) -> None:
    q, k = torch.randn(1, 2, rows, 64).half(), torch.randn(1, 1, keys, 64).half()
    run = sim.run(q, k, k, implementation=implementation, device=device, causal=True, **options)
    assert not run.report.findings, run.report


def test_an_approximate_call_is_simulated_too() -> None:
    q, k, v = SIMULATOR.qkv(20, 70, dtype="float16", heads=(2, 1))
    out = archflash.attention(q, k, v, implementation="ada", approximate="int8_qk")
    exact = archflash.attention(q, k, v, implementation="ada")
    assert not torch.equal(out, exact)
    assert (out - exact).abs().max() < 0.1


# --- the host's instruction sets ---


@pytest.mark.parametrize("kernel", SIMULATOR.kernels())
def test_code_for_any_x86_gives_the_bits_of_avx2(kernel: str) -> None:
    """In one type: sim/vectors/test_silicon.py has the instructions of the others."""
    dtype = SIMULATOR.dtypes_of(kernel)[0 if kernel == "simt" else -1]
    q, k, v = SIMULATOR.qkv(70, 150, dtype=dtype)
    call: dict[str, Any] = {"causal": True, "softcap": 5.0, "sinks": SIMULATOR.rand(2, seed=4)}
    out, lse = SIMULATOR.attend_and_check(kernel, q, k, v, schedules=[2], **call)
    if not _simulator.uses_avx2():
        pytest.skip("this machine has no AVX2")
    _attention.find_program.cache_clear()  # handlers are chosen when PTX is loaded
    _simulator.set_avx2(False)
    try:
        assert not _simulator.uses_avx2()
        plain, plain_lse = SIMULATOR.attend(kernel, q, k, v, schedules=[2], **call)
    finally:
        _simulator.set_avx2(True)
        _attention.find_program.cache_clear()
    assert torch.equal(plain, out)
    assert torch.equal(plain_lse, lse)
