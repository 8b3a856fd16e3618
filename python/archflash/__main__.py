"""`python -m archflash`: what this installation is and can do, and the commands explain, replay,
sim and demo.
"""

from __future__ import annotations

import argparse
import sys

from archflash._errors import ArchflashError
from archflash.cli import demo, explain, info, replay, sim


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; without one, prints what this installation is.

    Returns:
        The exit status: 0, 1 for a command that failed, 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="archflash", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (info, explain, replay, sim, demo):
        command.add_parser(commands)
    parser.set_defaults(run=info.run)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (ArchflashError, ValueError, TypeError, OSError) as error:
        print(f"archflash: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
