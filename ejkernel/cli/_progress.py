"""A progress bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable

_WIDTH = 30


def progress(label: str, total: int, every: int) -> Callable[[int, str], None]:
    """A function of the number of finished steps and a text; without a terminal it prints a line every few steps."""
    began, terminal = time.perf_counter(), sys.stdout.isatty()

    def show(done: int, text: str) -> None:
        spent = time.perf_counter() - began
        line = f"{label:<10} {done:>5}/{total}  {text}  {spent:.0f} s"
        if terminal:
            filled = _WIDTH * done // total
            left = f", {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
            bar = "━" * filled + "╌" * (_WIDTH - filled)
            print(f"\r{bar} {line}{left}\033[K", end="\n" if done == total else "", flush=True)
        elif done == total or done % every == 0:
            print(line, flush=True)

    return show
