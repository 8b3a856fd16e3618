"""A fuzzer of PTX text: damaged programs are refused, or they run and are reported on, and the
process survives. Seeded: a number stands for a text.

`python -m tests.sim.fuzz --seconds 600`; `make test-sim-full` does so with sanitizers.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from pathlib import Path

import torch

from archflash import LaunchError, sim
from archflash.sim._attention import ptx_text
from archflash.sim._launch import MODES

CORPUS = Path(__file__).parent / "corpus"
CHARACTERS = '{}[](),;:.@!%|_-+0x9fE"/*\n \0\xff'
WORDS = (
    "0", "1", "-1", "4", "7", "8", "16", "31", "32", "33", "255", "65536", "2147483648",
    "4294967295", "18446744073709551615", "0x7FFFFFFF", "0f7FC00000", "0fFF800000", "1e400", "_",
    "%tid.y", "%laneid", "%clock", "%nothing", "{", "}", "[", "]", "!%p0", "%r1|%p1", ".v2", ".v4",
    ".v8", ".b8", ".b16", ".b32", ".b64", ".b128", ".u8", ".s16", ".u32", ".s64", ".f16", ".f32",
    ".f64", ".pred", ".f16x2", ".bf16", ".bf16x2", ".e4m3x2", ".global", ".shared", ".local",
    ".const", ".param", ".sync", ".aligned", ".x1", ".x4", ".trans", ".cc", ".sat", ".ftz", ".rz",
    ".wide", ".hi", ".lo", ".reg", ".align 1048576", ".loc 9 9 9", "bra LOOP", "exit", "ret",
)  # fmt: skip
TOKEN = re.compile(r"[.%$]?[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)?|[^\sA-Za-z0-9_]")
BUFFER_BYTES = 4096
# A run may execute so many instructions, since damaged loops need not end.
MAX_INSTRUCTIONS = 4000
BLOCKS = ((1,), (17,), (33,), (48,), (100,), (64,), (128,), (1024,), (5, 7), (16, 2, 3), (1, 1, 64))


def corpus() -> dict[str, str]:
    """Small programs by name; together they have every family of instructions."""
    return {file.stem: file.read_text() for file in sorted(CORPUS.glob("*.ptx"))}


def damage(text: str, state: random.Random) -> str:
    """A text with a few characters, words or lines changed, removed, doubled or exchanged, or with
    lanes that exit early or sit out an instruction.
    """
    kinds = (damage_characters, damage_words, damage_words, damage_lines, damage_lanes)
    for _ in range(state.randint(1, 4)):
        text = state.choice(kinds)(text, state)
    return text


def damage_characters(text: str, state: random.Random) -> str:
    at, other = (state.randrange(max(len(text), 1)) for _ in range(2))
    length = state.choice((1, 1, 3, 20, 200))
    choice = state.randrange(12)
    if choice == 0:  # seldom: it leaves little
        return text[:at]
    if choice < 4:
        return text[:at] + text[at + length :]
    if choice < 6:
        return text[:at] + text[at : at + length] + text[at:]
    if choice < 9:
        return text[:at] + state.choice(CHARACTERS) + text[at + 1 :]
    return text[:at] + text[other : other + length] + text[at + length :]


def damage_words(text: str, state: random.Random) -> str:
    """Another word of the text, or one that is hard to swallow, in the place of a word."""
    tokens = list(TOKEN.finditer(text))
    if not tokens:
        return text
    old = state.choice(tokens)
    new = state.choice(WORDS) if state.random() < 0.4 else state.choice(tokens)[0]
    if state.random() < 0.5:  # of the same kind: the text is likelier to load
        same = [token[0] for token in tokens if token[0][0] == old[0][0]]
        new = state.choice(same)
    return text[: old.start()] + new + text[old.end() :]


def damage_lines(text: str, state: random.Random) -> str:
    lines = text.split("\n")
    a, b = (state.randrange(len(lines)) for _ in range(2))
    choice = state.randrange(3)
    if choice == 0:
        lines[a], lines[b] = lines[b], lines[a]
    elif choice == 1:
        lines.insert(a, lines[b])
    else:
        del lines[a]
    return "\n".join(lines)


def instruction_lines(lines: list[str]) -> list[int]:
    """The lines that hold one whole instruction without a guard."""
    return [
        index
        for index, line in enumerate(lines)
        if re.fullmatch(r"\s*[a-z][\w.:]*(\s[^;:]*)?;", line)
    ]


def without_lanes(instruction: str, comparison: str) -> str:
    """An instruction guarded by a comparison of the lane's index, such as "ge.u32 16"."""
    operation, number = comparison.split()
    return (
        "{ .reg .pred %off; .reg .b32 %lane; mov.u32 %lane, %laneid; "
        f"setp.{operation} %off, %lane, {number}; @%off {instruction} }}"
    )


def damage_lanes(text: str, state: random.Random) -> str:
    lines = text.split("\n")
    places = instruction_lines(lines)
    if not places:
        return text
    at = state.choice(places)
    comparison = f"{state.choice(('lt', 'ge', 'eq', 'ne'))}.u32 {state.choice((0, 1, 16, 17, 31))}"
    if state.random() < 0.5:
        lines.insert(at, without_lanes("exit;", comparison))
    else:
        lines[at] = without_lanes(lines[at].strip(), comparison)
    return "\n".join(lines)


def some_block(seed: int) -> tuple[int, ...]:
    """A block's size: for one seed in four 64 threads, for the others any."""
    if seed % 4 == 0:
        return (64,)
    state = random.Random(seed)
    return state.choice((*BLOCKS, (state.randint(1, 1024),)))


def attempt(text: str, seed: int, block: tuple[int, ...] | None = None) -> str:
    """What becomes of a text: "refused", or it loaded and "launched" or was "unlaunchable".

    block: threads along x, y, z; without it `some_block(seed)`.

    Raises:
        Anything else is a bug of the simulator.
    """
    try:
        program = sim.load(text)
    except LaunchError:
        return "refused"
    outcome = "unlaunchable"
    block = block or some_block(seed)
    warps = (math.prod(block) + 31) // 32
    for kernel in program.kernels[:2]:
        count = program.module.parameter_bytes(kernel) // 8
        if count > 8:
            continue
        buffers = [torch.zeros(BUFFER_BYTES // 4, dtype=torch.int32) for _ in range(count)]
        try:
            report = sim.launch(
                program, kernel, buffers, grid=(2,), block=block, cluster=(1 + seed // 4 % 2,),
                shared_bytes=1024, mode=MODES[seed // 8 % len(MODES)],
                seed=seed, threads=1, max_instructions=MAX_INSTRUCTIONS * ((warps + 1) // 2),
                check=False,
            )  # fmt: skip
        except LaunchError:
            continue
        str(report)
        outcome = "launched"
    return outcome


def kernel_texts() -> dict[str, str]:
    """The first kernels of the wheel's own PTX."""
    texts = {}
    for image in ("ampere/fwd_bf16", "simt/fwd_f32"):
        text = ptx_text(image, (8, 0))
        starts = [match.start() for match in re.finditer(r"^\.visible \.entry", text, re.M)]
        texts[image] = text[: starts[1]] if len(starts) > 1 else text
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    texts = corpus() | kernel_texts()
    for name, text in texts.items():
        assert attempt(text, 0) != "refused", name
    outcomes: dict[str, int] = {}
    end = time.monotonic() + arguments.seconds
    seed = arguments.first_seed
    while time.monotonic() < end:
        state = random.Random(seed)
        # Large texts take long and are chosen seldom.
        name = state.choice(list(texts) if state.random() < 0.02 else list(corpus()))
        print(f"\r{seed} {name:20}", end="", flush=True)  # what a crash leaves behind
        outcome = attempt(damage(texts[name], state), seed)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        seed += 1
    print(f"\nseeds {arguments.first_seed} to {seed - 1}: {outcomes}")


if __name__ == "__main__":
    main()
