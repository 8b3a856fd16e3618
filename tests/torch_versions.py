"""Runs the tests of what depends on torch's version with one version after another, and notes in
docs/torch_versions.md those that pass:

    python -m tests.torch_versions 2.6.0 2.10.0

Each is fetched into a folder of its own and deleted after its tests; with ``--keep FOLDER`` it
stays there and serves the next run. It is PyPI's build for CUDA, because older versions have no
other, without NVIDIA's libraries (several GB), which a CPU does not need.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .unit import stub_cuda

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "torch_versions.md"
UNIT_TESTS = (
    "api", "causal_bias", "compat", "export", "flops", "other_ways", "quantize", "reference",
    "sdpa_semantics", "torch_implementation", "tracing", "transforms",
)  # fmt: skip
TESTS = [f"tests/unit/test_{name}.py" for name in UNIT_TESTS]
TESTS.append("tests/core_set/test_pytorch_operators.py")

HEAD = """\
# Versions of torch that passed

`make test-torch TORCH=VERSION` runs the tests of what depends on torch's version (torch.compile,
export, autograd, transforms, PyTorch's own operators) with that version on a CPU, and notes here
that none failed. Skipped are tests of what the version does not have, and of other packages.

| torch | Python | passed | skipped | date |
| --- | --- | --- | --- | --- |
"""


def fetched(version: str, folder: Path) -> Path:
    """The folder of a version, for PYTHONPATH. One that exists is complete."""
    site = folder / f"torch-{version}"
    if not site.is_dir():
        print(f"== fetching torch {version} (up to 900 MB)", flush=True)
        new = folder / f"torch-{version}.new"
        shutil.rmtree(new, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir"]
        subprocess.run([*command, "--target", new, f"torch=={version}"], check=True)
        stub_cuda.main(str(new))
        new.rename(site)
    return site


def passes(site: Path) -> dict[str, str] | None:
    """How many tests passed and were skipped; None if one failed."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *TESTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, flush=True)
    if done.returncode != 0:
        return None
    counts = re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])
    return {"skipped": "0"} | {word: number for number, word in counts}


def note(version: str, counts: dict[str, str]) -> None:
    """Writes a version's row of the page anew, which also holds those of earlier runs."""
    python = ".".join(platform.python_version_tuple()[:2])
    today = str(datetime.date.today())
    cells = [version, python, counts["passed"], counts["skipped"], today]
    old = re.findall(r"^\| \d.*\|$", PAGE.read_text(), re.MULTILINE) if PAGE.exists() else []
    rows = [row for row in old if not row.startswith(f"| {version} ")]
    rows.append(f"| {' | '.join(cells)} |")
    rows.sort(key=lambda row: [int(number) for number in re.findall(r"\d+", row)])
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="such as 2.6.0")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where torch is kept")
    arguments = parser.parse_args()
    failed = []
    for version in arguments.versions:
        with tempfile.TemporaryDirectory() as temporary:
            site = fetched(version, arguments.keep or Path(temporary))
            counts = passes(site)
        if counts is None:
            failed.append(version)
        else:
            note(version, counts)
    if failed:
        print(f"tests failed with torch {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
