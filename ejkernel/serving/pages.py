"""The pages of the cache: reference counts, and the contents of those that may be shared.

A page is free, or has as many references as sequences use it. A full page may be known by its contents: the tokens in
it, and those of the pages before it. Such a page keeps them when it becomes free, until it is needed for others; a
sequence that begins with the same tokens takes it over in place of computing it again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """What a full page is known by: a digest of its tokens and of the key of the page before it (b"" for the first)."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference counts of the pages, and where to find those of known contents."""

    def __init__(self, pages: int) -> None:
        self.references = [0] * pages
        self._free = OrderedDict.fromkeys(range(pages))  # the next to be given first
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """How many pages have references."""
        return len(self.references) - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """So many pages with one reference each, whose contents are forgotten; None where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self.references[page] = 1
            self._forget(page)
        return pages

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of keys, from the first on, that are there; each with one more reference."""
        pages = [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]
        for page in pages:
            self._free.pop(page, None)
            self.references[page] += 1
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Makes a used page available for sharing by its contents; of two with the same contents the first is found."""
        if key not in self._pages:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """One reference less for the pages of a sequence.

        Those that nobody uses any more are free: first those without known contents, then the longest free, and of one
        sequence the last, without which those before it are still of use.
        """
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free[page] = None
                if page not in self._keys:
                    self._free.move_to_end(page, last=False)

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
