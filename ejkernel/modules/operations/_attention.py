"""What the arguments of attention become where their meaning is more than their type: windows, caps, ids, dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import shown, type_error, value_error
from ...ops.utils.operands import is_array
from ...xla_utils.philox import two_words
from ...xla_utils.symbolic import is_symbolic
from ._arguments import INTEGERS, array, positive_or_none, require_dtype, static_number, window_pair

# Beyond it a window of a symbolic length is unbounded, and a position plus a bound is still an int32.
FAR = 2**30
# Below it logits are all 0 to a softmax. Above it they are what they are without a cap: up to 2³⁰, float64 too is not
# changed by it.
LEAST_SOFTCAP, MOST_SOFTCAP = 2.0**-60, 2.0**60


def softcap_for(operation: str, softcap, q) -> float | None:
    """A cap that the logits of these queries can be divided by; None for one that they do not come near."""
    softcap, dtype = positive_or_none(operation, "softcap", softcap), np.promote_types(q.dtype, np.float32)
    if softcap is None:
        return None
    if not LEAST_SOFTCAP <= softcap <= float(np.finfo(dtype).max):
        most = f"{np.finfo(dtype).max:.3g}, as logits are {dtype}"
        raise value_error(operation, f"softcap is {softcap}; it must be from 2**-60 to {most}", q=q)
    return softcap if softcap <= MOST_SOFTCAP else None


def window_within(operation: str, window, q, k) -> tuple[int | None, int | None]:
    """(left, right), None for a bound that is as far as the lengths reach."""
    bounds = window_pair(operation, window)
    lengths = (k.shape[1], q.shape[1])  # i' ≤ K − 1 on the left; K − 1 ≤ i' + S − 1 on the right
    symbolic = is_symbolic(q) or is_symbolic(k)
    reach = (FAR if symbolic else n - 1 for n in lengths)
    return tuple(None if x is None or x >= far else x for x, far in zip(bounds, reach, strict=True))


def segment_ids(operation: str, q_ids, kv_ids, q, k):
    """Both as int32, negative for padding; ids of a type that may hold more are numbered anew, in their order."""
    if q_ids is None:
        return None, None
    found = []
    for name, ids, of, x in (("q_segment_ids", q_ids, "q", q), ("kv_segment_ids", kv_ids, "k", k)):
        ids = ids if isinstance(ids, np.ndarray) else array(operation, name, ids)
        require_dtype(operation, np.integer, "an integer type", **{name: ids})
        if isinstance(ids, np.ndarray) and ids.dtype.itemsize > 4 and not jax.config.jax_enable_x64:
            ids = np.maximum(ids, -1) if ids.dtype.kind == "i" else ids
            if ids.size and (most := ids.max()) > np.iinfo(np.int32).max:
                raise value_error(operation, f"{name} has an id of {most}; 64 bits need jax_enable_x64")
        ids = array(operation, name, ids)
        if ids.shape != x.shape[:2]:
            raise value_error(
                operation, f"{name} must be {x.shape[:2]}, batch and length of {of}", **{name: ids, of: x}
            )
        found.append(ids)
    if all(jnp.iinfo(ids.dtype).max <= np.iinfo(np.int32).max for ids in found):
        return tuple(ids.astype(jnp.int32) for ids in found)
    wide = np.dtype(f"uint{8 * max(ids.dtype.itemsize for ids in found)}")
    of_all = jnp.sort(jnp.concatenate([ids.astype(wide) for ids in found], axis=1), axis=1)
    number = jax.vmap(partial(jnp.searchsorted, method="sort"))
    return tuple(jnp.where(ids < 0, -1, number(of_all, ids.astype(wide)).astype(jnp.int32)) for ids in found)


def sinks_of_heads(operation: str, sinks, heads: int, q):
    """[1, heads, n] in the dtype of statistics; None where there are none."""
    if sinks is None:
        return None
    sinks = array(operation, "sinks", sinks)
    require_dtype(operation, np.floating, "a float type", sinks=sinks)
    if len(sinks.shape) not in (1, 2) or sinks.shape[0] != heads:
        raise value_error(operation, f"sinks must be [{heads}] or [{heads}, n], one row a head", sinks=sinks, q=q)
    if 0 in sinks.shape:
        raise value_error(operation, "sinks has 0 of them for a head; leave it out", sinks=sinks)
    return sinks.astype(np.promote_types(q.dtype, np.float32)).reshape(1, heads, -1)


def dropout_words(operation: str, rate, key, q):
    """[b, h, 4]: the key's two words, the batch index, the head index."""
    rate = static_number(operation, "dropout_rate", rate)
    if not 0 <= rate < 1:
        raise value_error(operation, f"dropout_rate is {rate}; it must be at least 0 and below 1")
    words = None if key is None else _words_of_key(operation, key, q)
    if rate == 0:
        return None
    if words is None:
        raise value_error(operation, f"dropout_rate is {rate} but dropout_key is not given; pass a jax.random.key")
    if words.ndim == 3:
        return words
    first, second = two_words(words)
    size = q.shape[0], q.shape[2]
    places = [jax.lax.broadcasted_iota(jnp.uint32, size, axis) for axis in range(2)]
    return jnp.stack([jnp.full(size, first), jnp.full(size, second), *places], axis=-1)


def _words_of_key(operation: str, key, q):
    """The words of one key; or, as it is, [b, h, 4], a shard of what `dropout_words` made for the whole."""
    if not is_array(key):
        raise type_error(operation, f"dropout_key must be one jax.random.key, not {type(key).__name__}")
    key = array(operation, "dropout_key", key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return jax.random.key_data(key).reshape(-1)
    elif key.dtype == jnp.uint32 and key.shape in ((2,), (4,), (q.shape[0], q.shape[2], 4)):
        return key  # the words alone, as of `jax.random.PRNGKey`, or a shard
    raise value_error(operation, "dropout_key must be one jax.random.key", dropout_key=key)


def key_of_seed(operation: str, seed):
    """The key of an integer, which may be traced."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not -(2**31) <= seed < 2**32:
            raise value_error(operation, f"dropout_seed is {shown(seed)}; it must be an integer of 32 bits")
    elif not is_array(seed) or seed.dtype.name not in INTEGERS or seed.shape != ():
        raise type_error(operation, f"dropout_seed is {shown(seed)}; it must be an integer")
    return jax.random.key(seed, impl="threefry2x32")
