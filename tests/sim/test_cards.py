"""Whole kernels give on the simulator what a card gave for the same inputs."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_simulator_gives_what_the_card_gave(
    case: Case, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = json.loads(recording.read_text())
    with np.load(recording.with_suffix(".npz")) as arrays:
        card_out = recorded_rows(arrays[f"{case.name}/out"], DTYPES[case.dtype])
        card_lse = recorded_rows(arrays[f"{case.name}/lse"], torch.float32)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", DEVICES[about["gpu"]])
    tensors, options = case.call("cpu")
    run = sim.run(
        *tensors, implementation=case.implementation, mode="eager", return_lse=True, **options
    )
    here, there = launches(run.plan), about["plans"][case.name]
    same_code = [launch.pop("ptx") for launch in here] == [
        launch.pop("ptx", "") for launch in there
    ]
    assert here == there
    assert not run.report.findings
    assert run.lse is not None
    out, lse = case.rows(run.out).double(), run.lse.reshape(-1)[:: case.kept].double()
    assert out.isfinite().all()
    largest = card_out.abs().amax(dim=1, keepdim=True)
    assert worst_ulps(out, card_out, largest, case.dtype) <= ULPS[case.dtype]
    seen = card_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert worst_ulps(lse[seen], card_lse[seen], card_lse[seen].abs().clamp(min=1), "f32") <= 2
    if same_code:
        # The arithmetic of this card is known to the bit.
        assert torch.equal(out, card_out)
        assert torch.equal(lse, card_lse)


def test_inputs_have_the_bits_that_were_recorded() -> None:
    (q, k, v), options = CASES[4].call("cpu")
    assert bits(q).ravel()[:4].tolist() == [-16566, 16284, -16696, 16400]
    assert abs(float(k.float().mean())) < 0.05
    assert 0.9 < float(v.float().std()) < 1.4
    assert options["sinks"].dtype == torch.float32


def test_there_is_a_recording() -> None:
    assert RECORDINGS


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_count_in_ulp_of_the_dtype(dtype: str) -> None:
    card = torch.tensor([1.5, -3.0, 0.0], dtype=DTYPES[dtype])
    up = torch.nextafter(card[:1], card[:1] + 1)
    ours = torch.cat([up, card[1:]]).double()
    assert worst_ulps(ours, card.double(), torch.tensor(1.5).double(), dtype) == 1
    assert worst_ulps(ours, card.double(), torch.tensor(3.0).double(), dtype) == 0.5
