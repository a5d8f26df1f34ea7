"""When a config was measured, and with which code, as it is stored with the config."""

import datetime
import functools
import importlib.metadata
from pathlib import Path

_HERE = Path(__file__).resolve().parents[3]


def provenance() -> dict[str, str]:
    """The date, the version of the library and, if it runs in a checkout, the commit."""
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "version": installed_version()}
    return found if (commit := commit_of(_HERE)) is None else found | {"commit": commit}


@functools.cache
def installed_version() -> str:
    """The version of the library as it is installed."""
    try:
        return importlib.metadata.version("ejkernel")
    except importlib.metadata.PackageNotFoundError:  # it is on PYTHONPATH instead
        return "not installed"


@functools.cache
def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out in a directory, whether or not files are changed; None if there is none."""
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
