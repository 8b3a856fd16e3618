"""Holds the documents to what the project does: runs their commands and examples, makes their table
of GPUs, and finds links, paths and Makefile targets that do not exist.

    python -m tests.documents             # says what is out of date; exit status 1
    python -m tests.documents --write     # writes outputs and the table anew

A document holds four kinds of fenced blocks; indented blocks are not used, because nothing would
check them:

- ``python``: runs, all blocks of a document in one namespace.
- ``console``: each line that begins with ``$ `` is a command; the lines below it are its output.
- ``sh``: each line is a command without output.
- ``text``: directly below a ``python`` block it is what that prints; elsewhere it is a figure.

In an output ``...`` stands for any characters of a line, and alone in a line for any lines.
Commands that cannot run in a test are in NOT_RUN, each with its reason. Everything else runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from archflash.cli.of_clone import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]

# Documents whose blocks run.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "bench/results/README.md",
    "sim/README.md",
    "tests/README.md",
)
# Documents of which links, paths and Makefile targets are checked only.
NOTES = (
    "CHANGELOG.md",
    "RELEASING.md",
    "SECURITY.md",
    "src/*/*.md",
    "docs/lab/*.md",
    "tests/sim/vectors/README.md",
)

# (how a command begins, why the test does not run it)
NOT_RUN = (
    ("pip install", "it installs packages from the network"),
    ("vllm serve", "it starts a server; tests/servers runs the plug-in"),
    ("sglang serve", "it starts a server; tests/servers runs the plug-in"),
    ("torchrun", "it starts several processes; tests/unit/test_distributed.py runs the example"),
    ("make demo", "it takes a minute; tests/unit/test_demo.py runs parts of it"),
    ("make test", "it runs this test and thousands of others"),
    ("make lint", "it takes a minute and runs beside the tests in continuous integration"),
    ("make day-one", "it needs a GPU of compute capability 10.0 or 10.3"),
    ("compute-sanitizer", "it needs a GPU and NVIDIA's tool"),
    ("python -m bench.day_one", "it needs a GPU, and takes hours with --simulate"),
    ("archflash verify", "it needs a GPU; tests/unit/test_verify.py runs it on the simulator"),
    ("archflash show", "it takes 15 s; tests/unit/test_show.py runs parts of it"),
    ("archflash ladder", "tests/unit/test_ladder.py runs it"),
    ("python -m bench.one_kernel", "it needs nvcc; tests/unit/test_one_kernel.py runs it"),
    ("python -m bench.report", "it rewrites documents; `make lint` runs it with --check"),
    ("python -m bench.measured", "it rewrites a file; `make lint` runs it with --check"),
    ("python -m tests.sim.fuzz", "it runs as long as it is told to"),
    ("python -m tests.properties --executor gpu", "it needs a GPU; `make test` runs some problems"),
    ("python -m tests.soak", "it runs as long as it is told to; tests/unit/test_soak.py runs it"),
    ("python -m tests.others", "it needs others' files; tests/unit/test_others.py has some"),
    ("python -m pytest", "it runs tests, which `make test` does"),
    ("archflash demo", "it takes a minute; tests/unit/test_demo.py runs parts of it"),
)


@dataclass
class Run:
    """Something that a document runs.

    Attributes:
        code: Python source or one command.
        is_python: which of the two.
        expected: the printed lines; None where the document shows no output.
        begin, end: where the output stands, as line numbers of the document from 0; a command
            without output has begin == end.
        line: of the code, for messages.
    """

    code: str
    is_python: bool
    expected: list[str] | None
    begin: int
    end: int
    line: int

    @property
    def excuse(self) -> str | None:
        """Why a test does not run it; None where it does."""
        if self.is_python:
            return None
        command = re.sub(r"^([A-Z_]+=\S+ )+", "", self.code).removeprefix(".venv/bin/")
        return next((why for begin, why in NOT_RUN if command.startswith(begin)), None)


@dataclass
class Block:
    """A fenced block.

    Attributes:
        kind: what stands behind the opening fence.
        begin: number of its first line, from 0.
        lines: what stands between the fences.
    """

    kind: str
    begin: int
    lines: list[str] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number of the closing fence's line."""
        return self.begin + len(self.lines)


def pages(patterns: Sequence[str] = PAGES) -> list[Path]:
    """The documents that some patterns name."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document.

    Raises:
        ValueError: a fence that is not closed.
    """
    found: list[Block] = []
    inside: Block | None = None
    for number, line in enumerate(text.split("\n")):
        if line.startswith("```"):
            if inside is None:
                inside = Block(line[3:].strip(), number + 1)
            else:
                found.append(inside)
                inside = None
        elif inside is not None:
            inside.lines.append(line)
    if inside is not None:
        raise ValueError(f"line {inside.begin}: this fence is not closed")
    return found


def runs(text: str) -> list[Run]:
    """What a document runs, in order.

    Raises:
        ValueError: a block of an unknown kind.
    """
    found: list[Run] = []
    listed = blocks(text)
    lines = text.split("\n")
    for index, block in enumerate(listed):
        if block.kind == "python":
            shown = listed[index + 1] if index + 1 < len(listed) else None
            between = lines[block.end + 1 : shown.begin - 1] if shown else []
            if shown is None or shown.kind != "text" or any(between):
                shown = None
            begin, end = (shown.begin, shown.end) if shown else (block.end, block.end)
            expected = shown.lines if shown else None
            found.append(
                Run("\n".join(block.lines) + "\n", True, expected, begin, end, block.begin + 1)
            )
        elif block.kind == "console":
            for offset, line in enumerate(block.lines):
                number = block.begin + offset
                if line.startswith("$ "):
                    found.append(Run(line[2:], False, [], number + 1, number + 1, number + 1))
                elif not found or found[-1].end != number or found[-1].expected is None:
                    raise ValueError(f"line {number + 1}: output without a command above it")
                else:
                    found[-1].expected.append(line)
                    found[-1].end += 1
        elif block.kind == "sh":
            for offset, line in enumerate(block.lines):
                number = block.begin + offset
                for command in line.partition("  #")[0].split(" && "):
                    if command.strip():
                        place = number + 1
                        found.append(Run(command.strip(), False, None, place, place, place))
        elif block.kind != "text":
            raise ValueError(
                f"line {block.begin}: a block of the kind {block.kind!r}; "
                "use python, console, sh or text"
            )
    return found


def matches(expected: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether an output is the one that a document shows, where ``...`` stands for anything."""
    pattern = ""
    for line in expected:
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in printed)) is not None


def printed_by_python(code: str, names: dict[str, object]) -> list[str]:
    """Runs an example and returns the lines that it prints.

    Args:
        code: the example; where there is no GPU, "cuda" in it becomes "cpu".
        names: its namespace, which the example changes.
    """
    import torch

    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"').replace('"cuda:0"', '"cpu"')
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<example>", "exec"), names)
    return out.getvalue().rstrip("\n").split("\n")


def printed_by_command(command: str) -> list[str]:
    """Runs a command in this process and returns the lines that it prints.

    Raises:
        ValueError: it is neither `archflash` nor a Python module.
        RuntimeError: it ends with an exit status other than 0.
    """
    words = shlex.split(command)
    variables: dict[str, str] = {}
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0].endswith("python") and words[1:2] == ["-m"]:
        module, arguments = words[2], words[3:]
    elif words[0] == "archflash":
        module, arguments = "archflash", words[1:]
    else:
        raise ValueError(f"{command}: the test runs archflash and python -m MODULE only")
    out = io.StringIO()
    status: object = 0
    with contextlib.redirect_stdout(out), _environment(variables), _arguments(module, arguments):
        try:
            if module == "archflash":
                status = importlib.import_module("archflash.__main__").main(arguments)
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            status = error.code
    if status not in (0, None):
        raise RuntimeError(f"{command}: exit status {status}\n{out.getvalue()}")
    return out.getvalue().rstrip("\n").split("\n")


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _arguments(module: str, arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [module, *arguments]
    try:
        yield
    finally:
        sys.argv = before


def with_fresh_outputs(text: str) -> str:
    """A document with the outputs that its commands and examples print now.

    Files that commands write land in the current folder. An output that matches stays as it is.

    Raises:
        ValueError: an output with ``...`` no longer matches: that has to be mended by hand.
    """
    lines = text.split("\n")
    changes: list[tuple[Run, list[str]]] = []
    names: dict[str, object] = {}
    for run in runs(text):
        if run.excuse is not None:
            continue
        printed = (
            printed_by_python(run.code, names) if run.is_python else printed_by_command(run.code)
        )
        if run.expected is None or matches(run.expected, printed):
            continue
        if any("..." in line for line in run.expected):
            raise ValueError(
                f"line {run.line}: the output is not the one shown, which has '...'; it is now\n"
                + "\n".join(printed)
            )
        changes.append((run, printed))
    for run, printed in reversed(changes):
        lines[run.begin : run.end] = printed
    return "\n".join(lines)


# --- which kernel serves which GPU ---

GPU_TABLE = re.compile(
    r"(?<=^<!-- kernels-by-gpu -->\n).*?(?=^<!-- /kernels-by-gpu -->)", re.DOTALL | re.MULTILINE
)


def with_fresh_gpu_table(text: str) -> str:
    """A document whose table of GPUs says what dispatch chooses now."""
    return GPU_TABLE.sub(lambda _: gpu_table() + "\n", text)


def gpu_table() -> str:
    """The table of what a plain call runs on each known GPU, as markdown.

    Every cell is what `archflash.explain` chooses for a call of that kind. GPUs with equal cells
    share a row.
    """
    import torch
    from bench.measured import rows_by_capability
    from bench.results import RESULTS_FOLDER

    import archflash
    from archflash import _archflash as native

    def decide(
        device: str, dtype: torch.dtype, shape: Sequence[int], **options: object
    ) -> archflash.Decision:
        batch, heads_q, heads_kv, rows, keys, dim = shape
        q = torch.empty(batch, heads_q, rows, dim, dtype=dtype, device="meta")
        k = torch.empty(batch, heads_kv, keys, dim, dtype=dtype, device="meta")
        return archflash.explain(q, k, k, device=device, **options)  # type: ignore[arg-type]

    def chosen(device: str, dtype: torch.dtype, shape: Sequence[int], **options: object) -> str:
        decision = decide(device, dtype, shape, **options)
        compiled_by_driver = decision.plan is not None and "PTX" in decision.plan.code
        return decision.chosen + (" from PTX" if compiled_by_driver else "")

    large, small, decode = (
        (4, 32, 32, 4096, 4096, 128),
        (1, 12, 12, 512, 512, 64),
        (8, 32, 32, 1, 8192, 128),
    )
    rows = rows_by_capability(RESULTS_FOLDER).values()
    measured = {row["gpu"] for found in rows for row in found}
    groups: dict[tuple[str, ...], list[native.KnownDevice]] = {}
    for known in native.known_devices():
        name = known.device.name

        def sixteen_bits(shape: Sequence[int], name: str = name, **options: object) -> str:
            fp16, bf16 = (
                chosen(name, dtype, shape, **options) for dtype in (torch.float16, torch.bfloat16)
            )
            return fp16 if fp16 == bf16 else f"fp16 {fp16}, bf16 {bf16}"

        big, little = sixteen_bits(large, causal=True), sixteen_bits(small, causal=True)
        e4m3, e5m2 = (
            chosen(name, dtype, large, causal=True)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        )
        cells = (
            chosen(name, torch.float32, large, causal=True),
            big if big == little else f"{big}; small calls: {little}",
            sixteen_bits(large, causal=True, window=(1024, 0), softcap=30.0),
            sixteen_bits(decode),
            e4m3 if e4m3 == e5m2 else f"{e4m3} (e5m2: {e5m2})",
        )
        groups.setdefault(cells, []).append(known)
    head = (
        "GPU (compute capability)",
        "fp32",
        "fp16, bf16",
        "with window or softcap",
        "decoding, 1 query row",
        "FP8",
        "measured",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for cells, group in groups.items():
        by_capability: dict[str, list[str]] = {}
        for known in group:
            capability = ".".join(map(str, known.device.capability))
            by_capability.setdefault(capability, []).append(known.device.name)
        names = "; ".join(f"{', '.join(n)} ({c})" for c, n in by_capability.items())
        on_card = ", ".join(
            known.device.name for known in group if measured & {known.device.name, *known.aliases}
        )
        lines.append(f"| {names} | {' | '.join(cells)} | {on_card or 'unmeasured'} |")
    return "\n".join(lines)


# --- what a document names ---


def make_targets() -> set[str]:
    """The targets of the Makefile that a person may name."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def named_targets(text: str) -> set[str]:
    """The Makefile targets that a document names, as code or in a block."""
    inline = re.findall(r"`make ([a-z0-9-]+)[^`]*`", text)
    commands = [run.code for run in runs(text)] if "```" in text else []
    return {*inline, *(m[1] for c in commands if (m := re.match(r"make ([a-z0-9-]+)", c)))}


def missing_links(page: Path, text: str) -> list[str]:
    """The links of a document that lead to no file, or to no heading of one."""
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):  # https, mailto
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and heading not in headings(file.read_text())):
            missing.append(target)
    return missing


def headings(text: str) -> set[str]:
    """The headings of a document as a link spells them."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


PATH = re.compile(
    r"(?<![\w/.-])((?:src|sim|tests|bench|docs|python/archflash|_build)/[\w./*-]*[\w*/])"
)


def missing_paths(text: str) -> list[str]:
    """The files and folders that a document names as code, and the tests that it names anywhere,
    that do not exist.
    """
    named = []
    for code in re.findall(r"`([^`\n]+)`", text):
        named += PATH.findall(code)
    for run in runs(text) if "```" in text else []:
        named += PATH.findall(run.code)
    missing = [
        path
        for path in dict.fromkeys(named)
        if not any(ROOT.glob(path.rstrip("/"))) and not made_later(path)
    ]
    there = {path.name for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")}
    tests = dict.fromkeys(re.findall(r"\btest_\w+\.py\b", text))
    return missing + [name for name in tests if name not in there]


def made_later(path: str) -> bool:
    """Whether a document names a file that a command makes."""
    return bool(re.fullmatch(r"bench/results/[^/]*-day-one\.csv|bench/results/\*.*", path))


def missing_commands(text: str) -> list[str]:
    """The Python modules and commands of archflash that a document names and that do not exist."""
    codes = [*re.findall(r"`([^`\n]+)`", text), *(run.code for run in runs(text))]
    missing = []
    for code in codes:
        for module in re.findall(r"python3? -m ([\w.]+)", code):
            if importlib.util.find_spec(module) is None:
                missing.append(module)
        command = re.match(r"archflash (\w+)", code)
        name = command[1] if command else next(iter(PROGRAMS))
        if name not in PROGRAMS and importlib.util.find_spec(f"archflash.cli.{name}") is None:
            missing.append(f"archflash {name}")
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks or writes; see the top of this file."""
    write = "--write" in (sys.argv[1:] if arguments is None else arguments)
    stale = False
    sys.path.insert(0, str(ROOT))
    for page in pages():
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder, _inside(folder):
            fresh = with_fresh_outputs(with_fresh_gpu_table(text))
        if fresh == text:
            continue
        if write:
            page.write_text(fresh)
        else:
            stale = True
        print(f"{page.relative_to(ROOT)}: {'written' if write else 'out of date'}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
