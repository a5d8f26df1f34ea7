"""Attention over pages by its definition, in float64 and one query at a time, and steps to try it on."""

import jax.numpy as jnp
import numpy as np

DTYPES = {"float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}


def wide(x):
    return np.asarray(x).astype(np.float64)


def keys_of(pages, scale, table):
    """[positions, G, ·] of the sequence with this table, times the factor of each."""
    pages = wide(pages)
    if scale is not None:
        pages = pages * np.broadcast_to(wide(scale), pages.shape[:3])[..., None]
    found = pages[np.clip(np.asarray(table, np.int64), 0, len(pages) - 1)]
    return found.reshape(-1, *found.shape[2:])


def attended(q, k, v, seen, sinks=None, softcap=None, softmax_scale=None):
    """o [H,V] and lse [H] of one query [H,D] over the keys [J,G,D] that are seen [J]."""
    scale, repeat = q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale, q.shape[0] // k.shape[1]
    o, lse = np.zeros((len(q), v.shape[2])), np.full(len(q), -np.inf)
    for h, row in enumerate(wide(q)):
        s = scale * k[seen, h // repeat] @ row
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        all_logits = s if sinks is None else np.append(s, wide(sinks)[h])
        if all_logits.size:
            lse[h] = np.logaddexp.reduce(all_logits)
            o[h] = np.exp(s - lse[h]) @ v[seen, h // repeat]
    return o, lse


def in_pages(x, dtype):
    """Numbers as pages hold them: rounded to integers where those are."""
    return jnp.asarray(np.round(4 * x) if dtype == "int8" else x, DTYPES.get(dtype, dtype))


def close(found, wanted, tolerance=1e-6):
    found, wanted = wide(found), wide(wanted)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite])
    error = np.abs(found[finite] - wanted[finite]).max(initial=0)
    assert error <= tolerance * max(1, np.abs(wanted[finite]).max(initial=0)), error
