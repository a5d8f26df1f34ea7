"""Text that every machine with Python has: the source of its standard library, with characters as tokens."""

import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 128
_VALIDATION_SHARE = 0.1


def load() -> tuple[np.ndarray, np.ndarray]:
    """The ASCII characters of the top-level modules in alphabetical order: (training text, held-out text)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no Python source in {sysconfig.get_path('stdlib')}")
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    text = text[text < VOCABULARY]
    return np.split(text, [round(len(text) * (1 - _VALIDATION_SHARE))])


def windows(text: np.ndarray, count: int, batch: int, length: int, seed: int) -> np.ndarray:
    """Random excerpts [count, batch, length + 1]; the target of each token is the next one."""
    start = np.random.default_rng(seed).integers(len(text) - length, size=(count, batch, 1))
    return text[start + np.arange(length + 1)].astype(np.int32)
