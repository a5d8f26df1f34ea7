"""The versions of the packages that a computation depends on, and whether they are compatible.

Requirements are read from the metadata of the installed packages: there is no table of versions here.
"""

import platform
import re
from collections.abc import Iterator, Sequence
from importlib import metadata

PACKAGES = ("ejkernel", "jax", "jaxlib", "numpy", "triton", "jax-triton", "libtpu")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?:\[.*?\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_PLUGIN = re.compile(r"jax-cuda\d+-(plugin|pjrt)")
_CLAUSE = re.compile(r"\s*(==|!=|<=|>=|~=|<|>)\s*([\w.*+!-]+)\s*")


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*more: str) -> dict[str, str | None]:
    """The versions of Python, of PACKAGES and of `more`; None for those that are not installed."""
    return {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *more)}}


def misfits(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(package, its requirement of another of these packages that is not satisfied), for the installed ones.

    A requirement of extras alone counts only if the required package is installed; then it has to satisfy one of them.
    jaxlib ignores a CUDA plugin unless its version is the same, which no metadata say.
    """
    for package in filter(version, packages):
        if _PLUGIN.match(package) and _release(version(package)) != _release(version("jaxlib")):
            yield package, f"is not used by jaxlib {version('jaxlib')}, whose version it has to have"
        for name, (always, in_extras) in _requirements(package).items():
            found, wanted = version(name), [",".join(always)] if always else in_extras
            if name in packages and not (any(_fits(found, of) for of in wanted) if found else not always):
                yield package, f"wants {name}{' or '.join(wanted)}, and {found or 'none'} is installed"


def required(package: str, names: Sequence[str]) -> list[str]:
    """The requirements of a package, or of an extra of it, on these names, in pip's format."""
    found = _requirements(package)
    return [name + next(iter((*found[name][0], *found[name][1]))) for name in names if name in found]


def _requirements(package: str) -> dict[str, tuple[list[str], list[str]]]:
    """By package: the versions that are always required, and those that an extra or some environments require."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for line in (metadata.requires(package) or ()) if version(package) else ():
        name, wanted, marker = _REQUIREMENT.fullmatch(line).groups()
        always, in_extras = found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), ([], []))
        (always if marker is None else in_extras).append(wanted.replace(" ", ""))
    return found


def _fits(found: str, wanted: str) -> bool:
    """Whether a version satisfies every clause of a specifier such as ">=0.10.2,<0.13" or "==0.0.48.*"."""
    return all(_satisfies(found, *clause) for clause in _CLAUSE.findall(wanted))


def _satisfies(found: str, operator: str, bound: str) -> bool:
    have, wanted = _release(found), _release(bound.removesuffix(".*"))
    size = len(wanted) if bound.endswith(".*") else max(len(have), len(wanted))
    have, whole = ((*numbers, *(0,) * size)[:size] for numbers in (have, wanted))
    return {
        "==": have == whole,
        "!=": have != whole,
        "<": have < whole,
        "<=": have <= whole,
        ">": have > whole,
        ">=": have >= whole,
        "~=": have >= whole and have[: len(wanted) - 1] == wanted[:-1],
    }[operator]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, without the suffixes of development and local versions."""
    return tuple(map(int, re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", version)[1].split(".")))
