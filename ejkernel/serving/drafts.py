"""Speculation by lookup: proposes the tokens that followed an earlier occurrence of the last few tokens of the text.

It needs no second model, and pays where a text repeats itself or its prompt (prompt lookup decoding). The model
computes a proposal in one step, and accepts the tokens that it would have sampled itself. If earlier occurrences were
followed by different tokens, both continuations are proposed, as a tree.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

SIZES = (4, 3, 2)  # of the runs that are looked up, the longest first
KEPT = 4  # ends of a run that are kept, the latest


class Drafts(NamedTuple):
    """A tree of tokens, the likeliest path of which comes first.

    Attributes:
        tokens: of its nodes, none before the one that it follows.
        parents: the node that each follows; −1 is the text.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.parents == list(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> list[int]:
        """The position of each node after the end of the text; 0 is the next token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def ancestors(self) -> list[int]:
        """For each node a bit set of the nodes on its path, itself included: bit i for node i."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append((1 << node) | (0 if parent < 0 else found[parent]))
        return found

    def first(self, count: int) -> "Drafts":
        """The tree of its first nodes."""
        return Drafts(self.tokens[:count], self.parents[:count])

    def accepted(self, sampled: Sequence[int]) -> list[int]:
        """The nodes that were sampled: `sampled` are the tokens that follow the text, and then each node."""
        path: list[int] = []
        children = {(parent, token): n for n, (token, parent) in reversed([*enumerate(zip(*self, strict=True))])}
        while (node := children.get((path[-1] if path else -1, sampled[path[-1] + 1 if path else 0]))) is not None:
            path.append(node)
        return path


class Lookup:
    """An index of one text: the last places where each run of a few tokens ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int, branches: int = 1) -> Drafts:
        """At most `count` tokens that may follow `tokens`, which is the text of the call before and more.

        They are a tree with at most so many leaves; each branch has its share of the tokens, the first has the rest.
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
        """Notes the runs but those at the end of the text, which are looked up."""
        for end in range(self._indexed + 1, len(tokens)):
            for size in SIZES:
                if size <= end:
                    ends = self._ends.setdefault(tuple(tokens[end - size : end]), [])
                    ends.append(end)
                    del ends[:-KEPT]
        self._indexed = max(self._indexed, len(tokens) - 1)

    def _candidates(self, tokens: Sequence[int]) -> Iterator[int]:
        """The earlier ends of the runs at the end of the text, the longest runs and the latest ends first."""
        for size in SIZES:
            if size <= len(tokens):
                yield from reversed(self._ends.get(tuple(tokens[-size:]), ()))
