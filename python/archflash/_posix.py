"""Calls that only POSIX has, and what stands in for them on Windows, where nothing has been tried.

The C++ code has one such file, too: src/runtime/loaded_libraries.cpp.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


def lock(file: IO[Any]) -> None:
    """Waits until no other process has the file locked. Closing it unlocks it."""
    if sys.platform == "win32":
        while True:
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                return
            except OSError as error:
                if error.errno != errno.EDEADLOCK:  # which Windows gives after ten seconds
                    raise
    else:
        fcntl.flock(file, fcntl.LOCK_EX)


def let_others_read(handle: int) -> None:
    """Makes an open file readable for other users, as new files are, but temporary ones are not."""
    if sys.platform != "win32":
        os.fchmod(handle, 0o644)


def start(command: Sequence[str], pipe: int, **given: Any) -> subprocess.Popen[bytes]:
    """A process that inherits one end of a pipe, and can be ended with all that it starts.

    Raises:
        OSError: on Windows, where processes inherit no file descriptors.
    """
    if sys.platform == "win32":
        raise OSError("jobs in processes of their own need POSIX: run it on Linux or under WSL")
    return subprocess.Popen(command, pass_fds=[pipe], start_new_session=True, **given)


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Ends what `start` gave. It may have ended."""
    if sys.platform != "win32":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


class Readable:
    """Waits until a pipe can be read."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def wait(self, seconds: float) -> bool:
        return bool(self._selector.select(seconds))

    def close(self) -> None:
        self._selector.close()
