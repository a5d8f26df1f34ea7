"""When a config was measured, and with which code: what stands beside it in a file."""

import datetime
import functools
import importlib.metadata
from pathlib import Path

_HERE = Path(__file__).resolve().parents[3]


def provenance() -> dict[str, str]:
    """The date, the version of the library, and the commit where it runs in a checkout."""
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "version": installed_version()}
    return found if (commit := commit_of(_HERE)) is None else found | {"commit": commit}


@functools.cache
def installed_version() -> str:
    """The version of the library as it is installed."""
    try:
        return importlib.metadata.version("ejkernel")
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH, and not installed
        return "not installed"


@functools.cache
def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out in a directory, None where there is none. Nothing is said of changed files."""
    git = checkout / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (line.split() for line in (git / "packed-refs").read_text().splitlines())
        return next((of[0] for of in packed if of[1:] == [name]), None)
    except OSError:
        return None
