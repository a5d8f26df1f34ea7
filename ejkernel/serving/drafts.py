"""Speculation by prompt lookup: drafts are the tokens that followed an earlier occurrence of the last few tokens.

It needs no second model, and is faster where a text repeats itself or its prompt. The model computes all drafts in one
step, and accepts those that it would have sampled itself. If earlier occurrences were followed by different tokens, all
these continuations are proposed, as a tree.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

SIZES = (4, 3, 2)  # lengths of the n-grams that are looked up, the longest first
KEPT = 4  # the number of latest occurrences that are kept for each n-gram


class Drafts(NamedTuple):
    """A tree of draft tokens, whose most likely path comes first.

    Attributes:
        tokens: the token of each node; parents come before their children.
        parents: the parent of each node; −1 is the end of the text.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return not self.tokens or self.parents == list(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> list[int]:
        """The position of each node after the end of the text; 0 is the next token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def ancestors(self) -> list[int]:
        """For each node the bit set of the nodes on its path from the root, itself included: bit i for node i."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append((1 << node) | (0 if parent < 0 else found[parent]))
        return found

    def first(self, count: int) -> "Drafts":
        """The tree of the first `count` nodes."""
        return Drafts(self.tokens[:count], self.parents[:count])

    def accepted(self, sampled: Sequence[int]) -> list[int]:
        """The path of accepted nodes; `sampled` are the tokens sampled after the text and after each node."""
        path: list[int] = []
        if not self.tokens:
            return path
        children = {(parent, token): n for n, (token, parent) in reversed([*enumerate(zip(*self, strict=True))])}
        while (node := children.get((path[-1] if path else -1, sampled[path[-1] + 1 if path else 0]))) is not None:
            path.append(node)
        return path


NO_DRAFTS = Drafts([], [])


class Lookup:
    """An index of one text: the last places where each n-gram ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int, branches: int = 1) -> Drafts:
        """At most `count` tokens that may follow `tokens`, which begins with the text of the previous call.

        They are a tree of at most `branches` leaves. Each branch may have count // branches tokens, the first the rest.
        """
        self._index(tokens)
        found, children, leaves = Drafts([], []), {}, 0
        for end in self._candidates(tokens):
            most, before, node = count - (branches - 1 - leaves) * (count // branches), len(found.tokens), -1
            for token in tokens[end : end + count]:
                if (node, token) not in children:
                    # A branch that only repeats what is already in the tree is left out.
                    goes_on = 0 < before == len(found.tokens) and node not in found.parents
                    if goes_on or len(found.tokens) == most:
                        break
                    children[node, token] = len(found.tokens)
                    found.tokens.append(token)
                    found.parents.append(node)
                node = children[node, token]
            leaves += len(found.tokens) > before
            if leaves == branches:
                break
        return found

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds the n-grams of the text except those at its end, which are looked up."""
        for end in range(self._indexed + 1, len(tokens)):
            for size in SIZES:
                if size <= end:
                    ends = self._ends.setdefault(tuple(tokens[end - size : end]), [])
                    ends.append(end)
                    del ends[:-KEPT]
        self._indexed = max(self._indexed, len(tokens) - 1)

    def _candidates(self, tokens: Sequence[int]) -> Iterator[int]:
        """Where the n-grams at the end of the text ended before, the longest n-grams and the latest ends first."""
        for size in SIZES:
            if size <= len(tokens):
                yield from reversed(self._ends.get(tuple(tokens[-size:]), ()))
