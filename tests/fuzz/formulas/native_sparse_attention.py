"""The formula of flash_attention for each branch of native_sparse_attention, and their sum."""

import jax.numpy as jnp

from . import flash_attention as flash


def formula(x, facts, options, rounded):
    """o, and the blocks if they are asked for."""
    q, k, v = x["q"], x["k"], x["v"]
    scale = options.get("softmax_scale")
    if "softmax_scale" in x:
        q, scale = rounded(q * x["softmax_scale"]), 1.0

    def branch(k, v, visible):
        of = {"softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale}
        return flash.formula({"q": q, "k": k, "v": v}, {"visible": visible}, of, rounded)[0]

    mean = lambda a: rounded(jnp.einsum("xt,btgd->bxgd", jnp.asarray(facts["share"], a.dtype), a, precision="highest"))
    total = gated(x, "g_slc", branch(k, v, facts["selected"]))
    if "g_cmp" in x:
        total = total + gated(x, "g_cmp", branch(mean(k), mean(v), facts["ended"]))
    if "window" in options:
        total = total + gated(x, "g_swa", branch(k, v, facts["window"]))
    return [rounded(total)] + [jnp.asarray(facts["lists"], total.dtype)] * bool(options.get("return_block_indices"))


def gated(x, gate, o):
    return x[gate][..., None] * o if gate in x else o
