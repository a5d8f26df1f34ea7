"""The versions of what takes part in a computation."""

import platform
from importlib import metadata

PACKAGES = ("ejkernel", "jax", "jaxlib", "numpy", "triton", "jax-triton", "libtpu")


def version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*more: str) -> dict[str, str | None]:
    """Of Python, the packages that take part in a computation, and `more`; None where one is not installed."""
    return {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *more)}}
