"""Calls in the form of ejkernel 0.0.78, by the ejkernel that its Python has; a program that imports no other file.

Requests and answers are lines of JSON, as in `_process`. A request has a case, whose call is made; its results are
written to a file, or the call is repeated and timed. Operands come from NumPy, so that both packages get the same.
"""

import json
import os
import sys
import time
from functools import cache

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules, quantization
from ejkernel.modules.operations import configs
from ejkernel.quantization.turboquant.codebook import solve_lloyd_max
from ejkernel.quantization.turboquant.matrices import generate_projection_matrix, generate_rotation_matrix


def named(name):
    return getattr(modules, name, None) or getattr(modules.operations, name)


class Values:
    """Random operands, the same for every package and dtype."""

    def __init__(self, dtype) -> None:
        self.dtype, self.rng = dtype, np.random.default_rng(0)

    def __call__(self, *shape, of=lambda x: x, dtype=None) -> jax.Array:
        return jnp.asarray(of(self.rng.standard_normal(shape)), dtype or self.dtype)

    def bytes(self, *shape):
        return jnp.asarray(self.rng.integers(0, 256, shape), jnp.uint8)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x - 3))


# --- Operands and functions of each operation: (function of operands, operands, number that have gradients)


def gated_delta_rule(x, batch, length, heads, features, state=False, variant="recurrent"):
    shape = (batch, length, heads)
    q, k, v = (x(*shape, features) for _ in range(3))
    beta, decay = x(*shape, of=sigmoid), x(*shape, of=lambda a: -softplus(a))
    given = [x(batch, heads, features, features)] if state else []
    options = dict(use_chunked=variant != "recurrent")
    if variant not in ("recurrent", "ours"):
        options["cfg"] = configs.GatedDeltaRuleConfig(chunk_size=int(variant))
    rule = named("gated_delta_rule")
    call = lambda *a: rule(*a[:5], *(a[5:] or (None,)), use_qk_l2norm=True, return_state=True, **options)
    return call, [q, k, v, beta, decay, *given], 5 + state


def ragged_gated_delta_rule(x, lengths, heads, features, variant=""):
    tokens, count = sum(lengths), len(lengths)
    q, k, v = (x(tokens, heads, features) for _ in range(3))
    beta, decay = x(tokens, heads, of=sigmoid), x(tokens, heads, of=lambda a: -softplus(a))
    states = x(count, heads, features, features, dtype=jnp.promote_types(x.dtype, jnp.float32))
    cuts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    rule, names = named("ragged_gated_delta_rule"), ("query", "key", "value", "beta", "decay", "recurrent_state")

    def call(*a):
        more = dict(query_start_loc=a[6], state_indices=a[7], chunk_size=64, use_qk_l2norm=True)
        return rule(**dict(zip(names, a[:6], strict=True)), **more)

    return call, [q, k, v, beta, decay, states, cuts, jnp.arange(count, dtype=jnp.int32)], 0


def state_space_v1(x, batch, length, channels, features, state=False, variant=""):
    u, dt = x(batch, length, channels), x(batch, length, channels, of=softplus)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    A = jnp.asarray(-np.broadcast_to(np.arange(1.0, features + 1), (channels, features)), wide)
    B, C = (x(batch, length, features) for _ in range(2))
    given = [x(batch, channels, features)] if state else []
    space = named("state_space_v1")
    call = lambda *a: space(*a[:6], gate=a[6], initial_state=(*a[7:], None)[0], conv_state=None, act_fn=jax.nn.silu)[:2]
    return call, [u, A, B, C, x(channels), dt, x(batch, length, channels), *given], 7 + state


def state_space_v2(x, batch, length, heads, head_dim, features, groups=1, state=False, variant=""):
    u, dt = x(batch, length, heads, head_dim), x(batch, length, heads, of=softplus)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    A = jnp.asarray(-np.linspace(1, 16, heads), wide)
    B, C = (x(batch, length, groups, features) for _ in range(2))
    given = [x(batch, heads, head_dim, features)] if state else []
    space = named("state_space_v2")
    options = dict(gate=None, conv_state=None, n_groups=groups, act_fn=None, use_gated_rmsnorm=False)
    call = lambda *a: space(*a[:6], initial_state=(*a[6:], None)[0], **options)[:2]
    return call, [u, A, B, C, x(heads), dt, *given], 6 + state


def quantized_matmul(x, rows, features, columns, mode, bits=None, group_size=None, transpose=False, variant=""):
    """Float scales and zeros are converted to the dtype of x."""
    w = x(*((columns, features) if transpose else (features, columns)), dtype=jnp.float32) / features**0.5
    of = dict(group_size=group_size, bits=bits, mode=mode)
    packed = (
        quantization.quantize(w, **of)
        if transpose
        else quantization.prepack_quantized_weights(w, transpose=False, **of)
    )
    words, *factors = (a for a in packed if a is not None)
    factors = [a if a.dtype == jnp.uint8 else a.astype(x.dtype) for a in factors]
    product = named("quantized_matmul")
    call = lambda *a: (product(*a, transpose=transpose, fuse=True, **of),)
    return call, [x(rows, features), words, *factors], 1


def ragged_page_attention_v2_turboquant(x, tokens, context, heads, kv_heads, features, page, variant="", bits=4):
    pools, tables, matrices = of_pages(x, tokens, context, kv_heads, features, page, bits)
    q = x(sum(tokens), heads, features)
    attention = named("ragged_page_attention_v2_turboquant")
    call = lambda *a: (attention(*a, bits=bits, qjl_dim=128, softmax_scale=features**-0.5),)
    return call, [q, *pools, *tables, jnp.array([len(tokens)], jnp.int32), *matrices], 0


def ragged_page_attention_v3_turboquant(x, tokens, context, heads, kv_heads, features, page, variant="", bits=4):
    pools, (lens, table, cuts), matrices = of_pages(x, tokens, context, kv_heads, features, page, bits)
    q, k, v = (x(sum(tokens), n, features) for n in (heads, kv_heads, kv_heads))
    decodes = sum(n == 1 for n in tokens)
    distribution = jnp.array([decodes, decodes, len(tokens)], jnp.int32)
    attention = named("ragged_page_attention_v3_turboquant")
    call = lambda *a: attention(*a, bits=bits, qjl_dim=128, softmax_scale=features**-0.5)
    return call, [q, k, v, *pools, lens, table.reshape(-1), cuts, distribution, *matrices], 0


def of_pages(x, tokens, context, kv_heads, features, page, bits):
    """Pools, (lens, table, cuts) and matrices; all sequences have the same number of keys before the step."""
    of_each = -(-(context + max(tokens)) // page)
    pages = of_each * len(tokens)
    slots = (pages, page, kv_heads)
    norms = lambda *more: x(*slots, *more, of=lambda a: np.abs(a) + 1, dtype=jnp.bfloat16)
    pools = (x.bytes(*slots, features // 2), x.bytes(*slots, 16), norms(2), x.bytes(*slots, features // 2), norms())
    table = jnp.arange(pages, dtype=jnp.int32).reshape(len(tokens), of_each)
    lens = jnp.asarray(np.array(tokens) + context, jnp.int32)
    cuts = jnp.asarray(np.cumsum([0, *tokens]), jnp.int32)
    matrices = (
        jnp.asarray(generate_rotation_matrix(seed=0, head_dim=features)),
        jnp.asarray(generate_projection_matrix(seed=1, projection_dim=128, head_dim=features)),
        jnp.asarray(solve_lloyd_max(bits=bits - 1, dim=features).centroids, jnp.float32),
        jnp.asarray(solve_lloyd_max(bits=bits, dim=features).centroids, jnp.float32),
    )
    return pools, (lens, table, cuts), matrices


# --- Requests


@cache
def prepared(text):
    """A function that makes the call and waits for it, and its results."""
    case = json.loads(text)
    x = Values(jnp.dtype(case["dtype"]))
    call, operands, moving = globals()[case["operation"]](x, **case["sizes"])
    if case["mode"] == "forward":
        function = jax.jit(call)
    else:
        cotangents = [x(*o.shape) for o in jax.eval_shape(call, *operands)]

        def weighed(given, *rest):
            pairs = zip(call(*given, *rest), cotangents, strict=True)
            return sum((o.astype(jnp.float32) * ct.astype(jnp.float32)).sum() for o, ct in pairs)

        gradient = jax.jit(jax.value_and_grad(weighed))
        function = lambda *a: gradient(a[:moving], *a[moving:])
    began = time.perf_counter()
    results = jax.block_until_ready(function(*operands))
    return function, operands, results, time.perf_counter() - began


def answer(request):
    """{} if results are written, otherwise the seconds of a call."""
    function, operands, results, first = prepared(json.dumps(request["case"], sort_keys=True))
    if "keep" in request:
        leaves = [
            np.asarray(a.astype(jnp.promote_types(a.dtype, jnp.float32)), np.float64) for a in jax.tree.leaves(results)
        ]
        np.savez(request["keep"], *leaves)
        return dict(first=first, jax=jax.__version__)
    began = time.perf_counter()
    for _ in range(request["calls"]):
        results = function(*operands)
    jax.block_until_ready(results)
    return dict(seconds=(time.perf_counter() - began) / request["calls"])


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a package is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answered = {"forgotten": prepared.cache_clear()} if "forget" in request else answer(request)
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps(answered), file=answers, flush=True)


if __name__ == "__main__":
    main()
