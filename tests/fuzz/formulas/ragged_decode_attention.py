"""One query of each sequence attends over those of the sequence's keys that are not padding."""

from ._cache import attention


def formula(x, facts, options, rounded):
    """o, and lse where it is asked for."""
    o, lse = attention(x["q"], x["k"], x["v"], x, facts, options, rounded)
    return [o, lse] if options.get("return_lse") else [o]
