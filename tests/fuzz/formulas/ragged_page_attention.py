"""Each token of a step attends over the keys and values of its sequence, wherever its table says that they are."""

from ._cache import attention, keys_and_values


def formula(x, facts, options, rounded):
    """o, and lse where it is asked for."""
    pool = x["kv_pages"]
    pool = pool.reshape(*pool.shape[:2], -1, 2, pool.shape[3])
    keys, values = keys_and_values(pool[:, :, :, 0], pool[:, :, :, 1], x, facts["pages"])
    o, lse = attention(x["q"], keys, values, x, facts, options, rounded)
    return [o, lse] if options.get("return_lse") else [o]
