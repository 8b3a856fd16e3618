"""What a run says of each kernel, and the archive for people who collect such runs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from archflash import _archflash as _native
from archflash import _proofs, _user_tables
from archflash.verify import _worker
from archflash.verify._run import BAD, NOT_RUN, Row
from archflash.verify._setup import Setup
from archflash.verify._wrong import as_text

PROVED, FAILED, UNTRIED = "proved", "failed", "not run"
FORMAT = 1  # of the archive
PASSES = {_proofs.FORWARD: "", _proofs.BACKWARD: " backward"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a run says of one pass of a kernel.

    Attributes:
        kernel: the folder.
        of: FORWARD or BACKWARD.
        said: PROVED, FAILED or UNTRIED.
        right: items that went well.
        tried: items that could be tried here.
        why: the first failure, or what was not run.
    """

    kernel: str
    of: str
    said: str
    right: int
    tried: int
    why: str = ""

    def __str__(self) -> str:
        counted = f"{self.right} of {self.tried} right" if self.tried else "nothing tried"
        why = f"; {self.why}" if self.why else ""
        return f"{self.said:<8} {self.kernel}{PASSES[self.of]}: {counted}{why}"


def verdicts(
    rows: Sequence[Row],
    wanted: Iterable[tuple[str, str, str]],
    unfinished: Iterable[tuple[str, str, str]] = (),
) -> list[Verdict]:
    """What the rows say of each kernel.

    Args:
        rows: of a run.
        wanted: (kernel, pass, part) triples without which a pass is not proved.
        unfinished: (kernel, pass, job) triples of the jobs that did not come to their end, with
            which it is not proved either.
    """
    left = [*unfinished]
    parts: dict[tuple[str, str], set[str]] = {}
    for kernel, of, part in wanted:
        parts.setdefault((kernel, of), set()).add(part)
    found = []
    for (kernel, of), needed in parts.items():
        own = [row for row in rows if (row.kernel, row.of) == (kernel, of)]
        right = [row for row in own if row.status == _worker.OK]
        bad = [row for row in own if row.status in BAD]
        left_out = [row for row in own if row.status == NOT_RUN]
        missing = sorted(needed - {row.part for row in own if row.status != NOT_RUN})
        jobs = [name for kernel_of, pass_of, name in left if (kernel_of, pass_of) == (kernel, of)]
        said, why = PROVED, ""
        if bad:
            said, why = FAILED, f"the first: {bad[0].item} ({bad[0].status})"
        elif left_out or missing or jobs or not right:
            said, why = UNTRIED, "nothing could be tried here"
            if missing:
                why = f"without {', '.join(missing)}"
            elif left_out:
                why = f"{len(left_out)} not run, the first: {left_out[0].item}"
            elif jobs:
                why = f"{len(jobs)} jobs did not come to their end, the first: {jobs[0]}"
        found.append(Verdict(kernel, of, said, len(right), len(right) + len(bad), why))
    return found


@cache
def resources_of(kernel: str) -> list[dict[str, dict[str, Any]]]:
    """For each image of a folder the kernels in it, by target."""
    folder = resources.files("archflash") / "_kernels" / kernel
    files = folder.iterdir() if folder.is_dir() else ()
    return [json.loads(file.read_text()) for file in files if file.name.endswith(".json")]


def kernel_names(kernel: str) -> set[str]:
    """All kernels of a folder."""
    images = resources_of(kernel)
    return {name for image in images for kernels in image.values() for name in kernels}


def compiled(kernel: str, capability: tuple[int, int]) -> set[str]:
    """The kernels of a folder whose machine code a GPU of a compute capability would load."""
    picked = ((x, _native.pick_target(list(x), capability)) for x in resources_of(kernel))
    return {name for image, target in picked if target is not None for name in image[target]}


def coverage(rows: Sequence[Row], setup: Setup) -> dict[str, list[str]]:
    """For each folder the kernels that this GPU would load and that were not launched."""
    ran = {kernel for row in rows if row.status == _worker.OK for kernel in row.kernels}
    return {name: sorted(compiled(name, setup.capability) - ran) for name in setup.kernels}


def failure_lines(row: Row) -> list[str]:
    """A failure for people."""
    lines = [f"{row.job}: {row.item}: {row.status.upper()}: {row.detail}"]
    return lines + [f"    {line}" for line in as_text(row.where)]


# --- the archive ---


def facts(setup: Setup, machine: Mapping[str, str]) -> dict[str, str]:
    """The machine, in words by name. Nothing tells its owner or name.

    Args:
        setup: of the run.
        machine: what torch says of the GPU.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": f"{now:%Y-%m-%dT%H:%MZ}", "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), **_user_tables.software(),
        "cuda": str(torch.version.cuda), "gpu": setup.gpu,
        "capability": ".".join(map(str, setup.capability)), "kernels": " ".join(setup.kernels),
        "full": str(setup.full), **machine,
    }  # fmt: skip


def nvidia_smi() -> str:
    """What `nvidia-smi -q` says, without numbers by which a card or a program can be recognized;
    "" where there is none.
    """
    try:
        done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    kept, left_out = [], -1
    for line in done.stdout.splitlines():
        depth = len(line) - len(line.lstrip())
        if left_out >= 0 and line.strip() and depth <= left_out:
            left_out = -1
        if re.match(r"\s*Processes\b", line):
            left_out = depth
        private = re.search(r"UUID|Serial|PDI|GUID|Bus Id|Timestamp|Inforom|Clique"
                            r"|Host ID|Slot Number|Tray|Board ID|MAC\b", line)  # fmt: skip
        if left_out < 0 and not private:
            kept.append(line)
    return "\n".join(kept) + "\n"


def without_names(text: str) -> str:
    """A text without the folders and the name of this machine, which may name a person."""
    names = {str(Path.cwd()): "FOLDER", sys.prefix: "PREFIX", sys.base_prefix: "PREFIX"}
    with contextlib.suppress(RuntimeError):
        names[str(Path.home())] = "HOME"
    names[platform.node()] = "MACHINE"
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 1:  # "/" is in all texts
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], text)
    return text


def write_archive(
    file: Path, told: Mapping[str, str], rows: Sequence[Row], said: Sequence[Verdict]
) -> None:
    """Writes one archive: what was found (verify.json), failures for people, nvidia-smi -q."""
    rows = [dataclasses.replace(row, detail=without_names(row.detail)) for row in rows]
    content = {
        "format": FORMAT, "facts": dict(told), "verdicts": [dataclasses.asdict(x) for x in said],
        "rows": [dataclasses.asdict(row) for row in rows],
    }  # fmt: skip
    failures = [line for row in rows if row.status in BAD for line in failure_lines(row)]
    texts = {
        "verify.json": json.dumps(content, indent=1) + "\n",
        "failures.txt": "\n".join([*failures, ""]),
        "nvidia-smi.txt": without_names(nvidia_smi()),
    }
    with tarfile.open(file, "w:gz") as archive:
        for name, text in texts.items():
            if text:
                data = text.encode()
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """How many items ended in each way."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.status] = found.get(row.status, 0) + 1
    return found
