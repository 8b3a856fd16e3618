"""The recorded results of a card for the programs of this folder, and how results are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .inputs import Words
from .programs import FAMILIES, Bound, Program, programs
from .record import NAMES, inputs_hash, outputs_hash, text_hash

FOLDER = Path(__file__).resolve().parent
LABEL = "h200"

Raw = npt.NDArray[np.generic]
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FIELDS = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23), "f64": (64, 52)}  # bits, mantissa bits


@dataclass(frozen=True)
class Recording:
    """One run of record.py.

    Attributes:
        about: What was used: gpu, driver, cuda, date.
        hashes: For each program's key the hashes of its text, its inputs and all of its outputs.
        outputs: For each program's key the first elements of each output buffer, raw bits.
    """

    about: dict[str, str]
    hashes: dict[str, str]
    outputs: dict[str, list[Raw]]

    def compare(
        self, program: Program, results: list[Words], inputs: list[Words] | None = None
    ) -> None:
        """Compares a program's results with the card's.

        Args:
            program: The program.
            results: Its output buffers from the start, as raw bits: all of each, or as many
                elements as are stored.
            inputs: The whole input buffers. If given, they must be those that were recorded.

        Raises:
            AssertionError: The program or its inputs are not those that were recorded, or a result
                is not within the program's bound of the card's.
        """
        of_text, of_inputs, of_outputs = self.hashes[program.key].split()
        assert text_hash(program) == of_text, "recorded from another text: record it anew"
        if inputs is not None:
            assert inputs_hash(program, inputs) == of_inputs, "recorded from other inputs"
        narrow = [
            result.astype(NAMES[operand.bits])
            for result, operand in zip(results, program.writes, strict=True)
        ]
        for result, expected in zip(narrow, self.outputs[program.key], strict=True):
            _compare(program, result[: expected.size], expected)
        if program.bound is None and narrow[0].size == program.count:
            same = outputs_hash(narrow) == of_outputs
            assert same, f"{program.key}: a result differs beyond the first {program.explicit}"


def _compare(program: Program, actual: Raw, expected: Raw) -> None:
    if program.bound is None:
        wrong = np.flatnonzero(actual != expected)
        far = ""
    else:
        distance = ulp_distance(program.elements, actual, expected)
        wrong = np.flatnonzero(~within(program.bound, program.elements, actual, expected))
        far = f" within {program.bound}, {int(distance.max())} ulp at most"
    if wrong.size == 0:
        return
    i = int(wrong[0])
    if program.bound is not None:  # packed elements have been compared one by one
        i //= _split(program.elements, expected)[1].size // expected.size
    operands = ", ".join(f"{int(program.input(n)[i]):#x}" for n in range(len(program.reads)))
    width = 2 + actual.dtype.itemsize * 2
    raise AssertionError(
        f"{program.key}: {wrong.size} of {actual.size} differ{far}; first: element {i}, "
        f"({operands}) -> {int(actual[i]):#0{width}x}, the card gave {int(expected[i]):#0{width}x}"
    )


def _split(elements: str, raw: Raw) -> tuple[str, Raw]:
    """The type and the values of packed elements, one by one."""
    if elements.endswith("x2"):
        return elements[:-2], np.ascontiguousarray(raw).view(np.uint16)
    if elements == "f16" and raw.dtype.itemsize == 4:  # a register of a matrix
        return elements, np.ascontiguousarray(raw).view(np.uint16)
    return elements, raw


def values(elements: str, raw: Raw) -> npt.NDArray[np.float64]:
    """Raw bits as numbers, exactly."""
    if elements == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[elements]
    return np.ascontiguousarray(raw).view(dtype).astype(np.float64)


def ulp_distance(elements: str, actual: Raw, expected: Raw) -> npt.NDArray[np.float64]:
    """Distance of two arrays in steps between neighbouring numbers; from NaN to NaN it is 0."""
    _, expected = _split(elements, expected)
    elements, actual = _split(elements, actual)
    bits, _ = FIELDS[elements]

    def order(raw: Raw) -> npt.NDArray[np.int64]:
        words = raw.astype(np.uint64)
        magnitude = (words & np.uint64((1 << (bits - 1)) - 1)).astype(np.int64)
        return np.where(words >> np.uint64(bits - 1) != 0, -magnitude, magnitude)

    both_nan = np.isnan(values(elements, actual)) & np.isnan(values(elements, expected))
    distance = order(actual).astype(np.float64) - order(expected).astype(np.float64)
    if bits == 64:  # doubles that are close differ by less than 2^53 steps
        distance = (order(actual) - order(expected)).astype(np.float64)
    return np.where(both_nan, 0.0, np.abs(distance))


def within(bound: Bound, elements: str, actual: Raw, expected: Raw) -> npt.NDArray[np.bool_]:
    """Which results are within a bound of the card's."""
    distance = ulp_distance(elements, actual, expected)
    _, expected = _split(elements, expected)
    elements, actual = _split(elements, actual)
    x, y = values(elements, actual), values(elements, expected)
    with np.errstate(invalid="ignore"):
        near = (distance <= bound.ulp) | (np.abs(x - y) <= bound.absolute)
    special = ~np.isfinite(x) | ~np.isfinite(y)
    return np.asarray(np.where(special, distance == 0, near), dtype=np.bool_)


def load(folder: Path = FOLDER, label: str = LABEL) -> Recording:
    """Loads a recording. Raises ValueError if its programs are not those of programs.py."""
    about = json.loads((folder / f"{label}.json").read_text())
    hashes = about.pop("programs")
    with np.load(folder / f"{label}.npz") as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    position = dict.fromkeys(stored, 0)
    outputs: dict[str, list[Raw]] = {}
    for program in (program for family in FAMILIES for program in programs(family)):
        if program.key not in hashes:
            raise ValueError(f"{program.key} has not been recorded: record anew")
        outputs[program.key] = []
        for operand in program.writes:
            name = f"u{operand.bits}"
            start = position[name]
            position[name] += min(program.explicit, program.count)
            outputs[program.key].append(stored[name][start : position[name]])
    if len(outputs) != len(hashes) or any(position[name] != stored[name].size for name in stored):
        raise ValueError("the recorded data has other programs: record anew")
    return Recording(about, hashes, outputs)
