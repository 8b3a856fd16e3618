"""`python -m archflash`: what this installation is and can do, and the commands explain, replay,
sim, demo, show and ladder.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

import torch

from archflash._errors import ArchflashError, LaunchError
from archflash.cli import demo, explain, info, ladder, replay, show, sim

INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # as a shell reports SIGINT and SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; without one, prints what this installation is.

    Returns:
        The exit status: 0; 1 for a command that ran and failed; 2 for one that cannot do what it
        was asked for; 130 after Ctrl-C. An error is one line on stderr.

    Raises:
        SystemExit: with status 2, for arguments that do not parse.
    """
    parser = _Parser(prog="archflash", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (info, explain, replay, sim, demo, show, ladder):
        command.add_parser(commands)
    parser.set_defaults(run=info.run)
    parsed = parser.parse_args(arguments)
    try:
        status = int(parsed.run(parsed))
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


if __name__ == "__main__":
    sys.exit(main())
