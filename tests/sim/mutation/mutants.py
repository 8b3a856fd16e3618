"""The mutants of a kernel: synchronisation deleted, predicates negated, constants changed."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .equivalence import Lanes
from .statements import Statement

KINDS = ("sync", "protocol", "predicate", "constant")

_NEGATED = {
    "eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le",
    "lo": "hs", "hs": "lo", "ls": "hi", "hi": "ls",
}  # fmt: skip
# A comparison of floats that is negated holds where one of them is NaN.
_NEGATED_FLOAT = {
    "eq": "neu", "ne": "equ", "lt": "geu", "ge": "ltu", "le": "gtu", "gt": "leu",
    "equ": "ne", "neu": "eq", "ltu": "ge", "geu": "lt", "leu": "gt", "gtu": "le",
    "num": "nan", "nan": "num",
}  # fmt: skip
_LANE_SOURCES = ("%tid.x", "%laneid", "%warpid")


@dataclass(frozen=True)
class Mutant:
    """One change of one statement.

    Attributes:
        kind: of KINDS.
        statement: the index of the changed one.
        change: what was done, for people and for the list of excuses.
        begin, end: what is replaced in the module's text.
        text: what it is replaced with.
        equivalent: why it computes what the kernel computes, where that is proved; otherwise empty.
    """

    kind: str
    statement: int
    change: str
    begin: int
    end: int
    text: str
    equivalent: str = ""

    def apply(self, module: str) -> str:
        return module[: self.begin] + self.text + module[self.end :]


# What is done to a statement that puts CTAs and launches in order, by kind.
ORDERS = {
    "scopes": r"\S+\.(cluster|gpu)\.\S+ -> \S+",
    "global memory": r"(ld|st)\S+ -> \S+\.relaxed\.\S+|cp\.async\.bulk\S+ -> \S+"
    r"|fence\.proxy\.async\.global -> \S+|delete (cp\.async\.bulk\.wait_group"
    r"|fence\.proxy\.async\.global)",
    "launches that overlap": r"delete griddepcontrol\.\S+",
    "allocation of tensor memory": r"delete tcgen05\.\w*alloc\S*",
    "launch control": r"(delete )?clusterlaunchcontrol\.\S+( -> true)?",
}


def order_of(change: str) -> str:
    """Of which of ORDERS a mutant is, by what it changed; empty: of none."""
    # A relaxed access orders no memory, whatever its scope is.
    return next((x for x in reversed(ORDERS) if re.fullmatch(ORDERS[x], change)), "")


def is_sync(statement: Statement) -> bool:
    """Whether an instruction orders what threads or asynchronous units do."""
    parts = statement.parts
    if parts[0] in ("bar", "barrier", "fence", "membar"):
        return True
    if parts[0] in ("cp", "wgmma", "tcgen05"):
        # cp.async.wait_group, wgmma.commit_group, tcgen05.wait, tcgen05.dealloc, ...
        words = ("wait", "commit", "arrive", "fence", "alloc")
        return any(word in part for part in parts[1:] for word in words)
    if parts[0] == "mbarrier":
        return any("arrive" in part or "wait" in part or "expect" in part for part in parts[1:])
    if parts[0] == "clusterlaunchcontrol":
        return "try_cancel" in parts or "is_canceled" in parts
    return parts[0] == "griddepcontrol"


def mutants(
    statements: Sequence[Statement],
    executed: Sequence[bool],
    threads: int,
    seed: int,
    *,
    protocols: bool = False,
) -> list[Mutant]:
    """All mutants of the executed instructions of a kernel; of each constant one, by seed.

    Args:
        statements: the kernel's.
        executed: for each whether it is.
        threads: of a CTA.
        seed: picks what constants become.
        protocols: also constants of mbarriers, of matrix descriptors and of tensor memory, and what
            `_protocol` does.
    """
    found = []
    users = _users(statements)
    lanes = Lanes(statements, threads)
    constants = _constant_operands(statements, protocols)
    for statement in statements:
        if not executed[statement.index]:
            continue
        if protocols:
            found += _protocol(statement)
        found += _weaken(statement)
        if is_sync(statement):
            found.append(_delete(statement))
        else:
            found += _negate(statement, users)
        for operand in sorted(constants.get(statement.index, ())):
            for begin, end in statement.immediates(operand):
                # The seed of a constant does not depend on what else the kernel has.
                rng = random.Random(f"{seed} {statement.index} {begin}")
                found.append(_change(statement, begin, end, rng, lanes))
    return found


def _replace(
    statement: Statement, begin: int, end: int, text: str, kind: str, change: str, why: str = ""
) -> Mutant:
    return Mutant(
        kind, statement.index, change, statement.begin + begin, statement.begin + end, text, why
    )


def _delete(statement: Statement) -> Mutant:
    instead = ""
    if "is_canceled" in statement.parts:  # as if launch control never refused
        text = f"mov.pred {statement.operands[0]}, 1"
        change = f"{statement.opcode} -> true"
        return _replace(statement, statement.body, len(statement.text), text, "sync", change)
    if statement.parts[0] == "mbarrier" and "wait" in statement.parts[1]:  # as if it had succeeded
        instead = f"mov.pred {statement.operands[0]}, 1"
    return _replace(
        statement, 0, len(statement.text), instead, "sync", f"delete {statement.opcode}"
    )


def _weaken(statement: Statement) -> list[Mutant]:
    """A smaller scope, a relaxed access, a wait for what bulk stores have read, a proxy fence for
    shared memory alone.
    """
    opcode, parts = statement.opcode, statement.parts
    weaker = []
    if {"acquire", "release", "acq_rel"} & set(parts) and parts[0] != "barrier":
        weaker += [
            opcode.replace(f".{scope}.", ".cta.", 1)
            for scope in ("cluster", "gpu")
            if scope in parts and "mbarrier_init" not in parts
        ]
        if parts[0] in ("ld", "st"):
            weaker.append(re.sub(r"\.(acquire|release)\b", ".relaxed", opcode))
    if opcode == "cp.async.bulk.wait_group":
        weaker.append(f"{opcode}.read")
    if opcode == "fence.proxy.async.global":
        weaker.append("fence.proxy.async.shared::cta")
    begin, end = statement.body, statement.body + len(opcode)
    return [_replace(statement, begin, end, text, "sync", f"{opcode} -> {text}") for text in weaker]


# Bits of a wgmma descriptor: 16 and 128 bytes of the start, one that must be zero, both offsets,
# the base offset, the swizzle.
_DESCRIPTOR_BITS = (0, 3, 14, 16, 32, 49, 62, 63)


def _protocol(statement: Statement) -> list[Mutant]:
    """Other bytes to wait for, other counts and parities, other bits of descriptors."""
    parts = statement.parts
    found = []

    def through(operand: int, register: str, operation: str, change: str) -> None:
        begin, end = statement.operand_spans[operand]
        old = statement.text[begin:end]
        text = (
            f"{{ .reg .{register} %mutant; {operation.format(f'%mutant, {old}')}; "
            f"{statement.text[:begin]}%mutant{statement.text[end:]}; }}"
        )
        found.append(_replace(statement, 0, len(statement.text), text, "protocol", change))

    if parts[0] == "mbarrier":
        last = len(statement.operands) - 1
        if "expect_tx" in parts:
            for step in (16, -16):
                through(last, "b32", f"add.s32 {{}}, {step}", f"{statement.opcode}: {step:+} bytes")
        elif "parity" in parts:
            through(last, "b32", "xor.b32 {}, 1", f"{statement.opcode}: the other parity")
        elif parts[1] == "init":
            for step in (1, -1):
                through(last, "b32", f"add.s32 {{}}, {step}", f"{statement.opcode}: {step:+}")
    elif parts[:2] == ["wgmma", "mma_async"]:
        for operand, matrix in ((1, "A"), (2, "B")):
            if statement.operands[operand].startswith("{"):
                continue  # in registers
            for bit in _DESCRIPTOR_BITS:
                change = f"bit {bit} of the descriptor of {matrix}"
                through(operand, "b64", f"xor.b64 {{}}, {1 << bit}", change)
    return found


def _users(statements: Iterable[Statement]) -> dict[str, list[Statement]]:
    users = defaultdict(list)
    for statement in statements:
        for register in statement.used:
            users[register].append(statement)
    return users


def _negate(statement: Statement, users: dict[str, list[Statement]]) -> list[Mutant]:
    found = []
    if statement.guard:
        at = statement.text.index(statement.guard)
        negated = "@" if statement.text[1] == "!" else "@!"
        found.append(
            _replace(
                statement, 0, at, negated, "predicate", f"negate the guard of {statement.opcode}"
            )
        )
    parts = statement.parts
    if parts[0] == "setp":
        # Where a guard or a selp alone reads it, its negation is theirs.
        readers = [user for register in statement.defined for user in users[register]]
        only = readers[0] if len(readers) == 1 else None
        if only is None or not (
            only.guard in statement.defined or only.parts[0] in ("selp", "vote")
        ):
            table = _NEGATED_FLOAT if re.fullmatch(r"b?f\d+(x2)?", parts[-1]) else _NEGATED
            opcode = ".".join([parts[0], table[parts[1]], *parts[2:]])
            begin, end = statement.body, statement.body + len(statement.opcode)
            change = f"{statement.opcode} -> {opcode}"
            found.append(_replace(statement, begin, end, opcode, "predicate", change))
    elif parts[0] == "selp":
        (a, b), (c, d) = statement.operand_spans[1:3]
        swapped = statement.text[c:d] + statement.text[b:c] + statement.text[a:b]
        found.append(
            _replace(statement, a, d, swapped, "predicate", f"swap the values of {parts[0]}")
        )
    elif parts[0] == "vote":
        begin, end = statement.operand_spans[1]
        predicate = statement.text[begin:end]
        negated = predicate[1:] if predicate.startswith("!") else "!" + predicate
        change = f"negate the predicate of {statement.opcode}"
        found.append(_replace(statement, begin, end, negated, "predicate", change))
    return found


# --- constants ---


def _shared_address(statement: Statement) -> int | None:
    """Which operand is an address in shared memory; None: it has none."""
    parts = statement.parts
    if parts[0] in ("ldmatrix", "stmatrix"):
        return 1 if parts[0] == "ldmatrix" else 0
    if parts[0] == "cp" and parts[1] == "async" and len(statement.operands) > 1:
        return 0
    if "shared" not in "".join(parts[1:3]) and not any(p.startswith("shared") for p in parts):
        return None
    return {"ld": 1, "st": 0, "atom": 1, "red": 0}.get(parts[0])


def _protocol_operands(statement: Statement) -> range:
    """The operands that say where, of a mbarrier or of tensor memory, and how much or what: places,
    counts, parities, descriptors, columns.
    """
    parts, count = statement.parts, len(statement.operands)
    if parts[0] == "mbarrier" or (parts[0] == "tcgen05" and parts[1] in ("alloc", "dealloc")):
        return range(1 if statement.has_result else 0, count)
    if parts[0] == "tcgen05" and parts[1] in ("mma", "commit"):
        return range(min(count, 4))
    if parts[0] == "tcgen05" and parts[1] in ("ld", "st"):
        return range(1, 2) if parts[1] == "ld" else range(1)
    return range(0)


def _constant_operands(statements: Sequence[Statement], protocols: bool) -> dict[int, set[int]]:
    """For each statement the operands whose integers make shared addresses or fragments: addresses
    in shared memory and what they are computed from, what is computed from the number of the
    thread, and the operands of shuffles and votes; with `protocols` likewise what
    `_protocol_operands` names.
    """
    chosen: dict[int, set[int]] = defaultdict(set)
    defined = defaultdict(list)
    for statement in statements:
        if statement.is_alu:
            for register in statement.defined:
                defined[register].append(statement)
    roots: list[str] = []
    for statement in statements:
        address = _shared_address(statement)
        if address is not None:
            chosen[statement.index].add(address)
            roots += re.findall(r"%\w+", statement.operands[address])
        for operand in _protocol_operands(statement) if protocols else ():
            chosen[statement.index].add(operand)
            roots += re.findall(r"%\w+", statement.operands[operand])
        if statement.parts[0] in ("shfl", "vote", "match", "redux", "activemask"):
            for operand in range(2, len(statement.operands)):
                chosen[statement.index].add(operand)
                roots += re.findall(r"%\w+", statement.operands[operand])
    seen = set(roots)
    while roots:
        for statement in defined[roots.pop()]:
            chosen[statement.index] |= set(range(1, len(statement.operands)))
            for register in statement.used:
                if not register.startswith("%p") and register not in seen:
                    seen.add(register)
                    roots.append(register)
    # Forwards from the number of the thread.
    lanes: set[str] = set()
    grew = True
    while grew:
        grew = False
        for statement in statements:
            if not statement.is_alu or not statement.defined or statement.defined[0] in lanes:
                continue
            text = statement.operands[1:]
            if any(register in lanes for register in statement.used) or any(
                source in operand for operand in text for source in _LANE_SOURCES
            ):
                lanes.add(statement.defined[0])
                grew = True
    for statement in statements:
        if statement.is_alu and statement.defined and statement.defined[0] in lanes:
            chosen[statement.index] |= set(range(1, len(statement.operands)))
    return chosen


def _change(statement: Statement, begin: int, end: int, rng: random.Random, lanes: Lanes) -> Mutant:
    old_text = statement.text[begin:end]
    old = int(old_text, 0)
    candidates = [value for value in _neighbours(statement, old) if value != old]
    rng.shuffle(candidates)
    why = ""
    for value in candidates:
        changed = statement.text[:begin] + str(value) + statement.text[end:]
        why = lanes.equivalent(statement, changed)
        if not why:
            break
    # [p+4] and [p+-4], but 4 and -4.
    text = str(value)
    change = f"{statement.opcode}: {old_text} -> {text}"
    return _replace(statement, begin, end, text, "constant", change, why)


def _neighbours(statement: Statement, old: int) -> list[int]:
    mnemonic = statement.parts[0]
    if mnemonic in ("shl", "shr", "shf"):
        return [old + 1, old - 1] if old > 0 else [old + 1]
    lowest = old & -old if old else 1
    if mnemonic == "and":
        magnitude = abs(old)
        if old < 0:  # a multiple of -old
            return [2 * old, old // 2] if magnitude > 1 else [2 * old]
        return [old & ~lowest if old else 1]
    if mnemonic in ("shfl", "vote") or (mnemonic == "mov" and old == -1):
        return [old ^ 1, old ^ 2, old ^ 16]
    near = [old + lowest, old - lowest, old ^ (lowest << 1)]
    if lowest > 16:
        near += [old + 16, old - 16]
    return near
