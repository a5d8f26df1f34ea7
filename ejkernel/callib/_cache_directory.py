"""The directory of all that is kept between processes: configs, lowered kernels, ceilings."""

import os
import tempfile


def cache_directory() -> str:
    """`$EJKERNEL_CACHE_DIR`, else `~/.cache/ejkernel`, as it is now; `~` is expanded.

    A user of a container may have neither $HOME nor an entry among the accounts. There it is a directory of that user
    among the temporary files.
    """
    found = os.path.expanduser(os.environ.get("EJKERNEL_CACHE_DIR") or "~/.cache/ejkernel")
    return found if not found.startswith("~") else os.path.join(tempfile.gettempdir(), f"ejkernel-{os.getuid()}")
