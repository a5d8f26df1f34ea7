"""Arguments of several commands."""

import argparse


def positive(text: str) -> int:
    """A number of at least one, as argparse parses it."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
