"""Shared by the tests of attention over a cache on TPU: calls with poisoned caches, and the check of results."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Target

from . import paged as mixed
from .paged import wide
from .tpu_interpreter import interpreted

slow = pytest.mark.slow
TARGET = Target("tpu", "TPU v6 lite")
STRANGE = np.array([-1, 2**31 - 1, -(2**31), 7, 10**6])
PAGE = 8


def prepared(operation, x, **options):
    call = OPERATIONS[operation].prepare_arguments(**x, **options)
    return OPERATIONS[operation].algorithm.operands(**call.named), call.spec


def check(operation, x, config, wanted, plain=None, **options):
    """Compares results with the definition: no NaN, at most twice the error of the formula in the same dtype."""
    operands, spec = prepared(operation, x, **options)
    implementation = kernel_registry.find(operation, "pallas", "tpu").implementation
    assert implementation.supports(spec, operands, TARGET) is None
    found = interpreted(lambda *a: implementation(*a, spec=spec, config=config))(*operands)
    formula = kernel_registry.find(operation, "xla").implementation
    known = formula(*prepared(operation, plain or x, **options)[0], spec=spec)
    for a, b, exact in zip(found, known, wanted, strict=False):
        a, b, exact = wide(a).reshape(np.shape(exact)), wide(b).reshape(np.shape(exact)), wide(exact)
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(a[~finite], exact[~finite])
        error, usual = (np.abs(y[finite] - exact[finite]).max(initial=0) for y in (a, b))
        assert error <= 2 * usual + 4e-7 * max(1, np.abs(exact[finite]).max(initial=0)), (error, usual)
    return found


def scales_of(slots, shape, rng):
    """Scales of keys and of values, of a shape or of that of `slots`, [P, page, G]; none for None."""
    if shape is None:
        return {}
    shape = slots if shape == "slots" else shape
    return {name: jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32) for name in ("k_scale", "v_scale")}


def without(hidden, x):
    """The pages and scales of slots in x, with NaN, or a number that NaN scales, in `hidden` slots [P, page]."""
    named = {n: a for n, a in x.items() if n.endswith(("pages", "_scale")) and a.ndim > 2}
    return {
        n: jnp.where(hidden.reshape(*hidden.shape, *(1,) * (a.ndim - 2)), 99 if a.dtype == jnp.int8 else jnp.nan, a)
        for n, a in named.items()
    }


def step(h=6, g=2, d=16, dtype="float32", pages="same", sinks=False, scales=None, drafts=0):
    """A prefill, a decode, a sequence without tokens, one with more tokens in the step than in all; invalid entries."""
    x, rng = mixed.ragged_step(h, g, d, dtype, dtype if pages == "same" else pages), np.random.default_rng(1)
    n, j = x["block_tables"].shape
    pool = x["kv_pages"][jnp.asarray(rng.integers(0, len(x["kv_pages"]), n * j))]
    x |= dict(kv_pages=pool, block_tables=jnp.asarray(rng.permutation(n * j).reshape(n, j), jnp.int32))
    if sinks:
        x["sinks"] = jnp.asarray(rng.standard_normal((h, 3)), jnp.float32)
    x |= scales_of((*pool.shape[:2], g), scales, rng)
    if drafts:
        x["draft_mask"] = jnp.asarray(rng.random((mixed.TOKENS, drafts)) < 0.5)
    return x


def rubbish(x):
    """NaN in unread slots and in queries of no sequence; any numbers in unused table entries."""
    (n, j), there = x["block_tables"].shape, np.arange(len(mixed.RAGGED_CONTEXTS)) < mixed.COUNT
    contexts = np.where(there, mixed.RAGGED_CONTEXTS, 0)[:, None]
    used = np.zeros((n * j, PAGE), bool)
    used[np.asarray(x["block_tables"]).reshape(-1)] = (np.arange(j * PAGE) < contexts).reshape(n * j, PAGE)
    tokens = np.arange(mixed.TOKENS) < sum(mixed.RAGGED_LENGTHS[: mixed.COUNT])
    return (
        x
        | without(~used, x)
        | dict(
            q=jnp.where(tokens[:, None, None], x["q"], jnp.nan),
            context_lens=jnp.where(there, x["context_lens"], -7),
            block_tables=jnp.where(np.arange(j) < -(-contexts // PAGE), x["block_tables"], STRANGE[:j]),
            query_start_loc=jnp.where(np.arange(n + 1) <= mixed.COUNT, x["query_start_loc"], -3),
        )
    )


def writing(h=6, g=2, d=16, dtype="float32", lengths=(17, 1, 0, 5, 5, 2)):
    """A step that fills pages, and writes beyond a table and to a page outside the pool."""
    x, rng = step(h, g, d, dtype), np.random.default_rng(2)
    x |= {name: jnp.asarray(rng.standard_normal((mixed.TOKENS, g, d)), dtype) for name in ("k", "v")}
    x["block_tables"] = x["block_tables"].at[4, 0].set(-1)
    contexts = jnp.array([24, 40, 1, 33, 6, mixed.J * PAGE + 1])
    return x | dict(
        context_lens=contexts, query_start_loc=jnp.asarray(np.cumsum((0, *lengths)), jnp.int32), num_seqs=jnp.array([6])
    )
