"""Where the code of each kernel has run and was right. Dispatch chooses no kernel on GPUs of a
compute capability for which there is no proof, unless somebody asks for it.

A proof is a run on such a GPU whose results were compared with float64. It is committed in
bench/results, from which `python -m bench.measured` lists it in _measured.json, or `archflash
verify` made it on this machine and keeps it among the user's tables (_user_tables.py). The forward
and the backward pass have proofs of their own.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from archflash import _archflash as _native
from archflash import _measured, _registry, _user_tables

VARIABLE = "ARCHFLASH_UNPROVED"
FORWARD, BACKWARD = "forward", "backward"
KIND = "proofs"  # what the user's table is called


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


PROVED, REFUTED = "proved", "refuted"


def _own_entries(word: str) -> list[tuple[Proof, str]]:
    """What was PROVED or REFUTED on this machine, each with what has changed since, "" for nothing.
    The name of the GPU does not matter, as in proofs that are committed.
    """
    kept = _user_tables.entries(KIND)
    now = _user_tables.software() if kept else {}
    return [
        (Proof(name, of, _capability(entry["key"])), since)
        for entry in kept
        for since in [_user_tables.differences(entry["key"], now)]
        for name, of in _pairs(entry, word)
    ]


def _pairs(entry: dict[str, Any], word: str) -> list[tuple[str, str]]:
    """The (folder, pass) pairs of an entry; none if it is damaged."""
    told = entry.get(word)
    if not isinstance(told, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
        for pair in told
    ):
        return []
    return [(name, of) for name, of in told]


def _capability(key: dict[str, str]) -> tuple[int, int]:
    major, _, minor = key.get("capability", "").partition(".")
    numbers = all(word.isascii() and word.isdecimal() and len(word) < 4 for word in (major, minor))
    return (int(major), int(minor)) if numbers else (0, 0)


def own(word: str = PROVED) -> frozenset[Proof]:
    """What was PROVED or REFUTED on this machine and counts."""
    return frozenset(proof for proof, since in _own_entries(word) if not since)


def keep(
    device: _native.Device,
    passes: Iterable[tuple[str, str]],
    refuted: Iterable[tuple[str, str]] = (),
) -> Path:
    """Adds what was found on a GPU of this machine to what is known of it.

    Args:
        device: the GPU.
        passes: (folder, FORWARD or BACKWARD) pairs that were right.
        refuted: those that were wrong.

    Returns:
        The file.

    Raises:
        ValueError: it cannot be written; the message says what to do.
    """
    right, wrong = {*passes}, {*refuted}

    def merged(entry: dict[str, Any]) -> dict[str, Any]:
        sets = {
            PROVED: ({*_pairs(entry, PROVED)} | right) - wrong,
            REFUTED: ({*_pairs(entry, REFUTED)} | wrong) - right,
        }
        lists = {word: [list(one) for one in sorted(found)] for word, found in sets.items()}
        return {"key": entry["key"], **lists}

    return _user_tables.update(KIND, _user_tables.key_of(device), merged)


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


def proved(
    name: str, capability: tuple[int, int], of: str = FORWARD, elsewhere: bool = True
) -> bool:
    """Whether a kernel may be chosen on GPUs of a compute capability: it was shown right there, or
    needs no proof of its own there, and was not found wrong on this machine; or ARCHFLASH_UNPROVED
    asks for it.

    Args:
        name: the folder.
        capability: of the GPU.
        of: FORWARD or BACKWARD.
        elsewhere: whether a run on a GPU of another capability counts, for kernels that say so.
    """
    proofs = committed()
    if Proof(name, of, capability) in own(REFUTED):
        return asked_for(name)
    if Proof(name, of, capability) in proofs:
        return True
    ran = any((name, of) == proof[:2] for proof in proofs)
    if elsewhere and ran and _registry.description(name).proved_by_any_gpu:
        return True
    return asked_for(name) or Proof(name, of, capability) in own()


def why_not(
    name: str, capability: tuple[int, int], of: str = FORWARD, elsewhere: bool = True
) -> str | None:
    """Why dispatch does not choose a kernel that could serve a call, as a sentence; None if nothing
    speaks against it. The arguments are those of `proved`.
    """
    if proved(name, capability, of, elsewhere):
        return None
    major, minor = capability
    return f"compute capability {major}.{minor}: {_never_ran(name, capability, of)}"


def _never_ran(name: str, capability: tuple[int, int], of: str) -> str:
    what = name if of == FORWARD else f"the backward pass of {name}"
    wanted = Proof(name, of, capability)
    if wanted in own(REFUTED):
        return (
            f"`archflash verify` or `calibrate` found {what} wrong on such a GPU of this machine: "
            f"verify can be run again, and {VARIABLE}={name} takes it all the same"
        )
    if since := next((text for proof, text in _own_entries(PROVED) if proof == wanted), ""):
        said = f"{what} was proved here with other software ({since}); `archflash verify` does so"
        return f"{said} again, and {VARIABLE}={name} takes it at once"
    return (
        f"{what} has never run on such a GPU; `archflash verify` compares it with float64 there, "
        f"in minutes, and {VARIABLE}={name} takes it at once"
    )


_warned: set[tuple[str, str]] = set()
_warning = threading.Lock()


def note(
    name: str, device: _native.Device, chosen: str, elsewhere: bool = True, stacklevel: int = 4
) -> None:
    """Warns, once for each kernel and GPU, that a kernel would serve a call had it a proof.

    Args:
        name: that kernel.
        device: the GPU.
        chosen: who serves the call.
        elsewhere: as for `proved`.
        stacklevel: frames from here to the caller's, for the warning.
    """
    with _warning:
        if (name, device.name) in _warned:
            return
        _warned.add((name, device.name))
    major, minor = device.capability
    of = FORWARD if why_not(name, device.capability, FORWARD, elsewhere) else BACKWARD
    server = "PyTorch serves" if chosen == _registry.TORCH else f"{chosen} serves"
    why = _never_ran(name, device.capability, of).replace("such a GPU", "one", 1)
    warnings.warn(
        f"archflash: {server} calls on {device.name} (compute capability {major}.{minor}) that "
        f"{name} is made for. {why}",
        stacklevel=stacklevel,
    )
