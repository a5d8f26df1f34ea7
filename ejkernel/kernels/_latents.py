"""Products of latents with the projections of heads, of flash_mla, and their transposes; keys with rotary parts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


def projected(latent: Array, w: Array, dtype: Any = None) -> Array:
    """Σ_c latent [b,t,c] · w [b?,c,h,n] -> [b,t,h,n], of a dtype; by default that of statistics."""
    axes, w = named(w)
    return product(f"btc,{axes}->bthn", latent, w, dtype)


def with_rope(k: Array, rope: Array) -> Array:
    """Concatenates k [b,t,h,x] with the rotary part [b,t,y], shared by all heads, to [b,t,h,d]."""
    rope = jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], rope.shape[2]))
    return jnp.concatenate([k, rope.astype(k.dtype)], axis=-1)


def onto_latents(da: Array, w: Array) -> Array:
    """Σ_{h,n} da [b,t,h,n] · w [b?,c,h,n] -> [b,t,c]."""
    axes, w = named(w.astype(da.dtype))
    return product(f"bthn,{axes}->btc", da, w)


def onto_projection(latent: Array, da: Array, w: Array) -> Array:
    """Σ_t latent [b,t,c] · da [b,t,h,n] -> [b?,c,h,n], the shape of w; also over the batch if w is shared by it.

    da is the first factor, as in JAX's transpose of `projected`. In the other order XLA sums some products
    sequentially on a CPU, with twice the error.
    """
    axes, _ = named(w)
    transposed = axes.replace("c", "") + "c"
    dw = product(f"bthn,btc->{transposed}", da, latent.astype(da.dtype))
    return jnp.moveaxis(dw, -1, -3).reshape(w.shape)


def named(w: Array) -> tuple[str, Array]:
    """The axes of a projection and the projection, without the batch axis if the batch shares it."""
    return ("chn", w[0]) if w.shape[0] == 1 else ("bchn", w)


def product(axes: str, x: Array, y: Array, dtype: Any = None) -> Array:
    """The product of x and y along the named axes at full float32 precision, by default in the dtype of statistics."""
    dtype = statistics_dtype(x) if dtype is None else dtype
    return jnp.einsum(axes, x, y, precision="highest", preferred_element_type=dtype)


def statistics_dtype(x: Array) -> Any:
    return np.promote_types(x.dtype, np.float32)
