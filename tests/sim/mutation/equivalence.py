"""Proves that some changes of constants change nothing.

Registers that depend on the number of the thread alone are evaluated for every thread of a CTA,
with and without the change. The change is equivalent if every value that something else reads, that
is every one that reaches an instruction outside of this evaluation, is the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .statements import Statement

Values = npt.NDArray[Any]  # object arrays of Python integers: no width of their own

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "min": np.minimum,
    "max": np.maximum,
    "shl": lambda a, b: a << np.minimum(b, 64),
    "shr": lambda a, b: a >> np.minimum(b, 64),
    "cvt": lambda a: a,
}
PROVED = "the same for every thread of the CTA wherever it is read"


class Lanes:
    """What registers hold in each thread of a CTA, where that depends on nothing else."""

    def __init__(self, statements: Sequence[Statement], threads: int) -> None:
        self._threads = threads
        self._defining: dict[str, list[Statement]] = defaultdict(list)
        self._users: dict[str, list[Statement]] = defaultdict(list)
        for statement in statements:
            for register in statement.defined:
                self._defining[register].append(statement)
            for register in set(statement.used):
                self._users[register].append(statement)
        self._values: dict[str, Values] = {}
        for statement in statements:  # definitions come before uses, but for loops
            self._evaluate(statement, self._values)

    def equivalent(self, statement: Statement, changed: str) -> str:
        """Why a statement may become `changed`; empty where that is not proved."""
        if not statement.defined or statement.defined[0] not in self._values:
            return ""
        # Everything that depends on it, in the order of evaluation.
        first = statement.defined[0]
        changes = {first: dataclasses.replace(statement, text=changed)}
        reached = {first}
        for register in self._values:
            defining = self._defining[register][0]
            if reached.intersection(defining.used):
                reached.add(register)
                changes[register] = defining
        values = {r: v for r, v in self._values.items() if r not in reached}
        for register in self._values:
            if register not in reached:
                continue
            if not self._evaluate(changes[register], values):
                return ""
            if np.array_equal(values[register], self._values[register]):
                continue
            # Seen by what is not evaluated here?
            for user in self._users[register]:
                if not user.defined or user.defined[0] not in self._values:
                    return ""
        return PROVED

    def _evaluate(self, statement: Statement, values: dict[str, Values]) -> bool:
        """Adds what a statement defines; False where that is not known."""
        if not statement.is_alu or statement.guard or len(statement.defined) != 1:
            return False
        register = statement.defined[0]
        if len(self._defining[register]) != 1:
            return False
        operation = _OPERATIONS.get(statement.parts[0])
        kinds = re.findall(r"\.([usb])(\d+)", statement.opcode)
        modifiers = [m for m in statement.parts[1:] if not re.fullmatch(r"[usb]\d+", m)]
        if operation is None or not kinds or set(modifiers) - {"lo", "wide"}:
            return False
        target, source = kinds[0], kinds[-1]
        operands = []
        for text in statement.operands[1:]:
            if text in values:
                value = values[text]
            elif text == "%tid.x":
                value = np.arange(self._threads).astype(object)
            elif re.fullmatch(r"-?\w+", text) and text.lstrip("-")[0].isdigit():
                value = np.full(self._threads, int(text, 0), dtype=object)
            else:
                return False
            operands.append(value)
        signed = source[0] == "s"
        bits = int(source[1])
        wide = "wide" in modifiers
        last_as_it_is = statement.parts[0] in ("shl", "shr")
        operands = [
            x
            if last_as_it_is and i == 1
            else _wrap(x, 2 * bits if wide and i == 2 else bits, signed)
            for i, x in enumerate(operands)
        ]
        result_bits = 2 * bits if wide else int(target[1])
        values[register] = _wrap(operation(*operands), result_bits, False)
        return True


def _wrap(values: Values, bits: int, signed: bool) -> Values:
    low = values & ((1 << bits) - 1)
    if signed:
        return np.where(low >> (bits - 1) == 1, low - (1 << bits), low)
    return low
