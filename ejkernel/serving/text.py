"""Conversion of text and tokens, and stop sequences: a token of the small model is an ASCII character."""

from collections.abc import Sequence


def encode(text: str) -> list[int]:
    """The tokens of a text.

    Raises:
        ValueError: a character is not ASCII.
    """
    try:
        return list(text.encode("ascii"))
    except UnicodeEncodeError as error:
        wrong = f"character {error.start} of the prompt is {text[error.start]!r}"
        raise ValueError(f"{wrong}; the model reads ASCII, or a list of tokens") from None


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens; tokens that are not ASCII are shown as numbers in brackets."""
    return "".join(chr(token) if token < 128 else f"⟨{token}⟩" for token in tokens)


class Stops:
    """The text of a continuation piece by piece, up to the stop sequence that is complete first, no part of it.

    The text is the same however it is cut into pieces.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences, self._held = sequences, ""

    def add(self, text: str, is_last: bool) -> tuple[str, bool]:
        """The text that is certain with this piece, and whether it ends before a stop sequence.

        An end that may be the beginning of a stop sequence is held back, unless the piece is the last.
        """
        text = self._held + text
        found = [(at + len(x), at) for x in self._sequences if (at := text.find(x)) >= 0]
        if found:
            return text[: min(found)[1]], True
        beginnings = (n for sequence in self._sequences for n in range(1, len(sequence)) if text.endswith(sequence[:n]))
        certain = len(text) - (0 if is_last else max(beginnings, default=0))
        self._held = text[certain:]
        return text[:certain], False
