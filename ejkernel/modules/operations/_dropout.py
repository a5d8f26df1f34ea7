"""Words of dropout: what, with the numbers of query and key, decides which weights are kept."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...errors import shown, type_error, value_error
from ...ops.utils.operands import is_array
from ...xla_utils.philox import two_words
from ._arguments import INTEGERS, array, static_number


def dropout_words(operation: str, rate, key, q):
    """Words of dropout [b, h, 8]: two of the key, the batch and the head index, and four of the places of tokens.

    Query n of the call is query first + step·n of the whole of which it is a part, and keys likewise: their first is 0
    and their step 1 where the call is the whole.
    """
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
    places = [lax.broadcasted_iota(jnp.uint32, size, axis) for axis in range(2)]
    of_whole = [jnp.full(size, x, jnp.uint32) for x in (0, 1, 0, 1)]
    # Sums of arrays: JAX does not concatenate words that are mapped over an Explicit axis with places that are not.
    rest = jnp.stack([*[jnp.zeros(size, jnp.uint32)] * 2, *places, *of_whole], axis=-1)
    of_key = jnp.pad(jnp.stack([first, second]), (0, rest.shape[-1] - 2))
    return lax.add(rest, jnp.broadcast_to(of_key, rest.shape))


def _words_of_key(operation: str, key, q):
    """The words of one key. An array [b, h, 8], a shard of the whole call's `dropout_words`, is returned unchanged."""
    if not is_array(key):
        raise type_error(operation, f"dropout_key must be one jax.random.key, not {type(key).__name__}")
    key = array(operation, "dropout_key", key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return jax.random.key_data(key).reshape(-1)
    elif key.dtype == jnp.uint32 and key.shape in ((2,), (4,), (q.shape[0], q.shape[2], 8)):
        return key  # the words alone, as of `jax.random.PRNGKey`, or a shard
    raise value_error(operation, "dropout_key must be one jax.random.key", dropout_key=key)


def key_of_seed(operation: str, seed):
    """The `jax.random` key for an integer seed, which may be traced."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not -(2**31) <= seed < 2**32:
            raise value_error(operation, f"dropout_seed is {shown(seed)}; it must be an integer of 32 bits")
    elif not is_array(seed) or seed.dtype.name not in INTEGERS or seed.shape != ():
        raise type_error(operation, f"dropout_seed is {shown(seed)}; it must be an integer")
    return jax.random.key(seed, impl="threefry2x32")


def with_places(dropout: Array, places: Array) -> Array:
    """Words of dropout [b, h, 8] of the call in which tokens have these places: first, step of queries and of keys."""
    behind = lax.broadcasted_iota(jnp.int32, (1, 1, 8), 2) >= 4
    return jnp.where(behind, jnp.concatenate([jnp.zeros(4, jnp.uint32), places])[None, None], dropout)
