"""The formula of flash_attention for each branch of native_sparse_decode_attention, and their sum."""

import jax.numpy as jnp

from . import flash_attention as flash
from .native_sparse_attention import gated


def formula(x, facts, options, rounded):
    """o, and the blocks if they are asked for."""
    scale = options.get("softmax_scale")
    of = {"softmax_scale": x["q"].shape[-1] ** -0.5 if scale is None else scale}

    def branch(k, v, visible):
        return flash.formula({"q": x["q"][:, None], "k": k, "v": v}, {"visible": visible}, of, rounded)[0][:, 0]

    total = gated(x, "g_slc", branch(x["k"], x["v"], facts["selected"]))
    if "g_cmp" in x:
        total = total + gated(x, "g_cmp", branch(rounded(x["k_cmp"]), rounded(x["v_cmp"]), facts["ended"]))
    if "window" in options:
        total = total + gated(x, "g_swa", branch(x["k"], x["v"], facts["window"]))
    return [rounded(total)] + [jnp.asarray(facts["lists"], total.dtype)] * bool(options.get("return_block_indices"))
