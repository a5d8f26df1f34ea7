"""Stop sequences of texts that come piece by piece."""

import numpy as np
import pytest

from ejkernel.serving.text import Stops


def texts(sequences, pieces):
    """The pieces that are told, and whether the text ended before a sequence."""
    stops, told = Stops(sequences), []
    for n, piece in enumerate(pieces):
        text, found = stops.add(piece, is_last=n == len(pieces) - 1)
        told.append(text)
        if found:
            return told, True
    return told, False


@pytest.mark.parametrize(
    "sequences, pieces, told, found",
    [
        ([], ["ab", "", "c"], ["ab", "", "c"], False),
        (["b"], ["a", "b", "c"], ["a", ""], True),
        (["bcd"], ["ab", "c", "x"], ["a", "", "bcx"], False),  # held back while it may become the sequence
        (["bcd"], ["ab", "c", "d"], ["a", "", ""], True),
        (["bcd"], ["abc"], ["abc"], False),  # at its end the text is told
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (["abcd", "bc"], ["abcd"], ["a"], True),  # the first that is complete
        (["bc", "abc"], ["abcd"], [""], True),
        (["⟨128⟩"], ["a⟨128⟩b"], ["a"], True),
    ],
)
def test_text_is_told_as_soon_as_it_is_certain(sequences, pieces, told, found):
    assert texts(sequences, pieces) == (told, found)


def test_any_pieces_tell_the_same_text():
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(rng.choice(list("ab"), rng.integers(1, 12)))
        sequences = ["".join(rng.choice(list("ab"), rng.integers(1, 5))) for _ in range(rng.integers(0, 3))]
        cuts = np.sort(rng.integers(0, len(text) + 1, rng.integers(0, 6)))
        pieces = ["".join(piece) for piece in np.split(np.array(list(text)), cuts)]
        told, found = texts(sequences, pieces)
        alone, found_alone = texts(sequences, list(text))
        assert ("".join(told), found) == ("".join(alone), found_alone)
        assert found == any(s in text for s in sequences) and text.startswith("".join(told))
        assert found or "".join(told) == text
