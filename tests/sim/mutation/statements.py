"""PTX text as statements with their places in it, and who defines and uses which register."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+[0-9]+\b")
_INTEGER = re.compile(r"(?<![\w.$%])-?(?:0[xX][0-9a-fA-F]+|[0-9]+)(?![\w.])")
_LABEL = re.compile(r"[$\w]+:")
_GUARD = re.compile(r"@(!?)(%\w+)\s+")

# Instructions whose result is an integer made of their integer operands.
ALU = frozenset(
    (
        "abs", "add", "and", "bfe", "bfi", "bfind", "brev", "clz", "cvt", "cvta", "div", "lop3",
        "mad", "mad24", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc", "prmt",
        "rem", "sad", "selp", "shf", "shl", "shr", "slct", "sub", "xor",
    )
)  # fmt: skip
# Instructions that define no register.
_NO_RESULT = frozenset(
    (
        "bar", "barrier", "bra", "brx", "cp", "exit", "fence", "griddepcontrol", "mbarrier",
        "membar", "nanosleep", "prefetch", "red", "ret", "setmaxnreg", "st", "stmatrix", "trap",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """One instruction of a kernel.

    Attributes:
        index: among the kernel's instructions, as in `Report.executed`.
        begin, end: where its text lies in the module's, without the semicolon.
        text: that text.
        body: where its opcode begins in the text, behind a guard.
    """

    index: int
    begin: int
    end: int
    text: str
    body: int

    @cached_property
    def guard(self) -> str:
        """The register of its guard; empty: none."""
        match = _GUARD.match(self.text)
        return match[2] if match else ""

    @cached_property
    def opcode(self) -> str:
        return self.text[self.body :].split(None, 1)[0]

    @cached_property
    def parts(self) -> list[str]:
        """The opcode and its modifiers."""
        return self.opcode.split(".")

    @cached_property
    def operands(self) -> list[str]:
        return [self.text[a:b] for a, b in self.operand_spans]

    @cached_property
    def operand_spans(self) -> list[tuple[int, int]]:
        """Where each operand lies in the text."""
        position = self.body + len(self.opcode)
        spans, depth, begin = [], 0, position
        for at in range(position, len(self.text) + 1):
            letter = self.text[at] if at < len(self.text) else ","
            depth += (letter in "{[(") - (letter in "}])")
            if letter == "," and (depth == 0 or at == len(self.text)):
                piece = self.text[begin:at]
                start = begin + len(piece) - len(piece.lstrip())
                if piece.strip():
                    spans.append((start, start + len(piece.strip())))
                begin = at + 1
        return spans

    @property
    def has_result(self) -> bool:
        mnemonic, modifiers = self.parts[0], self.parts[1:]
        if mnemonic == "mbarrier":
            return modifiers[0] in ("try_wait", "test_wait") or (
                modifiers[0] == "arrive" and not self.operands[0].startswith(("[", "_"))
            )
        if mnemonic == "tcgen05":
            return modifiers[0] == "ld"
        return mnemonic not in _NO_RESULT or (mnemonic == "barrier" and "red" in modifiers)

    @cached_property
    def defined(self) -> list[str]:
        """The registers that it writes."""
        return _REGISTER.findall(self.operands[0]) if self.has_result and self.operands else []

    @cached_property
    def used(self) -> list[str]:
        """The registers that it reads, its guard among them."""
        operands = self.operands[1:] if self.has_result else self.operands
        guard = [self.guard] if self.guard else []
        return guard + [register for x in operands for register in _REGISTER.findall(x)]

    @property
    def is_alu(self) -> bool:
        """Whether it computes integers from integers."""
        return self.parts[0] in ALU and not any(
            re.fullmatch(r"(b?f16(x2)?|tf32|f32|f64|e4m3x2|e5m2x2|pred)", part)
            for part in self.parts[1:]
        )

    def immediates(self, operand: int) -> list[tuple[int, int]]:
        """Where the integers of an operand lie in the text; none if it is a name or a register."""
        begin, end = self.operand_spans[operand]
        return [(m.start(), m.end()) for m in _INTEGER.finditer(self.text, begin, end)]


def kernel_module(text: str, kernel: str) -> str:
    """A module with this one kernel and no line information: it loads in a fraction of the time.

    Raises:
        ValueError: the module has no such kernel.
    """
    entry = re.search(rf"^(\.visible )?\.entry {kernel}\(", text, re.MULTILINE)
    first = re.search(r"^(\.visible )?\.entry ", text, re.MULTILINE)
    if entry is None or first is None:
        raise ValueError(f"no kernel {kernel}")
    depth = 0
    end = text.index("{", entry.start())
    for brace in re.finditer(r"[{}]", text[end:]):  # inline assembly has blocks of its own
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            end += brace.end() + 1
            break
    body = re.sub(r"^\s*\.loc\b.*\n", "", text[entry.start() : end], flags=re.MULTILINE)
    return text[: first.start()] + body


def split(module: str) -> list[Statement]:
    """The instructions of a module's only kernel."""
    # Comments become spaces: every place stays where it is.
    blank = re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda m: " " * len(m[0]), module, flags=re.DOTALL | re.MULTILINE
    )
    at = blank.index("{", blank.index(".entry"))
    statements: list[Statement] = []
    while at < len(blank):
        if blank[at].isspace() or blank[at] in "{};":
            at += 1
        elif label := _LABEL.match(blank, at):
            at = label.end()
        else:
            end = blank.index(";", at)
            if blank[at] != ".":
                text = blank[at:end].rstrip()
                guard = _GUARD.match(text)
                statements.append(
                    Statement(
                        len(statements), at, at + len(text), text, guard.end() if guard else 0
                    )
                )
            at = end + 1
    return statements
