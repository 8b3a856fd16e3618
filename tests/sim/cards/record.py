"""Records what this machine's GPU gives for every case:
``python3 -m tests.sim.cards.record [--out FOLDER]``.

Needs archflash, NumPy and a GPU, no compiler. Writes ``<gpu>.npz``, the bits of the recorded rows
and of the log-sum-exps, and ``<gpu>.json``, what they were made with; both are to be committed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import archflash
from archflash.sim._attention import ptx_text

from ..ptx_hash import ptx_hash
from .cases import CASES, Case, bits

FOLDER = Path(__file__).parent


def record(case: Case) -> tuple[dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """The case's arrays by name, and the launches of its plan."""
    tensors, options = case.call("cuda")
    out, lse = archflash.attention(
        *tensors, implementation=case.implementation, return_lse=True, **options
    )
    again = archflash.attention(*tensors, implementation=case.implementation, **options)
    if not torch.equal(out, again):
        raise RuntimeError(f"{case.name}: two runs differ")
    plan = archflash.explain(
        *tensors, implementation=case.implementation, return_lse=True, **options
    ).plan
    assert plan is not None
    arrays = {
        f"{case.name}/out": bits(case.rows(out.cpu())),
        f"{case.name}/lse": bits(lse.cpu().reshape(-1)[:: case.kept]),
    }
    return arrays, launches(plan)


def launches(plan: Any) -> list[dict[str, Any]]:
    """What a plan launches, as far as a recording names it; `ptx` is the hash of the text from
    which the kernel's machine code is assembled.
    """
    names = ("kernel", "grid", "block", "shared_bytes")
    return [
        {name: row[name] for name in names}
        | {"ptx": ptx_hash(ptx_text(row["image"], plan.device.capability), row["kernel"])}
        for row in plan.to_dict()["launches"]
    ]


def driver_version() -> str:
    """Of the kernel's driver; empty where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.splitlines()[0].strip() if answer else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plans = {}
    for case in CASES:
        of_case, plans[case.name] = record(case)
        arrays |= of_case
    gpu = torch.cuda.get_device_name()
    label = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    about = {
        "gpu": gpu,
        "driver": driver_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": os.environ.get("ARCHFLASH_COMMIT", ""),
        "archflash": archflash.__version__,
        "torch": torch.__version__,
        "plans": plans,
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{label}.npz", **arrays)
    (folder / f"{label}.json").write_text(json.dumps(about) + "\n")
    size = (folder / f"{label}.npz").stat().st_size
    print(f"{gpu}: {len(CASES)} cases, {size} bytes in {folder / label}.npz")


if __name__ == "__main__":
    main()
