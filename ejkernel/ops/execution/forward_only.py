"""A context of programs that say they tune for inference."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def forward_autotune_only() -> Iterator[None]:
    """Within this context the config of an operation is chosen by the time of its forward alone.

    This library always does so: a forward is measured by itself, and a backward where a gradient is asked for. The
    context exists for programs written for it, and changes nothing.
    """
    yield
