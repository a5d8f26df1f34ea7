"""Speculation by lookup: what followed the last few tokens where they stood before in the text is proposed again.

It needs no second model, and pays where a text repeats itself or its prompt (prompt lookup decoding). The model
computes a proposal in one step, and those tokens are kept that it would have taken itself.
"""

from collections.abc import Sequence

SIZES = (4, 3, 2)  # of the runs that are looked up, the longest first


class Lookup:
    """Where in one text every run of a few tokens ended last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens`, which is the text of the call before and more."""
        for end in range(
            self._indexed + 1, len(tokens)
        ):  # the runs at the end of the text are those that are looked up
            for size in SIZES:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in SIZES:
            end = self._ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if end is not None:
                return list(tokens[end : end + count])
        return []
