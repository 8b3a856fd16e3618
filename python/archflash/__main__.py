"""`python -m archflash`: what this installation is and can do, and the commands explain, verify,
calibrate, bench, replay, sim, demo, show and ladder.
"""

from __future__ import annotations

import sys

from archflash import __version__
from archflash.cli import (
    Parser,
    bench,
    calibrate,
    exit_status,
    explain,
    info,
    of_clone,
    replay,
    sim,
    verify,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; without one, prints what this installation is.

    Returns:
        The exit status, as exit_status() says.

    Raises:
        SystemExit: with status 2, for arguments that do not parse.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in of_clone.PROGRAMS:
        return exit_status(lambda: of_clone.run(given[0], given[1:]))
    parser = Parser(prog="archflash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"archflash {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (info, explain, verify, calibrate, bench, replay, sim):
        command.add_parser(commands)
    of_clone.add_parsers(commands)
    parser.set_defaults(run=info.run)
    parsed = parser.parse_args(given)
    return exit_status(lambda: int(parsed.run(parsed)))


if __name__ == "__main__":
    sys.exit(main())
