"""The formula of flash_attention, with the keys and values that latents are projected to for every head."""

import jax.numpy as jnp
import numpy as np

from . import flash_attention as flash

__all__ = ["formula", "projected"]


def formula(x, facts, options, rounded):
    """o and lse."""
    k, v = projected(x, jnp)
    return flash.formula(x | {"k": rounded(k), "v": rounded(v)}, facts, options, rounded)


def projected(x, xp):
    """Keys and values [B, K, H, …], by a module of arrays."""
    k, v = (xp.einsum("btr,rhd->bthd", x["kv_latent"], x[name]) for name in ("w_kc", "w_vc"))
    n, features = x["w_kc"].shape[-1], x["w_kc"].shape[-1] + x["k_rope"].shape[-1]
    place = np.eye(features, dtype=k.dtype)  # where the two parts stand in a key
    k = xp.einsum("bthn,nd->bthd", k, place[:n]) + xp.einsum("bty,yd->btd", x["k_rope"], place[n:])[:, :, None]
    return k, v
