"""What the main loops of a kernel's machine code issue: the reader behind tests/build/slots.py.

Loops are natural ones: an edge goes back to a block through which every way to it leads. Of the
ways round a loop the one is counted that does all the work with the fewest instructions: without
masks, rare branches and second tries of waits. Loops inside a loop are counted for themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INSTRUCTION_BYTES = 16  # from 7.0 on
# ptxas runs an instruction of the uniform datapath in such a loop, once for each lane, where it
# does not know that the lane was chosen by elect.sync.
LANE_LOOP = "BRA.U.ANY"
# The kinds of instructions that the table counts, by name.
TENSOR = "tensor"
KINDS = {
    TENSOR: (
        "HMMA",
        "OMMA",
        "QMMA",
        "IMMA",
        "HGMMA",
        "QGMMA",
        "IGMMA",
        "UTCHMMA",
        "UTCQMMA",
        "UTCIMMA",
    ),
    "MUFU": ("MUFU",),
    "fp32 pairs": ("FFMA2", "FADD2", "FMUL2"),
    "fp32": ("FFMA", "FMUL", "FADD", "FMNMX", "FMNMX3", "FSEL", "FSETP"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "tensor memory": ("LDTM", "STTM"),
    "copies": ("UTMALDG", "UTMASTG", "LDGSTS"),
}
MMA_SYNC = ("HMMA", "OMMA", "QMMA", "IMMA", "HGMMA", "QGMMA", "IGMMA")


@dataclass(frozen=True)
class Work:
    """What a loop may do.

    Attributes:
        name: what the table calls it.
        opcodes: the instructions by which it is known, as their opcodes begin.
        least: the fewest of them that make a loop one of this kind.
        all_of_them: whether the way with most of them is counted, or any way with one.
    """

    name: str
    opcodes: tuple[str, ...]
    least: int = 1
    all_of_them: bool = True

    def has(self, instruction: Instruction) -> bool:
        return instruction.opcode.startswith(self.opcodes)


# The first that fits a loop is what it does. Kernels without tensor cores multiply by FFMA.
WORK = (
    Work("attention", MMA_SYNC),
    Work("products", ("UTCHMMA", "UTCQMMA")),
    Work("softmax", ("MUFU.EX2",), least=8, all_of_them=False),
    Work("rescaling", ("STTM",)),
    Work("loads", ("UTMALDG",)),
)
WORK_ON_CUDA_CORES = (Work("products", ("FFMA",), least=8),)
NOTHING = Work("nothing", ())
# Copies of a thread, in loops of their own: how often they go round depends on the tile.
INNER = Work("copies", ("LDGSTS",))


@dataclass(eq=False)
class Instruction:
    """One instruction.

    Attributes:
        index: its place in the kernel.
        text: with its predicate and operands, without the semicolon.
    """

    index: int
    text: str

    @property
    def predicate(self) -> str:
        match = re.match(r"@!?U?P\w+", self.text)
        return match[0] if match else ""

    @cached_property
    def opcode(self) -> str:
        """With its modifiers: "HMMA.16816.F32"."""
        match = OPCODE.match(self.text)
        assert match is not None
        return match[1]

    @property
    def name(self) -> str:
        """Without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """The index that a branch goes to; None for other instructions and for computed targets."""
        if self.name not in ("BRA", "JMP"):
            return None
        match = re.search(r"\b0x([0-9a-f]+)$", self.text)
        return int(match[1], 16) // INSTRUCTION_BYTES if match else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow it."""
        if self.name in ("BRA", "JMP"):
            # A branch of a uniform or a second predicate: "BRA.U UP0, 0x10", "BRA P1, 0x10".
            return bool(self.predicate) or re.fullmatch(r"\S+ +0x[0-9a-f]+", self.text) is None
        return bool(self.predicate) or self.name not in ("EXIT", "RET", "BRX", "BRXU")


OPCODE = re.compile(r"(?:@!?\w+ +)?([A-Z][\w.]*)")
# What may end a block.
CONTROL = re.compile(r"\b(?:BRA|JMP|EXIT|RET|BRXU?)\b")

# In a line of the listing: an instruction, behind its address and before the lower half of its
# code; and in the line below it the upper half alone.
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+([^;]*);")
UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
CONTROL_SHIFT = 41  # of the upper half


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel.

    Attributes:
        texts: its instructions, with operands and predicates.
        controls: the control bits of each of them, from the lowest bit on: 4 of stalled clocks, 1
            that yields, 3 with the scoreboard that it sets when it has written its result and 3
            with that for having read its operands (7: none), and 6 with the scoreboards for which
            it waits.
    """

    texts: list[str]
    controls: list[int]


# What the disassembler said, by the content of what it read: it takes seconds, and several tests,
# which may run in several processes, ask for the same.
LISTINGS = Path(__file__).parents[2] / "build" / "listings"
WEEK_S = 7 * 24 * 3600


def kept(parts: Iterable[bytes], make: Callable[[], Any]) -> Any:
    """What `make` returns, as JSON has it, from LISTINGS if it was made before from the same parts.
    What nobody has asked for in a week is removed when something new comes.
    """
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    file = LISTINGS / key
    try:
        found = json.loads(zlib.decompress(file.read_bytes()))
        file.touch()
        return found
    except (OSError, ValueError, zlib.error):
        pass
    text = json.dumps(make())
    LISTINGS.mkdir(parents=True, exist_ok=True)
    for old in LISTINGS.iterdir():
        if time.time() - old.stat().st_mtime > WEEK_S:
            old.unlink(missing_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(zlib.compress(text.encode(), level=1))
    new.replace(file)  # at once: another process never reads half of it
    return json.loads(text)


@lru_cache(maxsize=2)  # they are long
def listing(tool: Path, cubin: bytes) -> dict[str, Code]:
    """The machine code of each kernel in an ELF file, as the disassembler has it."""

    def make() -> dict[str, tuple[list[str], list[int]]]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [tool, "--dump-sass", file.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        found: dict[str, tuple[list[str], list[int]]] = {}
        texts, controls = [], []
        for line in done.stdout.splitlines():
            if match := UPPER_HALF.match(line):
                controls.append(int(match[1], 16) >> CONTROL_SHIFT)
            elif match := INSTRUCTION.match(line):
                texts.append(match[1].strip())
            elif match := re.match(r"\s*Function : (\w+)", line):
                texts, controls = found.setdefault(match[1], ([], []))
        return found

    made = kept([b"listing", version_of(tool), cubin], make)
    return {kernel: Code(*code) for kernel, code in made.items()}


@cache
def version_of(tool: Path) -> bytes:
    return subprocess.run([tool, "--version"], capture_output=True, timeout=60).stdout


def instructions_of(tool: Path, cubin: bytes) -> dict[str, list[str]]:
    """The instructions of each kernel, with operands and predicates. `tool` is cuobjdump."""
    return {kernel: code.texts for kernel, code in listing(tool, cubin).items()}


def controls_of(tool: Path, cubin: bytes) -> dict[str, list[int]]:
    """The control bits of each instruction that `instructions_of` gives."""
    return {kernel: code.controls for kernel, code in listing(tool, cubin).items()}


# --- names of instructions, without their operands ---

# An instruction has 128 bits. Its operation is in the lowest 12, and its modifiers are in those
# from the 73rd on, below the control bits. The other bits are its predicate and its operands.
OPERATION_BITS = 12
MODIFIERS_FROM = 8  # in the upper half
UPPER_MASK = np.uint64((1 << CONTROL_SHIFT) - 1)
# Instructions with modifiers among the operands.
SPREAD = ("BRA", "SHFL", "HGMMA", "QGMMA", "IGMMA")


def words_of(cubin: bytes) -> dict[str, npt.NDArray[np.uint64]]:
    """The instructions of each kernel, (n, 2): what ELF's sections .text.KERNEL hold."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names = struct.unpack_from("<HH", cubin, 0x3C)
    # Name, type, flags, address, offset and size of each section.
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_at + 64 * i) for i in range(count)]
    names_at = sections[names][4]
    found = {}
    for name_at, _, _, _, offset, size in sections:
        name = cubin[names_at + name_at : cubin.index(b"\0", names_at + name_at)].decode()
        if name.startswith(".text."):
            words = np.frombuffer(cubin, dtype=np.uint64, count=size // 8, offset=offset)
            found[name.removeprefix(".text.")] = words.reshape(-1, 2)
    return found


def opcodes_of(
    tool: Path, target: str, cubins: Mapping[str, bytes]
) -> dict[str, dict[str, list[str]]]:
    """The opcode with its modifiers of each instruction, by the names of `cubins` and by kernel.

    Instructions of one operation are named after the first of them, which alone is disassembled:
    `listing` takes seconds for each image instead. Names that depend on operands may be those of
    another instruction of the operation (IMAD.MOV is an IMAD of zero).

    Args:
        tool: nvdisasm.
        target: for example "sm_90a".
        cubins: the contents of ELF files for it.
    """
    kernels = {name: words_of(cubin) for name, cubin in cubins.items()}
    words = np.concatenate([own for found in kernels.values() for own in found.values()])
    lower, upper = words[:, 0], words[:, 1] & UPPER_MASK
    operation = lower & np.uint64((1 << OPERATION_BITS) - 1)
    modifiers = upper >> np.uint64(MODIFIERS_FROM) << np.uint64(OPERATION_BITS)
    names = _first_names(tool, target, words, operation | modifiers)
    spread = np.array([name.startswith(SPREAD) for name in names])
    if spread.any():
        whole = np.stack([lower[spread], upper[spread]], axis=1)
        names[spread] = _first_names(tool, target, words[spread], whole)
    rest = iter(names)
    return {
        name: {kernel: list(itertools.islice(rest, len(own))) for kernel, own in found.items()}
        for name, found in kernels.items()
    }


def _first_names(
    tool: Path, target: str, words: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[Any]:
    """For each instruction the opcode of the first one with its key."""
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    with tempfile.NamedTemporaryFile() as raw:
        raw.write(np.ascontiguousarray(words[first]).tobytes())
        raw.flush()
        command = [tool, "--binary", target.replace("sm_", "SM"), raw.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    texts = [match[1] for match in map(INSTRUCTION.match, done.stdout.splitlines()) if match]
    opcodes = [match[1] for match in map(OPCODE.match, texts) if match]
    if len(opcodes) != len(first):
        raise RuntimeError(f"{len(opcodes)} of {len(first)} instructions were disassembled")
    return np.array(opcodes, dtype=object)[inverse.reshape(-1)]


def assembler_of(cubin: bytes) -> tuple[int, int]:
    """The release of the ptxas that made machine code."""
    match = re.search(rb"compilation tools, release (\d+)\.(\d+)", cubin)
    if match is None:
        raise RuntimeError("the machine code does not name its assembler")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Loop:
    """One loop.

    Attributes:
        work: what it does.
        way: the instructions of the way round it that is counted.
        shortest: how many instructions the shortest way round it has, whatever that does.
    """

    work: Work
    way: tuple[Instruction, ...]
    shortest: int


def kinds(instructions: Iterable[Instruction]) -> Counter[str]:
    """How many instructions there are of each of KINDS."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    return Counter(kind_of[x.name] for x in instructions if x.name in kind_of)


def find_work(works: Iterable[Work], code: Iterable[Instruction]) -> Work | None:
    """What a loop with this code does; None if it is none of `works`."""
    found = list(code)
    return next((w for w in works if sum(map(w.has, found)) >= w.least), None)


class Flow:
    """The blocks of a kernel and the ways between them.

    Args:
        texts: the kernel's instructions in order.
    """

    def __init__(self, texts: list[str]) -> None:
        self.instructions = [Instruction(i, text) for i, text in enumerate(texts)]
        control = [x for x in self.instructions if CONTROL.search(x.text)]
        targets = {x.target for x in control if x.target is not None}
        ends = {x.index + 1 for x in control if x.target is not None or not x.goes_on}
        starts = sorted(({0} | targets | ends) & set(range(len(texts))))
        self.blocks = [
            self.instructions[start:end]
            for start, end in zip(starts, [*starts[1:], len(texts)], strict=True)
        ]
        at = {start: block for block, start in enumerate(starts)}
        self.next: list[set[int]] = []
        for number, block in enumerate(self.blocks):
            last = block[-1]
            following = {at[last.target]} if last.target in at else set()
            if last.goes_on and number + 1 < len(self.blocks):
                following.add(number + 1)
            self.next.append(following)
        self.before: list[list[int]] = [[] for _ in self.blocks]
        for number, following in enumerate(self.next):
            for other in following:
                self.before[other].append(number)

    def order(self) -> list[int]:
        """Every block before those that follow it, except over edges that go back. Targets of
        computed branches and called functions have no block before them: they begin anew.
        """
        seen: set[int] = set()
        order: list[int] = []
        for root in range(len(self.blocks)):
            if root in seen:
                continue
            seen.add(root)
            done: list[int] = []
            stack: list[tuple[int, Iterator[int]]] = [(root, iter(sorted(self.next[root])))]
            while stack:
                block, following = stack[-1]
                new = next((x for x in following if x not in seen), None)
                if new is None:
                    done.append(block)
                    stack.pop()
                else:
                    seen.add(new)
                    stack.append((new, iter(sorted(self.next[new]))))
            order += reversed(done)
        return order

    @cached_property
    def dominators(self) -> list[int]:
        """For each block those through which every way to it leads, as bits."""
        order = self.order()
        rank = {block: i for i, block in enumerate(order)}
        everything = (1 << len(self.blocks)) - 1
        found = [everything] * len(self.blocks)
        changed = True
        while changed:
            changed = False
            for block in order:
                reached = [other for other in self.before[block] if rank[other] < rank[block]]
                bits = everything if reached else 0
                for other in self.before[block] if reached else ():
                    bits &= found[other]
                bits |= 1 << block
                changed |= bits != found[block]
                found[block] = bits
        return found

    def bodies(self) -> dict[int, tuple[set[int], list[int]]]:
        """The blocks of each loop, and those that go back, by the loop's first block."""
        found: dict[int, tuple[set[int], list[int]]] = {}
        for block, following in enumerate(self.next):
            for head in following:
                if not self.dominators[block] >> head & 1:
                    continue
                body, backs = found.setdefault(head, ({head}, []))
                backs.append(block)
                todo = [block]
                while todo:
                    x = todo.pop()
                    if x not in body:
                        body.add(x)
                        todo += self.before[x]
        return found

    def way(self, body: set[int], head: int, backs: Iterable[int], work: Work) -> tuple[int, ...]:
        """The blocks of the way round a loop that does its work with the fewest instructions.

        Args:
            body: the blocks that count, the first among them.
            head: the loop's first block.
            backs: the blocks that go back to it.
            work: what the loop does.
        """
        rank = {block: i for i, block in enumerate(self.order())}
        # For each block, by how much of the work is done behind it: the fewest instructions, and
        # the blocks on the way.
        best: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}
        for block in sorted(body, key=rank.__getitem__):
            if block == head:
                reached = [(0, 0, ())]
            else:
                reached = [
                    (done, slots, blocks)
                    for other in self.before[block]
                    if other in best and rank[other] < rank[block]
                    for done, (slots, blocks) in best[other].items()
                ]
            here: dict[int, tuple[int, tuple[int, ...]]] = {}
            own = sum(map(work.has, self.blocks[block]))
            for done, slots, blocks in reached:
                more = done + own
                if not work.all_of_them:
                    more = min(more, 1)
                way = (slots + len(self.blocks[block]), (*blocks, block))
                here[more] = min(way, here.get(more, way))
            best[block] = here
        ends = [(-done, *way) for back in backs for done, way in best.get(back, {}).items()]
        return min(ends)[2]


def main_loops(texts: list[str]) -> list[Loop]:
    """The loops of a kernel that do the work of attention, in the order of their code: of loops
    that do the same, one inside the other, the inner one.

    Args:
        texts: its instructions in order, as the disassembler writes them.
    """
    flow = Flow(texts)
    with_tensor_cores = any(x.name in KINDS[TENSOR] for x in flow.instructions)
    works = WORK if with_tensor_cores else WORK_ON_CUDA_CORES
    bodies = flow.bodies()

    def code(blocks: set[int]) -> tuple[Instruction, ...]:
        return tuple(x for block in sorted(blocks) for x in flow.blocks[block])

    found: list[tuple[set[int], Loop]] = []
    for head in sorted(bodies):
        body, backs = bodies[head]
        inside = [blocks for blocks, _ in bodies.values() if blocks < body]
        counted = [blocks for blocks in inside if find_work((*works, INNER), code(blocks))]
        own = body - set().union(*counted)
        if head not in own or not (work := find_work(works, code(own))):
            continue
        # A way leads through the loops inside, but these are counted for themselves.
        way, shortest = (
            code(set(flow.way(body, head, backs, what)) & own) for what in (work, NOTHING)
        )
        found.append((body, Loop(work, way, len(shortest))))
    return [
        loop
        for body, loop in found
        if not any(other < body and inner.work == loop.work for other, inner in found)
    ]


def has_lane_loop(opcodes: Iterable[str]) -> bool:
    return any(opcode.startswith(LANE_LOOP) for opcode in opcodes)


def lane_loops(cuobjdump: Path, nvdisasm: Path, target: str, cubin: bytes) -> dict[str, list[str]]:
    """The instructions inside loops over lanes that disagree, by kernel; without kernels that have
    no such loop.
    """
    opcodes = opcodes_of(nvdisasm, target, {"": cubin})[""]
    kernels = [name for name, own in opcodes.items() if has_lane_loop(own)]
    if not kernels:
        return {}
    texts = instructions_of(cuobjdump, cubin)
    return {kernel: _lane_loops(texts[kernel]) for kernel in kernels}


def _lane_loops(texts: list[str]) -> list[str]:
    instructions = [Instruction(i, text) for i, text in enumerate(texts)]
    found = []
    for branch in instructions:
        if branch.opcode.startswith(LANE_LOOP) and branch.target is not None:
            found += [x.text for x in instructions[branch.target : branch.index]]
    return found
