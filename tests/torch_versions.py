"""Runs the tests of what depends on torch's version with one version after another, and notes in
docs/compatibility.md those that pass:

    python -m tests.torch_versions 2.6.0 2.10.0 newest nightly

Each is fetched into a folder of its own and deleted after its tests; with ``--keep FOLDER`` it
stays there and serves the next run. It is PyPI's build for CUDA, because older versions have no
other, without NVIDIA's libraries (several GB), which a CPU does not need.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import compatibility
from .unit import stub_cuda

ROOT = Path(__file__).resolve().parents[1]
UNIT_TESTS = (
    "api", "causal_bias", "compat", "compat_xformers", "dynamic_shapes", "export", "flops",
    "other_ways", "quantize", "reference", "sdpa_semantics", "torch_implementation", "tracing",
    "transforms",
)  # fmt: skip
TESTS = [f"tests/unit/test_{name}.py" for name in UNIT_TESTS]
TESTS.append("tests/core_set/test_pytorch_operators.py")


NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"


def requirement(version: str) -> list[str]:
    """What pip is to install."""
    if version == "nightly":
        return ["--pre", "--index-url", NIGHTLY, "torch"]
    return ["torch" if version == "newest" else f"torch=={version}"]


def fetched(version: str, folder: Path) -> Path:
    """The folder of a version, for PYTHONPATH. One that exists is complete; one without a number is
    fetched each time.
    """
    site = folder / f"torch-{version}"
    if version in ("newest", "nightly"):
        shutil.rmtree(site, ignore_errors=True)
    if not site.is_dir():
        print(f"== fetching torch {version} (up to 900 MB)", flush=True)
        new = folder / f"torch-{version}.new"
        shutil.rmtree(new, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir"]
        subprocess.run([*command, "--target", new, *requirement(version)], check=True)
        stub_cuda.main(str(new))
        new.rename(site)
    return site


def passes(site: Path) -> tuple[int, int] | None:
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
    return compatibility.counts(done.stdout) if done.returncode == 0 else None


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
            if version == "newest":
                (found,) = importlib.metadata.distributions(name="torch", path=[str(site)])
                version = found.version
        if counts is None:
            failed.append(version)
        elif version != "nightly":  # which is gone the next day
            passed, skipped = counts
            tested = "what depends on torch's version"
            compatibility.note(
                "torch", version, tested, torch=version, passed=passed, skipped=skipped
            )
    if failed:
        print(f"tests failed with torch {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
