"""A context for programs that request tuning for inference."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def forward_autotune_only() -> Iterator[None]:
    """Within this context the config of an operation is chosen by the time of its forward.

    This library always does so: a forward is measured by itself, and a backward only for a gradient. The context exists
    for programs that use it, and changes nothing.
    """
    yield
