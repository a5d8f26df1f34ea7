"""One query of each sequence attends over the sequence's keys and values, wherever its table says that they are."""

from ._cache import attention, keys_and_values


def formula(x, facts, options, rounded):
    """o, and lse where it is asked for."""
    keys, values = keys_and_values(x["k_pages"], x["v_pages"], x, facts["pages"])
    o, lse = attention(x["q"], keys, values, x, facts, options, rounded)
    return [o, lse] if options.get("return_lse") else [o]
