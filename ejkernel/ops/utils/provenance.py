"""When a config was measured, and with which code, as it is stored with the config."""

import datetime
import functools
import importlib.metadata
import os
import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve().parents[3]
# The folders of a checkout whose files are the library.
_SOURCES = ("ejkernel", "lowering")
_GIT_TIMEOUT_S = 10


def provenance() -> dict[str, str]:
    """The date, the version of the library and, if it runs in a checkout, the commit and whether files are changed."""
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "version": version_of(_HERE)}
    return found if (commit := code_of(_HERE)) is None else found | {"commit": commit}


@functools.cache
def version_of(checkout: Path) -> str:
    """The version of the library in a checkout; if it is in none, the version that is installed."""
    import tomllib  # where it is read: an import of the library needs it not

    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "ejkernel":
            return project["version"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):  # no checkout of this library
        pass
    try:
        return importlib.metadata.version("ejkernel")
    except importlib.metadata.PackageNotFoundError:  # the folder alone is on PYTHONPATH
        return "not installed"


@functools.cache
def code_of(checkout: Path) -> str | None:
    """The commit that is checked out, and whether the library is as the commit has it; None if there is no commit.

    It is found once in a process, which runs the files as it has imported them.
    """
    if (commit := commit_of(checkout)) is None:
        return None
    return commit + {True: " with changes", False: "", None: " or with changes"}[is_changed(checkout)]


def is_changed(checkout: Path) -> bool | None:
    """Whether files of the library differ from the commit that is checked out; None if git cannot tell."""
    command = ("git", "--no-optional-locks", "status", "--porcelain", "--", *_SOURCES)
    own = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}  # a hook's GIT_DIR is another one
    try:
        told = subprocess.run(command, cwd=checkout, env=own, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or one that refuses a checkout of another user
        return None
    return bool(told.stdout.strip())


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
