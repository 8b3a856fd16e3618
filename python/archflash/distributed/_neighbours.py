"""A few bytes from every rank of a group to every other one, between processes of one host."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_MOST_RANKS = 16  # each rank has a socket to every other one
_MOST_BYTES = 4096  # of a rank at once, which fit into the buffer of a socket
_PATIENCE = 2e-3  # seconds in which a rank looks for the others before it lets the system wake it
_LONGEST_SLEEP = 3600.0  # seconds; the system takes at most 24 days
_MEETING = 10.0  # seconds in which the ranks connect at first
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has none


class Neighbours:
    """Sockets to all other ranks.

    gloo's threads wake one another for each message, which takes some 300 us of the host's time for
    a call. A rank that looks at its sockets until the others have written to them takes 20.
    """

    def __init__(self, sockets: dict[int, socket.socket], rank: int, seconds: float) -> None:
        """seconds: after which a rank that does not come is an error."""
        self._sockets, self._rank, self._seconds = sockets, rank, seconds
        for each in sockets.values():
            each.setblocking(False)

    def takes(self, size: int) -> bool:
        return size <= _MOST_BYTES

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank gives, all of the same size, in the order of the ranks."""
        self.say(mine)
        return self.hear(mine)

    def say(self, mine: bytes) -> None:
        """Gives it to the other ranks. Raises as `hear` does."""
        try:
            for each in self._sockets.values():
                each.sendall(mine)
        except BaseException:
            self.close()
            raise

    def hear(self, mine: bytes) -> list[bytes]:
        """What each rank gives, in the order of the ranks. Ours was given before.

        Raises:
            OSError: one of them died, or did not come in time.

        After any exception the sockets are closed, which is an error on the others, too: what they
        still send must not be taken for their answer to the next call.
        """
        end = time.monotonic() + self._seconds
        try:
            ranks = range(len(self._sockets) + 1)
            return [mine if r == self._rank else self._from(r, len(mine), end) for r in ranks]
        except BaseException:  # a KeyboardInterrupt, too
            self.close()
            raise

    def _from(self, rank: int, size: int, end: float) -> bytes:
        found, patient = b"", time.monotonic() + _PATIENCE
        while len(found) < size:
            try:
                part = self._sockets[rank].recv(size - len(found))
            except BlockingIOError:
                now = time.monotonic()
                if now > end:
                    raise TimeoutError(
                        f"rank {rank} did not come within {self._seconds:g} s"
                    ) from None
                if now < patient:
                    _let_others_run()
                else:
                    waiting = select.poll()  # select.select takes no descriptors from 1024 on
                    waiting.register(self._sockets[rank], select.POLLIN)
                    waiting.poll(1e3 * min(end - now, _LONGEST_SLEEP))
                continue
            if not part:
                raise ConnectionError(f"rank {rank} is gone")
            found += part
        return found

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    def __del__(self) -> None:
        self.close()


def meet(
    rank: int, ranks: int, seconds: float, tell: Callable[[str], list[str]]
) -> Neighbours | None:
    """Connects all ranks of a group, each of which calls this; None on all of them if they are not
    processes of one host, or too many.

    Args:
        seconds: as for `Neighbours`.
        tell: gives what each rank tells, in the order of the ranks.
    """
    if ranks > _MOST_RANKS or ranks == 1 or not hasattr(socket, "AF_UNIX"):
        return None
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener, place = None, ""
        with contextlib.suppress(OSError):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="archflash-"))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.settimeout(_MEETING)
            listener.bind(f"{folder}/s")
            listener.listen(ranks)
            place = f"{_host()}\n{folder}/s"
        places = [each.partition("\n") for each in tell(place)]
        # Containers of one host may have folders of their own under the same name.
        same_host = places[0][2] != "" and {x[0] for x in places} == {places[0][0]}
        sees_all = same_host and all(os.access(path, os.W_OK) for _, _, path in places)
        if tell(str(sees_all)) == ["True"] * ranks and listener is not None:
            with contextlib.suppress(OSError, IndexError):  # IndexError: of a caller that died
                for r, (_, _, path) in enumerate(places[:rank]):
                    sockets[r] = socket.socket(socket.AF_UNIX)
                    sockets[r].settimeout(_MEETING)
                    sockets[r].connect(path)
                    sockets[r].sendall(bytes([rank]))
                for _ in range(rank + 1, ranks):
                    caller = listener.accept()[0]
                    caller.settimeout(_MEETING)
                    sockets[caller.recv(1)[0]] = caller
        is_whole = sorted({*sockets, rank}) == list(range(ranks))
        if tell(str(is_whole)) == ["True"] * ranks:
            return Neighbours(sockets, rank, seconds)
    for each in sockets.values():
        each.close()
    return None


def _host() -> str:
    """The running system, as another container of it also says."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.is_file() else ''}"
