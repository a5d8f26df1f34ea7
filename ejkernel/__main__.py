"""`python -m ejkernel <command>`."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import cli


class _Parser(argparse.ArgumentParser):
    """What is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; wrong arguments exit with 2."""
    parser = _Parser(prog="ejkernel", description="Deep-learning kernels for JAX.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for found in pkgutil.iter_modules(cli.__path__):
        if found.name.startswith("_"):
            continue
        command = importlib.import_module(f"{cli.__name__}.{found.name}")
        summary = command.__doc__.splitlines()[0]
        added = commands.add_parser(found.name, help=summary, description=command.__doc__, formatter_class=_Described)
        command.add_arguments(added)
        added.set_defaults(command=command, parser=added)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.command.run(parsed)
    except argparse.ArgumentError as error:
        parsed.parser.error(" ".join(str(error).split()))


class _Described(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and the default of every option."""


if __name__ == "__main__":
    sys.exit(main())
