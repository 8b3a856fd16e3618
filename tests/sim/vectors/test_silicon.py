"""The simulator against an H200: every program of programs.py and the results recorded there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from archflash import _archflash_sim, sim
from tests.many_cases import check_all

from . import silicon
from .inputs import Words
from .programs import BLOCK, FAMILIES, Program, programs
from .record import NAMES
from .silicon import Recording

ALL = [program for family in FAMILIES for program in programs(family)]
SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}  # integer types of PyTorch


@pytest.fixture(scope="session")
def recording() -> Recording:
    """The card's results."""
    return silicon.load()


def key_of(program: Program) -> str:
    return program.key


def inputs_of(program: Program) -> list[Words]:
    """A program's input buffers."""
    return [program.input(i) for i in range(len(program.reads))]


def simulated(program: Program, inputs: list[Words], device: str = "H200") -> list[Words]:
    """All results of a program on the simulator, for as many threads as the inputs have."""
    count = inputs[0].size
    reads = [
        torch.from_numpy(value.astype(NAMES[operand.bits]).view(SIGNED[operand.bits]))
        for value, operand in zip(inputs, program.reads, strict=True)
    ]
    writes = [torch.from_numpy(np.zeros(count, SIGNED[operand.bits])) for operand in program.writes]
    grid = (count // BLOCK, 1, 1)
    arguments = [*reads, *writes]
    loaded = sim.load(program.ptx())
    sim.launch(
        loaded, "vector", arguments, grid=grid, block=(BLOCK, 1, 1), race_check=False, device=device
    )
    return [write.numpy().view(NAMES[8 * write.element_size()]) for write in writes]


@pytest.mark.parametrize("program", ALL, ids=key_of)
def test_the_simulator_gives_what_the_card_gave(program: Program, recording: Recording) -> None:
    inputs = inputs_of(program)
    recording.compare(program, simulated(program, inputs), inputs)


@contextlib.contextmanager
def avx2(enabled: bool) -> Iterator[None]:
    """With the code for AVX2, or for any processor."""
    was = _archflash_sim.uses_avx2()
    _archflash_sim.set_avx2(enabled)
    try:
        yield
    finally:
        _archflash_sim.set_avx2(was)


# One program of each three; `make test-rest` has all.
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.rest)])
@pytest.mark.parametrize("family", FAMILIES)
def test_code_without_avx2_gives_what_the_card_gave(
    family: str, step: int, recording: Recording
) -> None:
    def check(program: Program) -> None:
        count = min(program.explicit, program.count)
        recording.compare(program, simulated(program, [x[:count] for x in inputs_of(program)]))

    with avx2(False):
        check_all(programs(family)[::step], check, key_of)


def test_a_changed_program_is_noticed(recording: Recording) -> None:
    program = ALL[0]
    hashes = {program.key: " ".join(3 * ["0" * 16])}
    changed = Recording(recording.about, hashes, recording.outputs)
    with pytest.raises(AssertionError, match="another text"):
        changed.compare(program, simulated(program, inputs_of(program)))


@pytest.mark.parametrize("element", [0, -1], ids=["first", "last"])
def test_one_wrong_bit_is_noticed(recording: Recording, element: int) -> None:
    program = next(program for program in ALL if program.name == "add.rn.f32")
    results = [result.copy() for result in simulated(program, inputs_of(program))]
    results[0][element] ^= 1
    with pytest.raises(AssertionError, match="differ"):
        recording.compare(program, results)


def test_a_result_out_of_its_bound_is_noticed(recording: Recording) -> None:
    program = next(program for program in ALL if program.name == "sqrt.approx.f32")
    results = [result.copy() for result in simulated(program, inputs_of(program))]
    numbers = silicon.values(program.elements, results[0])
    index = int(np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) > 1))[0])
    results[0][index] += 1000
    with pytest.raises(AssertionError, match="1 of 2048 differ within 1 ulp, 1000 ulp at most"):
        recording.compare(program, results)
