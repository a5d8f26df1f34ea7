"""Conversion of text and tokens: a token of the small model is an ASCII character."""

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
