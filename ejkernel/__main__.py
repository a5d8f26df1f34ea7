"""`python -m ejkernel <command>`."""

import argparse
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import cli
from .cli._devices import missing_backend


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; wrong arguments, and no device to run on, exit with 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # "?" for a "×" that the encoding lacks
    try:
        try:
            return _run(_parsed(arguments))
        finally:
            sys.stdout.flush()  # here, as a BrokenPipeError at exit could not be caught
    except BrokenPipeError:  # as in `ejkernel info | head -1`, whose reader has closed the pipe
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    return parser.parse_args(arguments)


def _run(parsed: argparse.Namespace) -> int:
    try:
        return parsed.command.run(parsed)
    except argparse.ArgumentError as error:
        parsed.parser.error(" ".join(str(error).split()))
    except (RuntimeError, AssertionError):  # JAX raises either if it has no backend
        if reason := missing_backend():
            parsed.parser.exit(2, f"{parsed.parser.prog}: {reason}\n")
        raise


class _Described(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help with the docstring unchanged and the default of every option."""


if __name__ == "__main__":
    sys.exit(main())
