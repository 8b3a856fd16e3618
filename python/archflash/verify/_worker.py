"""The process of one job: `python -m archflash.verify._worker FD`.

It reads two lines of JSON from stdin: the setup, and, when its turn has come, the job and those of
its items that are wanted. To the file descriptor FD it writes a line of JSON when it begins an item
and when it has ended it. What it prints is kept for the record of a job that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from typing import Any

import torch

from archflash import reference
from archflash._errors import ForcedImplementationError, LaunchError
from archflash.verify import _jobs
from archflash.verify._setup import Item, NotHereError, Setup, Told
from archflash.verify._wrong import WrongError

OK, WRONG, FAILED, NOT_HERE, NOT_RUN = "ok", "wrong", "failed", "not here", "not run"
READY = "ready"


def main() -> int:
    """Serves one job; exit status 1 where CUDA does not work any more."""
    answer = os.fdopen(int(sys.argv[1]), "w")

    def tell(**told: Any) -> None:
        answer.write(json.dumps(told) + "\n")
        answer.flush()  # what is known survives a crash

    first = json.loads(sys.stdin.readline())
    setup = Setup.from_dict(first["setup"])
    if first["ahead"]:
        with contextlib.suppress(Exception):  # it fails again in an item, which tells it
            warm_up(setup)
    tell(said=READY)
    line = sys.stdin.readline()
    if not line:  # it is not needed
        return 0
    asked = json.loads(line)
    if setup.simulate:
        os.environ["ARCHFLASH_SIM_DEVICE"] = setup.gpu
    else:
        torch.cuda.set_device(setup.device)  # events are recorded on the current one
    job = next(job for job in _jobs.make_jobs(setup) if job.name == asked["job"])
    for item in job.named(asked["items"]):
        tell(said="begin", item=item.name)
        began = time.perf_counter()
        told, alive = try_item(item, setup)
        seconds = round(time.perf_counter() - began, 3)
        tell(said="end", item=item.name, seconds=seconds, **told)
        if not alive:
            return 1
    return 0


def warm_up(setup: Setup) -> None:
    """Opens the GPU and loads PyTorch's kernels of the comparison with float64, which takes seconds
    and belongs to no item.
    """
    torch.cuda.set_device(setup.device)
    q, k, v = (torch.randn(1, 2, 40, 64, device=setup.device).half() for _ in range(3))
    out, lse = reference.attention(q, k, v, causal=True)
    reference.check(out.half(), out, reference.baseline(q, k, v, causal=True))
    reference.check_lse(lse.float(), lse)
    setup.synchronize()


def try_item(item: Item, setup: Setup) -> tuple[dict[str, Any], bool]:
    """Tries an item.

    Returns:
        Its status and more, and whether CUDA still works in this process.
    """
    told: dict[str, Any]
    try:
        with torch.no_grad():
            found = item.run(setup)
        setup.synchronize()
        return as_dict(found), True
    except (NotHereError, ForcedImplementationError) as error:  # refused before any launch
        return {"status": NOT_HERE, "detail": str(error)}, True
    except WrongError as error:
        told = {"status": WRONG, "detail": str(error), "where": error.where}
    except Exception as error:  # any exception is the item's result
        if is_out_of_memory(error):
            told = {"status": NOT_RUN, "detail": f"the GPU's memory is too full: {error}"[:2000]}
        else:
            traceback.print_exc()
            told = {"status": FAILED, "detail": f"{type(error).__name__}: {error}"[:2000]}
    try:
        setup.synchronize()
    except Exception as error:
        told["detail"] += f"; then {type(error).__name__}: {error}"[:500]
        return told, False
    return told, True


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU's memory was too full, by the words of torch, CUDA and cuBLAS."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = isinstance(error, RuntimeError | LaunchError)
    return words and re.search("out of memory|ALLOC_FAILED", str(error)) is not None


def as_dict(found: Told) -> dict[str, Any]:
    return {
        "status": OK, "detail": found.note, "kernels": list(found.kernels),
        "numbers": found.numbers,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
