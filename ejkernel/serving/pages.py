"""The pages of the cache: reference counts, and the sharing of prefixes.

The references of a page are the sequences that use it; a page without references is free. A full page may be registered
under a key of its tokens and those of the pages before it. It keeps its contents when it becomes free, until it is
allocated again, and a sequence that begins with the same tokens uses it instead of computing it again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page: a digest of its tokens and of the key of the page before it (b"" for the first)."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference counts of the pages, and an index of the registered ones."""

    def __init__(self, pages: int) -> None:
        self.references = [0] * pages
        self._free = OrderedDict.fromkeys(range(pages))  # in the order of allocation
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """The number of pages that have references."""
        return len(self.references) - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, which are no longer registered; None if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self.references[page] = 1
            self._forget(page)
        return pages

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `keys` that is registered, each with one more reference."""
        pages = [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]
        for page in pages:
            self._free.pop(page, None)
            self.references[page] += 1
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Registers a page under its key, for sharing; the first page of a key stays registered."""
        if key not in self._pages:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Removes one reference from each page of a sequence.

        Pages without references are free. Allocation takes first those that are not registered, then those that have
        been free longest, and of one sequence the last page first, as earlier ones can be shared without it.
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
