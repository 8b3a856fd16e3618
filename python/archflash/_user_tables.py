"""The files in which commands keep what they found on this machine: what `archflash verify` proved
and what `archflash calibrate` measured.

Here is decided where these files are, for which machine an entry counts, and how they are read and
written. A file is `{"entries": [{"key": {...}, ...}]}`, one entry for each key; what else an entry
holds is its reader's affair.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from archflash import _archflash as _native
from archflash import _posix

VARIABLE = "ARCHFLASH_TABLES"  # names another folder than that of the user's home

_log = logging.getLogger("archflash")

Entry = dict[str, Any]
Key = dict[str, str]


def folder() -> Path | None:
    """The folder of the files; None for a user without a home folder."""
    if given := os.environ.get(VARIABLE):
        with contextlib.suppress(RuntimeError):  # "~" of a user without a home
            return Path(given).expanduser()
        return Path(given)
    with contextlib.suppress(RuntimeError):
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data) / "archflash"
    return None


def file_of(kind: str) -> Path | None:
    """The file of one kind of entries, such as "proofs"; None where there is no folder."""
    where = folder()
    return None if where is None else where / f"{kind}.json"


# --- keys ---


def driver_version() -> str:
    """The version of the NVIDIA driver, "none" where there is no driver."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text):
            return match[1]
    cuda = _native.driver_status().cuda_version  # WSL has no such file
    return f"for CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else "none"


@cache
def software() -> Mapping[str, str]:
    """The part of a key that is the same for all GPUs of this machine."""
    return {
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "archflash": _native.version,
    }


def key_of(device: _native.Device, **more: str) -> Key:
    """The key of what is found on a GPU of this machine.

    Args:
        device: the GPU, as the driver describes it.
        more: what else the findings depend on, by name.
    """
    major, minor = device.capability
    return {"gpu": device.name, "capability": f"{major}.{minor}", **software(), **more}


def differences(key: Mapping[str, str], now: Mapping[str, str]) -> str:
    """In which of the words of `now` a key differs, as text: "driver 580.1, now 590.2"; "" if in
    none.
    """
    return "; ".join(
        f"{name} {key.get(name, 'unknown')}, now {word}"
        for name, word in now.items()
        if key.get(name) != word
    )


# --- files ---


@cache
def entries(kind: str) -> tuple[Entry, ...]:
    """All entries of a kind, whatever their keys. The file is read once in a process; a damaged or
    unreadable one counts as empty, which is logged.
    """
    file = file_of(kind)
    try:
        return () if file is None else _read(file)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except PermissionError as error:
        _log.info("%s cannot be read (%s)", file, error)
        return ()
    except (OSError, ValueError) as error:
        _log.warning("%s does not count (%s: %s): delete it", file, type(error).__name__, error)
        return ()


def _read(file: Path) -> tuple[Entry, ...]:
    """The entries of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    try:
        told = json.loads(file.read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    listed = told.get("entries") if isinstance(told, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("key"), dict)
        and all(isinstance(word, str) for word in entry["key"].values())
        for entry in listed
    ):
        raise ValueError("it is no list of entries with keys")
    return tuple(listed)


def put(kind: str, entry: Entry) -> Path:
    """Writes an entry, in place of one with the same key.

    Returns:
        The file.

    Raises:
        ValueError: there is no place that can be written; the message says what to do.
    """
    return _change(kind, lambda old: [*(x for x in old if x["key"] != entry["key"]), entry])


def update(kind: str, key: Key, change: Callable[[Entry], Entry]) -> Path:
    """Changes the entry of a key, while no other process can.

    Args:
        kind: of the entry.
        key: its key.
        change: from the entry as it is in the file, which has nothing but the key if it is new, to
            what it becomes.

    Returns:
        The file.

    Raises:
        ValueError: as for `put`.
    """

    def changed(old: Iterable[Entry]) -> list[Entry]:
        known = [*old]
        mine = next((entry for entry in known if entry["key"] == key), {"key": key})
        return [*(entry for entry in known if entry["key"] != key), change(mine)]

    return _change(kind, changed)


def forget(kind: str, chosen: Callable[[Entry], bool] = lambda entry: True) -> Path:
    """Takes entries out, by default all.

    Returns:
        The file.

    Raises:
        ValueError: as for `put`.
    """
    return _change(kind, lambda old: [entry for entry in old if not chosen(entry)])


def check_writable(kind: str) -> None:
    """Raises what `put` would raise, and changes nothing."""
    _change(kind, list)


def _change(kind: str, change: Callable[[Iterable[Entry]], list[Entry]]) -> Path:
    file = file_of(kind)
    if file is None:
        raise ValueError(f"there is no home folder to write to: set {VARIABLE} to a folder")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            try:
                old = _read(file)
            except (FileNotFoundError, ValueError):  # nobody can use a damaged file
                old = ()
            _replace(file, json.dumps({"entries": change(old)}, indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written ({error.strerror or error}): set {VARIABLE} to a folder "
            "that can be, in a container to one that outlives it"
        ) from error
    entries.cache_clear()
    _native.clear_cache()  # what was decided by the table as it was
    return file


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time changes a file. The lock is a file of its own, because the other one
    is replaced.
    """
    with file.with_suffix(".lock").open("w") as lock:
        _posix.lock(lock)
        yield


def _replace(file: Path, text: str) -> None:
    """Writes a file at once, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".new")
    try:
        with open(handle, "w") as new:
            _posix.let_others_read(handle)
            new.write(text)
        os.replace(name, file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
