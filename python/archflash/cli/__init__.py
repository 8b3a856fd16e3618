"""The command line: `archflash COMMAND`, or `python -m archflash COMMAND`. Each command is a module
with add_parser and run, or a program of the source tree (of_clone.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from archflash._errors import ArchflashError, LaunchError

INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # as a shell reports SIGINT and SIGPIPE


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Of a command it refuses what is left over, which the parser of all would not name."""
        parsed, left = super().parse_known_args(*given, **named)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return parsed, left


def exit_status(run: Callable[[], int]) -> int:
    """Runs a command.

    Returns:
        What it returns: 0, or 1 if it ran and failed; 2 if it cannot do what it was asked for; 130
        after Ctrl-C. An error is one line on stderr.
    """
    try:
        status = run()
        if sys.stdout is not None:  # None where the standard output is closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the output is gone; Python must not flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (LaunchError, MemoryError, torch.OutOfMemoryError) as error:
        return _fail(error, 1)
    except (ArchflashError, ValueError, TypeError, OSError) as error:
        return _fail(error, 2)
    return status


def _fail(error: BaseException | str, status: int) -> int:
    text = _one_line(str(error)) or type(error).__name__
    print(f"archflash: {text}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    line = ""
    for part in filter(None, map(str.strip, text.splitlines())):
        line += ("" if not line else " " if line.endswith((":", ";")) else "; ") + part
    return line
