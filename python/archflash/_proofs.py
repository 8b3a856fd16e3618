"""Where the code of each kernel has run and was right. Dispatch chooses no kernel on GPUs of a
compute capability for which there is no proof, unless somebody asks for it.

A proof is a run on such a GPU whose results were compared with float64. It is committed in
bench/results, from which `python -m bench.measured` lists it in _measured.json, or it was made on
this machine and stands in `own_file()`. The forward and the backward pass have proofs of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from archflash import _archflash as _native
from archflash import _measured, _registry

VARIABLE = "ARCHFLASH_UNPROVED"
FORWARD, BACKWARD = "forward", "backward"


class Proof(NamedTuple):
    """That one pass of a folder's kernels was right on GPUs of a compute capability.

    Attributes:
        implementation: the folder.
        of: FORWARD or BACKWARD.
        capability: compute capability of the GPU.
    """

    implementation: str
    of: str
    capability: tuple[int, int]

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Proof:
        """The proof that an entry of a file states."""
        major, minor = entry["capability"]
        return cls(str(entry["implementation"]), str(entry["pass"]), (int(major), int(minor)))


@cache
def committed() -> frozenset[Proof]:
    """The proofs that came with archflash."""
    entries = json.loads(_measured.FILE.read_text())["proofs"]
    return frozenset(Proof.read(entry) for entry in entries)


def own_file() -> Path | None:
    """The file of the proofs of this machine; None for a user without a home folder.

    It holds `{"proofs": [{"implementation": "blackwell_dc", "pass": "forward", "capability":
    [10, 0], "version": "0.1.0"}]}`. An entry counts for the version of archflash that it names.
    """
    with contextlib.suppress(RuntimeError):
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data) / "archflash" / "proofs.json"
    return None


@cache
def own() -> frozenset[Proof]:
    """The proofs of this machine, read once."""
    file = own_file()
    if file is None or not file.exists():
        return frozenset()
    try:
        entries = json.loads(file.read_text())["proofs"]
        return frozenset(Proof.read(x) for x in entries if x["version"] == _native.version)
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"archflash: {file} is no list of proofs ({type(error).__name__}: {error}) and does "
            "not count: delete it",
            stacklevel=2,
        )
        return frozenset()


def asked_for(name: str) -> bool:
    """Whether ARCHFLASH_UNPROVED asks for a kernel without a proof.

    Raises:
        ValueError: it names what is no kernel of this build.
    """
    said = os.environ.get(VARIABLE, "")
    if said in ("", "0", "1"):
        return said == "1"
    names = [word.strip() for word in said.split(",")]
    if unknown := [word for word in names if word not in _registry.kernel_names()]:
        raise ValueError(
            f"{VARIABLE}={said!r}: {unknown[0]!r} is no kernel of this build: give 1 for all, or "
            f"names by comma: {', '.join(_registry.kernel_names())}"
        )
    return name in names


def proved(name: str, capability: tuple[int, int], of: str = FORWARD) -> bool:
    """Whether a kernel may be chosen on GPUs of a compute capability: it was shown right there, it
    needs no proof of its own there, or ARCHFLASH_UNPROVED asks for it.

    Args:
        name: the folder.
        capability: of the GPU.
        of: FORWARD or BACKWARD.
    """
    proofs = committed()
    if Proof(name, of, capability) in proofs:
        return True
    elsewhere = any((name, of) == proof[:2] for proof in proofs)
    if elsewhere and _registry.description(name).proved_by_any_gpu:
        return True
    return asked_for(name) or Proof(name, of, capability) in own()


def why_not(name: str, capability: tuple[int, int], of: str = FORWARD) -> str | None:
    """Why dispatch does not choose a kernel that could serve a call, as a sentence; None if nothing
    speaks against it.
    """
    if proved(name, capability, of):
        return None
    major, minor = capability
    return f"compute capability {major}.{minor}: {_never_ran(name, of)}"


def _never_ran(name: str, of: str) -> str:
    what = name if of == FORWARD else f"the backward pass of {name}"
    run = f"bench.day_one --implementation {name}" if of == FORWARD else "bench.gradients"
    return (
        f"{what} has never run on such a GPU; `python -m {run}` in a checkout of archflash "
        f"compares it with float64 there, and {VARIABLE}={name} takes it at once"
    )


_warned: set[tuple[str, str]] = set()
_warning = threading.Lock()


def note(name: str, device: _native.Device, chosen: str, stacklevel: int = 4) -> None:
    """Warns, once for each kernel and GPU, that a kernel would serve a call had it a proof.

    Args:
        name: that kernel.
        device: the GPU.
        chosen: who serves the call.
        stacklevel: frames from here to the caller's, for the warning.
    """
    with _warning:
        if (name, device.name) in _warned:
            return
        _warned.add((name, device.name))
    major, minor = device.capability
    of = FORWARD if why_not(name, device.capability) else BACKWARD
    server = "PyTorch serves" if chosen == _registry.TORCH else f"{chosen} serves"
    warnings.warn(
        f"archflash: {server} calls on {device.name} (compute capability {major}.{minor}) that "
        f"{name} is made for. {_never_ran(name, of).replace('such a GPU', 'one', 1)}",
        stacklevel=stacklevel,
    )
