"""The messages on stderr while the configs of a call are measured."""

import os
import sys
import threading
from typing import Any

# Measuring that takes less time than this prints nothing.
QUIET_SECONDS = 0.5


class Progress:
    """Shows how many configs are done if measuring takes longer: updated on a terminal, a single line elsewhere.

    With `EJKERNEL_LOG_AUTOTUNE=1` it prints a line for each config instead, with its time or why it was rejected.
    Without `shows` it does that alone.
    """

    def __init__(self, operation: str, total: int, shows: bool = True) -> None:
        self._operation, self._total, self._done = operation, total, 0
        self._log = os.environ.get("EJKERNEL_LOG_AUTOTUNE", "0") not in ("", "0")
        self._shown, self._over, self._lock = False, False, threading.Lock()
        self._first = threading.Timer(QUIET_SECONDS, self._show)
        self._first.daemon = True
        if shows and not self._log:
            self._first.start()

    def tell(self, config: Any, outcome: str) -> None:
        """Counts a config that was timed or rejected."""
        self._done += 1
        if self._log:
            print(f"ejkernel autotune {self._operation}: {config}: {outcome}", file=sys.stderr, flush=True)
        elif self._shown and sys.stderr.isatty():
            self._show()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        """Clears the line of a terminal; nothing is shown any more."""
        self._first.cancel()
        with self._lock:
            if self._shown and sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._over = True

    def _show(self) -> None:
        with self._lock:
            if self._over:
                return
            line, terminal = f"ejkernel: tuning {self._operation} {self._done} of {self._total} …", sys.stderr.isatty()
            print(f"\r\033[K{line}" if terminal else f"{line}\n", end="", file=sys.stderr, flush=True)
            self._shown = True


_told = threading.Event()


def tell_once(message: str) -> None:
    """Prints the first message of the process; later ones are dropped."""
    if not _told.is_set():
        _told.set()
        print(f"ejkernel: {message}", file=sys.stderr, flush=True)
