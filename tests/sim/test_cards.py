"""Whole kernels give on the simulator what a card gave for the same inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archflash import sim

from .cards.cases import CASES, DTYPES, Case, bits
from .cards.record import launches

RECORDINGS = sorted((Path(__file__).parent / "cards").glob("*.json"))
# The card's name in the table of known GPUs, whose plan is the recorded one.
DEVICES = {"NVIDIA H200": "H200"}
# How many ulp of the output's dtype, at the magnitude of the row's largest |O|.
ULPS = {"f16": 2, "bf16": 2, "f32": 2}
MANTISSA_BITS = {"f16": 10, "bf16": 7, "f32": 23}
SMALLEST_EXPONENT = {"f16": -14, "bf16": -126, "f32": -126}


def ulp(size: Tensor, dtype: str) -> Tensor:
    """The spacing of a dtype's numbers at magnitudes `size` (float64)."""
    exponent = torch.frexp(size).exponent - 1
    return torch.exp2(exponent.clamp(min=SMALLEST_EXPONENT[dtype]) - MANTISSA_BITS[dtype]).double()


def recorded_rows(bits_of: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits_of).view(dtype).double()


def worst_ulps(ours: Tensor, card: Tensor, sizes: Tensor, dtype: str) -> float:
    """The largest difference in ulp at `sizes`; both -inf, or both 0, are no difference."""
    same = ours == card
    ratio = torch.where(same, 0.0, (ours - card).abs() / ulp(sizes, dtype))
    return float(ratio.max())


def simulated(case: Case, gpu: str, monkeypatch: pytest.MonkeyPatch) -> sim.Run:
    """The case's call as it is planned for a card.

    When the recordings were made, no tile had rows of several heads. Heads of k and v are therefore
    repeated for each head of q that shares them, so that there is nothing to pack.
    """
    device = DEVICES[gpu]
    if case.implementation == "simt" and device == "H200":
        # It was recorded before fp32 had tensor cores on 9.0. The kernels on CUDA cores are the
        # same for every GPU; this one has as much shared memory, and SMs enough for large tiles.
        device = "Jetson Thor"
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", device)
    tensors, options = case.call("cpu")
    heads_q, heads_kv = case.heads
    axis = 2 if options.get("layout") == "bnhd" else 1
    q, *kv = tensors
    tensors = [q, *(x.repeat_interleave(heads_q // heads_kv, axis) for x in kv)]
    run = sim.run(
        *tensors, implementation=case.implementation, mode="eager", return_lse=True, **options
    )
    assert not run.report.findings
    return run


def compare(
    case: Case,
    run: sim.Run,
    there: list[dict[str, Any]],
    card_out: np.ndarray[Any, Any],
    card_lse: np.ndarray[Any, Any],
) -> None:
    """Compares a run with what a card gave: bit for bit if the card ran the same PTX, by its hash.

    If it ran another kernel, or the recording does not say which, the last bits may differ.

    Args:
        case: the call.
        run: on the simulator.
        there: what the card launched.
        card_out: the bits of the recorded rows.
        card_lse: the bits of the recorded log-sum-exps.

    Raises:
        AssertionError: they differ.
    """
    here = launches(run.plan)
    same_code = all(a["ptx"] == b.get("ptx") for a, b in zip(here, there, strict=True))
    for ours, recorded in zip(here, there, strict=True):
        if ours["kernel"] == recorded["kernel"]:  # else plans have changed since
            assert ours | {"ptx": ""} == recorded | {"ptx": ""}
    assert run.lse is not None
    out_rows, lse_rows = case.rows(run.out), run.lse.reshape(-1)[:: case.kept]
    if same_code:
        assert np.array_equal(bits(out_rows), card_out), "other bits of the output"
        assert np.array_equal(bits(lse_rows), card_lse), "other bits of the log-sum-exp"
    out, lse = out_rows.double(), lse_rows.double()
    expected = recorded_rows(card_out, DTYPES[case.dtype])
    expected_lse = recorded_rows(card_lse, torch.float32)
    assert out.isfinite().all()
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert worst_ulps(out, expected, largest, case.dtype) <= ULPS[case.dtype]
    seen = expected_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    sizes = expected_lse[seen].abs().clamp(min=1)
    assert worst_ulps(lse[seen], expected_lse[seen], sizes, "f32") <= 2


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_simulator_gives_what_the_card_gave(
    case: Case, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = json.loads(recording.read_text())
    with np.load(recording.with_suffix(".npz")) as arrays:
        card_out, card_lse = arrays[f"{case.name}/out"], arrays[f"{case.name}/lse"]
    run = simulated(case, about["gpu"], monkeypatch)
    compare(case, run, about["plans"][case.name], card_out, card_lse)


@pytest.mark.parametrize("operand", ["out", "lse"])
def test_one_bit_counts_where_the_ptx_is_the_recorded_one_only(
    operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == "ampere-f16-d80-dv40-q-offset")
    run = simulated(case, "NVIDIA H200", monkeypatch)
    assert run.lse is not None
    there = launches(run.plan)
    assert all(re.fullmatch("[0-9a-f]{16}", launch["ptx"]) for launch in there)
    card = {
        "out": bits(case.rows(run.out)).copy(),
        "lse": bits(run.lse.reshape(-1)[:: case.kept]).copy(),
    }
    compare(case, run, there, card["out"], card["lse"])
    card[operand].reshape(-1)[0] ^= 1  # the last bit: less than the ulp that are allowed
    with pytest.raises(AssertionError, match="other bits"):
        compare(case, run, there, card["out"], card["lse"])
    for other in ("0" * 16, None):
        changed = [launch | {"ptx": other} for launch in there]
        compare(case, run, changed, card["out"], card["lse"])
    del there[0]["ptx"]
    compare(case, run, there, card["out"], card["lse"])


def test_inputs_have_the_bits_that_were_recorded() -> None:
    (q, k, v), options = CASES[4].call("cpu")
    assert bits(q).ravel()[:4].tolist() == [-16566, 16284, -16696, 16400]
    assert abs(float(k.float().mean())) < 0.05
    assert 0.9 < float(v.float().std()) < 1.4
    assert options["sinks"].dtype == torch.float32


def test_there_is_a_recording() -> None:
    assert RECORDINGS


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_says_which_ptx_ran(recording: Path) -> None:
    plans = json.loads(recording.read_text())["plans"]
    assert all("ptx" in launch for plan in plans.values() for launch in plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_count_in_ulp_of_the_dtype(dtype: str) -> None:
    card = torch.tensor([1.5, -3.0, 0.0], dtype=DTYPES[dtype])
    up = torch.nextafter(card[:1], card[:1] + 1)
    ours = torch.cat([up, card[1:]]).double()
    assert worst_ulps(ours, card.double(), torch.tensor(1.5).double(), dtype) == 1
    assert worst_ulps(ours, card.double(), torch.tensor(3.0).double(), dtype) == 0.5
