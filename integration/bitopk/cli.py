# SPDX-License-Identifier: Apache-2.0
"""The ``bitopk`` command: parses the command line and calls the module that does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import bitopk
from bitopk import doctor, launch

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status of the process.
    """
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    return int(arguments.run(arguments))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bitopk",
        description="Bidirectional topK gradient exchange for data-parallel training.",
        allow_abbrev=False,
    )
    version = f"bitopk {bitopk.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    launch.add_command(commands)
    doctor.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
