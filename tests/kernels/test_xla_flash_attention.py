"""The XLA implementation of flash_attention against its own formula, in float64 and in the precision of its inputs."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla import _attention, _tiles
from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp, reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

B, S, T, H, G, D, E = 2, 21, 27, 4, 2, 8, 12
SMALL = KernelConfig(block_q=8, block_k=16)
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "softmax_scale")
SPEC = FlashAttentionSpec(softmax_scale=D**-0.5)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def plain(b=B, s=S, t=T, h=H, g=G, d=D, e=E):
    return Operands(normal(b, s, h, d, seed=1), normal(b, t, g, d, seed=2), normal(b, t, g, e, seed=3))


def segments(n, seed):
    """Ascending ids with some padding at the end."""
    ids = np.sort(np.random.default_rng(seed).integers(0, 3, (B, n)), axis=1)
    ids[:, -4:] = -1
    return ids.astype(np.int32)


def dropout(b, h):
    index = np.indices((b, h), np.uint32)
    words = np.broadcast_to(np.array([[[7]], [[11]]], np.uint32), (2, b, h))
    return np.concatenate([words, index]).transpose(1, 2, 0)


LENGTHS = dict(cu_seqlens_q=np.array([[0, 6, 6, 17]], np.int32), cu_seqlens_k=np.array([[0, 9, 12, 24]], np.int32))
FEATURES = {  # operands, options of the spec
    "nothing": ({}, {}),
    "causal": ({}, dict(causal=True)),
    "window": ({}, dict(window=(3, 2))),
    "softcap": ({}, dict(softcap=2.0)),
    "bias": (dict(bias=normal(B, H, S, T)), {}),
    "mask": (dict(mask=normal(1, H, S, T) > 0.3), {}),
    "segments": (dict(q_segment_ids=segments(S, 1), kv_segment_ids=segments(T, 2)), {}),
    "sinks": (dict(sinks=normal(1, H, 3)), {}),
    "scale": (dict(softmax_scale=normal(1, H)), {}),
    "dropout": (dict(dropout=dropout(B, H)), dict(dropout_rate=0.3)),
    "packed": (LENGTHS, {}),
}
BROADCAST = {
    "bias_of_rows": (dict(bias=normal(1, H, S, 1)), {}),
    "bias_of_columns": (dict(bias=normal(B, 1, 1, T)), {}),
    "mask_of_columns": (dict(mask=normal(B, 1, 1, T) > 0.3), {}),
    "scale_of_batch": (dict(softmax_scale=normal(B, 1)), {}),
    "window_to_the_right": ({}, dict(window=(None, 4))),
}
COMBINED = {
    "causal+softcap+bias+sinks+scale": ("causal", "softcap", "bias", "sinks", "scale"),
    "window+mask+bias+scale": ("window_to_the_right", "mask_of_columns", "bias_of_rows", "scale_of_batch"),
    "packed+causal+dropout+bias": ("packed", "causal", "dropout", "bias_of_columns"),
    "packed+window+sinks+softcap": ("packed", "window", "sinks", "softcap"),
    "everything": ("causal", "window", "softcap", "bias", "mask", "segments", "sinks", "scale", "dropout"),
}


def case(*names):
    """Operands and spec with all these features."""
    operands, options = plain(), {}
    for feature in (feature for name in names for feature in COMBINED.get(name, (name,))):
        arrays, spec = (FEATURES | BROADCAST)[feature]
        operands, options = operands._replace(**arrays), options | spec
    return operands, FlashAttentionSpec(softmax_scale=D**-0.5, **options)


def present(operands):
    return tuple(name for name in DIFFERENTIABLE if getattr(operands, name) is not None)


def only(**arrays):
    return Operands(None, None, None)._replace(**arrays)


def directions(operands, seed=100):
    """A tangent for each differentiable operand."""
    return {
        n: normal(*getattr(operands, n).shape, seed=seed).astype(getattr(operands, n).dtype) for n in present(operands)
    }


def cotangent(operands, spec):
    """A cotangent for o and lse."""
    outputs = jax.eval_shape(partial(reference, spec=spec), *operands)
    return Outputs(*(jnp.asarray(normal(*x.shape, seed=200), x.dtype) for x in outputs))


def of_reference(operands, spec, moved, cotangents):
    """Outputs, tangents and gradients of the formula, by JAX."""
    f = lambda arrays: reference(*operands._replace(**arrays), spec=spec)
    arrays = {name: getattr(operands, name) for name in moved}
    outputs, tangents = jax.jvp(f, (arrays,), (moved,))
    is_visible = jnp.isfinite(outputs.lse)
    cotangents = Outputs(cotangents.o, jnp.where(is_visible, cotangents.lse, 0))  # −∞ is no number to differentiate at
    (gradients,) = jax.vjp(f, arrays)[1](cotangents)
    return outputs, tangents, gradients


def of_kernel(operands, spec, moved, cotangents, config=SMALL):
    """The same by the three lowered functions."""
    outputs = flash_attention(*operands, spec=spec, config=config)
    tangents = flash_attention_jvp(operands, outputs, only(**moved), spec=spec, config=config)
    gradients = flash_attention_bwd(operands, outputs, cotangents, wrt=tuple(moved), spec=spec, config=config)
    return outputs, tangents, dict(zip(moved, gradients, strict=True))


def distance(a, b):
    """The largest difference of each array over the largest number of the second; equal infinities are equal."""

    def of(x, y):
        difference = jnp.where(x == y, 0, x - y)
        return jnp.abs(difference).max() / jnp.maximum(1e-30, jnp.abs(jnp.where(jnp.isfinite(y), y, 0)).max())

    return jax.tree.map(of, a, b)


@partial(jax.jit, static_argnames=("spec", "config"))
def compared(operands, moved, cotangents, spec, config):
    return distance(
        of_kernel(operands, spec, moved, cotangents, config), of_reference(operands, spec, moved, cotangents)
    )


@pytest.mark.parametrize("block", (24, 8))
@pytest.mark.parametrize("causal", (False, True))
def test_of_logits_near_1e12(causal, block):
    """Of which float32 keeps every 65536th number: lse is off by more than an exponent may be.

    A query has all of its weight on one key: o = v there, dv is a sum of do, and nothing moves with q and k.
    """
    q, k, v, do = (normal(2, 24, 2, 32, seed=n).astype(np.float32) for n in range(4))
    x = Operands(q := np.float32(1e6) * q, k := np.float32(1e6) * k, v)
    spec, config = FlashAttentionSpec(causal=causal, softmax_scale=0.3), KernelConfig(block_q=block, block_k=block)

    @jax.jit
    def run(x, do):
        outputs = flash_attention(*x, spec=spec, config=config)
        tangents = flash_attention_jvp(x, outputs, only(q=x.q, v=do), spec=spec, config=config)
        wrt = ("q", "k", "v")
        return (
            outputs.o,
            tangents.o,
            flash_attention_bwd(x, outputs, Outputs(do, None), wrt=wrt, spec=spec, config=config),
        )

    s = np.einsum("bshd,bthd->bhst", q.astype(float), k.astype(float))
    p = np.eye(24)[np.where(np.tri(24, dtype=bool) | (not causal), s, -np.inf).argmax(-1)]
    o, moved, (dq, dk, dv) = run(x, do)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(o, np.einsum("bhst,bthe->bshe", p, v))
    close(dv, np.einsum("bhst,bshe->bthe", p, do))
    assert np.isfinite(moved).all()
    rounding = 1e-6 * 0.3 * np.abs(np.einsum("bshe,bthe->bhst", do, v)).max()
    assert np.abs(dq).max() <= rounding * np.abs(k).max() and np.abs(dk).max() <= rounding * np.abs(q).max()


@pytest.mark.parametrize("name", [*FEATURES, *COMBINED])
def test_equals_the_formula_in_float64(name):
    operands, spec = case(name)
    errors = compared(operands, directions(operands), cotangent(operands, spec), spec=spec, config=SMALL)
    assert max(jax.tree.leaves(errors)) < 1e-13, errors


def test_blocks_change_nothing():
    """Sinks join once and dropout keeps the same weights, however the logits are cut."""
    operands, spec = case("causal", "sinks", "dropout")

    @partial(jax.jit, static_argnums=(0, 1))
    def run(block_q, block_k):
        config = KernelConfig(block_q=block_q, block_k=block_k)
        outputs = flash_attention(*operands, spec=spec, config=config)
        given = cotangent(operands, spec)
        return outputs, flash_attention_bwd(
            operands, outputs, given, wrt=("q", "k", "v", "sinks"), spec=spec, config=config
        )

    assert max(jax.tree.leaves(distance(run(16, 5), run(64, 64)))) < 1e-13


# --- Precision --------------------------------------------------------------------------------------------------------


def peaks(q, k):
    """Queries that point at one key each."""
    at = np.random.default_rng(0).integers(0, k.shape[1] - q.shape[1], q.shape[1])
    towards = np.repeat(k[:, at], q.shape[2] // k.shape[2], axis=2)
    return 8 * q.shape[-1] ** 0.5 * towards / np.linalg.norm(towards, axis=-1, keepdims=True)


FAMILIES = {
    "normal": lambda q, k: q,
    "large_logits": lambda q, k: 30 * q,
    "one_hot_peaks": peaks,
    "long_uniform_rows": lambda q, k: 1e-3 * q,
}


@partial(jax.jit, static_argnames=("spec", "config"))
def errors_of_both(operands, moved, cotangents, spec, config):
    """Of kernel and formula in one precision against the formula in float64; the last bit of the largest number."""
    wide = lambda x: jax.tree.map(lambda a: a.astype(jnp.float64), x)
    truth = of_reference(wide(operands), spec, wide(moved), wide(cotangents))
    error = lambda found: jax.tree.map(lambda a, b: jnp.abs(a.astype(jnp.float64) - b).max(), found, truth)
    kernel = of_kernel(operands, spec, moved, cotangents, config)
    last_bit = jax.tree.map(lambda a, b: jnp.finfo(a.dtype).eps * jnp.abs(b).max(), kernel, truth)
    return error(kernel), error(of_reference(operands, spec, moved, cotangents)), last_bit


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16), ids=lambda x: jnp.dtype(x).name)
def test_errors_are_bounded_by_those_of_the_formula(dtype):
    """At most twice as large in the forward and three times in derivatives, counting from the last bit."""
    spec = FlashAttentionSpec(causal=True, softmax_scale=32**-0.5)
    q, k, v = plain(b=1, s=48, t=640, h=2, g=1, d=32, e=32)[:3]
    for name, queries in FAMILIES.items():
        operands = Operands(*(jnp.asarray(x, dtype) for x in (queries(q, k), k, v)))
        found = errors_of_both(
            operands, directions(operands), cotangent(operands, spec), spec, KernelConfig(block_q=32, block_k=128)
        )
        for part, factor, *errors in zip(("forward", "tangent", "gradient"), (2, 3, 3), *found, strict=True):
            for kernel, formula, last_bit in zip(*map(jax.tree.leaves, errors), strict=True):
                assert kernel <= factor * max(formula, last_bit), (name, part, errors)


# --- What is given and what is asked ----------------------------------------------------------------------------------


def test_a_missing_cotangent_or_tangent_is_zero():
    operands, spec = case("causal+softcap+bias+sinks+scale")
    moved, given = directions(operands), cotangent(operands, spec)
    zero = Outputs(*map(np.zeros_like, given))

    @jax.jit
    def run():
        outputs = flash_attention(*operands, spec=spec, config=SMALL)
        backward = lambda *ct: flash_attention_bwd(operands, outputs, Outputs(*ct), wrt=("v",), spec=spec, config=SMALL)
        tangent = lambda **moved: flash_attention_jvp(operands, outputs, only(**moved), spec=spec, config=SMALL)
        halves = backward(given.o, None), backward(None, given.lse)
        wholes = backward(given.o, zero.lse), backward(zero.o, given.lse)
        parts = [tangent(**{name: tangent_of}) for name, tangent_of in moved.items()]
        return distance((halves, jax.tree.map(lambda *x: sum(x), *parts)), (wholes, tangent(**moved)))

    assert max(jax.tree.leaves(run())) < 1e-13


def test_no_gradient_is_computed_that_is_not_asked_for():
    operands, spec = case("causal")
    outputs = jax.eval_shape(partial(flash_attention, spec=spec, config=SMALL), *operands)

    def products(*wrt):
        run = lambda outputs: flash_attention_bwd(operands, outputs, outputs, wrt=wrt, spec=spec, config=SMALL)
        return jax.jit(run).lower(outputs).as_text().count("stablehlo.dot_general")

    assert products("q", "k", "v") == 7  # s and dp for the sums over a row, s and dp again, dq, dk, dv
    assert products("q") == products("k") == 5 and products("v") == 3


def test_fully_masked_rows_are_zero():
    operands = plain()._replace(mask=np.arange(S)[:, None] % 2 * np.ones((1, 1, 1, T)) > 0)
    run = jax.jit(of_kernel, static_argnums=1)
    (o, lse), tangents, gradients = run(operands, SPEC, directions(operands), cotangent(operands, SPEC))
    assert not o[:, ::2].any() and (lse[:, :, ::2] == -jnp.inf).all()
    assert not tangents.o[:, ::2].any() and not tangents.lse[:, :, ::2].any() and not gradients["q"][:, ::2].any()
    sinks = normal(1, H, 2)
    o, lse = flash_attention(*operands._replace(sinks=sinks), spec=SPEC, config=SMALL)
    assert not o[:, ::2].any()
    np.testing.assert_allclose(lse[0, :, 0], jax.nn.logsumexp(sinks[0], axis=-1), rtol=1e-14)


@pytest.mark.parametrize("name", ("segments", "mask_of_columns", "packed", "far_window"))
def test_what_nobody_sees_may_be_nan(name):
    far = Operands(*plain(s=5)), FlashAttentionSpec(softmax_scale=1.0, window=(3, 0))
    operands, spec = far if name == "far_window" else case(name)
    x = _attention.folded(operands, spec)
    is_visible = jnp.broadcast_to(_attention.visible(x), (B, G, H // G, *operands.q.shape[1:2], T)).any((2, 3))
    fully_masked = ~is_visible.transpose(0, 2, 1)[..., None]
    assert fully_masked.any()
    poisoned = operands._replace(
        k=jnp.where(fully_masked, jnp.nan, operands.k), v=jnp.where(fully_masked, jnp.nan, operands.v)
    )
    moved, cotangents = directions(operands), cotangent(operands, spec)
    for run in (of_kernel, of_reference):
        run = jax.jit(run, static_argnames="spec")
        clean, found = run(operands, spec, moved, cotangents), run(poisoned, spec, moved, cotangents)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), clean, found)), run


def test_packed_sequences_are_independent():
    """Equal to each sequence on its own; tokens of no sequence give o = 0 and lse = −∞."""
    operands, spec = plain(), FlashAttentionSpec(causal=True, softmax_scale=D**-0.5)
    o, lse = jax.jit(partial(flash_attention, spec=spec, config=SMALL))(*operands._replace(**LENGTHS))
    (starts_q,), (starts_k,) = LENGTHS.values()
    last_q, last_k = slice(*starts_q[-2:]), slice(*starts_k[-2:])
    alone = jax.jit(partial(reference, spec=spec))(operands.q[:, last_q], operands.k[:, last_k], operands.v[:, last_k])
    here = Outputs(o[:, last_q], lse[:, :, last_q])
    assert max(jax.tree.leaves(distance(here, alone))) < 1e-14
    assert not o[:, starts_q[-1] :].any() and (lse[:, :, starts_q[-1] :] == -jnp.inf).all()


@pytest.mark.parametrize("run", (of_kernel, of_reference))
def test_tokens_of_no_sequence_have_no_sinks(run):
    operands, spec = case("packed", "sinks")
    end = LENGTHS["cu_seqlens_q"][0, -1]
    cotangents = cotangent(operands, spec)
    without = Outputs(cotangents.o.at[:, end:].set(0), cotangents.lse.at[:, :, end:].set(0))
    run = jax.jit(run, static_argnums=1)
    (o, lse), tangents, gradients = run(operands, spec, directions(operands), cotangents)
    assert not o[:, end:].any() and (lse[:, :, end:] == -jnp.inf).all() and jnp.isfinite(lse[:, :, :end]).all()
    assert not tangents.o[:, end:].any() and not tangents.lse[:, :, end:].any()
    np.testing.assert_array_equal(gradients["sinks"], run(operands, spec, directions(operands), without)[2]["sinks"])


@pytest.mark.parametrize("s, t", ((0, 5), (5, 0)))
def test_nothing_of_nothing(s, t):
    operands = plain(s=s, t=t)
    (o, lse), tangents, gradients = of_kernel(operands, SPEC, directions(operands), cotangent(operands, SPEC))
    assert o.shape == (B, s, H, E) and not o.any() and (lse == -jnp.inf).all() and not tangents.o.any()
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    "s, t, window, causal", [*itertools.product((40, 7), (40, 64), ((9, 3), (None, 0), (0, None)), (0, 1))]
)
def test_a_tile_is_computed_if_some_pair_in_it_is_visible(s, t, window, causal):
    spec = FlashAttentionSpec(causal=bool(causal), window=window)
    operands = plain(s=s, t=t)
    _, grid = _tiles.cut(operands, spec, KernelConfig(block_q=8, block_k=16))
    is_visible = np.asarray(_attention.visible(_attention.folded(operands, spec))).reshape(s, t)
    is_visible = np.pad(is_visible, [(0, -n % size) for n, size in zip(is_visible.shape, grid.size, strict=True)])
    rows, columns = grid.size
    tiles = is_visible.reshape(is_visible.shape[0] // rows, rows, -1, columns).any((1, 3))
    assert list(zip(*grid.starts, strict=True)) == [(i * rows, j * columns) for i, j in np.argwhere(tiles)]


# --- Transforms and memory --------------------------------------------------------------------------------------------


def wired(operands, spec):
    """The three functions wired to each other as the primitives are: differentiable by the rules of the trio."""

    @jax.custom_jvp
    def f(arrays):
        return flash_attention(*operands._replace(**arrays), spec=spec, config=SMALL)

    @f.defjvp
    def rule(primals, tangents):
        (arrays,), (moved,) = primals, tangents
        outputs = f(arrays)
        return outputs, flash_attention_jvp(
            operands._replace(**arrays), outputs, only(**moved), spec=spec, config=SMALL
        )

    return f


def test_second_order():
    """jvp and vjp of the lowered functions themselves."""
    operands, spec = case("causal+softcap+bias+sinks+scale")
    moved, cotangents = directions(operands), cotangent(operands, spec)
    arrays = {n: getattr(operands, n) for n in moved}

    def of_kernel_functions(arrays):
        f = wired(operands, spec)
        outputs = f(arrays)
        gradients = flash_attention_bwd(
            operands._replace(**arrays), outputs, cotangents, wrt=tuple(moved), spec=spec, config=SMALL
        )
        tangents = jax.jvp(f, (arrays,), (moved,))[1]
        return dict(zip(moved, gradients, strict=True)), tangents

    def of_formula(arrays):
        f = lambda arrays: reference(*operands._replace(**arrays), spec=spec)
        return jax.vjp(f, arrays)[1](cotangents)[0], jax.jvp(f, (arrays,), (moved,))[1]

    def derivatives(f):
        weights = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape, seed=9), x.dtype), jax.eval_shape(f, arrays))
        return jax.jvp(f, (arrays,), (moved,))[1], jax.vjp(f, arrays)[1](weights)[0]

    found, wanted = jax.jit(lambda: (derivatives(of_kernel_functions), derivatives(of_formula)))()
    assert max(jax.tree.leaves(distance(found, wanted))) < 1e-12


def test_tangent_and_backward_are_transposes():
    """⟨u, J v⟩ = ⟨Jᵀ u, v⟩."""
    operands, spec = case("causal+softcap+bias+sinks+scale")
    moved, cotangents = directions(operands), cotangent(operands, spec)
    _, tangents, gradients = jax.jit(of_kernel, static_argnums=1)(operands, spec, moved, cotangents)
    inner = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    np.testing.assert_allclose(inner(cotangents, tangents), inner(gradients, moved), rtol=1e-12)


def of_size(length, heads=2, features=32):
    """float32 arrays of a causal call: operands, outputs."""
    x = jax.ShapeDtypeStruct((1, length, heads, features), jnp.float32)
    return (x, x, x), Outputs(x, jax.ShapeDtypeStruct((1, heads, length), jnp.float32))


def memory(f, *args):
    """Bytes besides arguments and results."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


CAUSAL = dict(spec=FlashAttentionSpec(causal=True), config=KernelConfig(block_q=128, block_k=128))
PROGRAMS = {
    "forward": lambda qkv, out: flash_attention(*qkv, **CAUSAL),
    "backward": lambda qkv, out: flash_attention_bwd(Operands(*qkv), out, out, wrt=("q", "k", "v"), **CAUSAL),
    "tangent": lambda qkv, out: flash_attention_jvp(Operands(*qkv), out, Operands(*qkv), **CAUSAL),
}
ORDERS = {
    "itself": lambda f: f,
    "jvp": lambda f: lambda *x: jax.jvp(f, x, x),
    "vjp": lambda f: lambda *x: jax.grad(lambda x: sum(y.sum() for y in jax.tree.leaves(f(*x))))(x),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_linear_in_the_length(program, order):
    f = ORDERS[order](PROGRAMS[program])
    short, long = memory(f, *of_size(1024)), memory(f, *of_size(2048))
    assert long < 2.2 * short


def test_memory_of_the_gradient_at_8192():
    def gradient(qkv, do):
        out = flash_attention(*qkv, **CAUSAL)
        return flash_attention_bwd(Operands(*qkv), out, Outputs(do, None), wrt=("q", "k", "v"), **CAUSAL)

    qkv, out = of_size(8192, heads=4, features=64)
    assert memory(gradient, qkv, out.o) < 100 * 2**20


def test_manual_axes_vary_in_what_a_loop_carries():
    operands = plain(b=8)

    def run(q, k, v):
        outputs = flash_attention(q, k, v, spec=SPEC, config=SMALL)
        return flash_attention_bwd(Operands(q, k, v), outputs, outputs, wrt=("k",), spec=SPEC, config=SMALL)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.sharding.PartitionSpec("x")
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over))(*operands[:3])
    assert max(jax.tree.leaves(distance(sharded, run(*operands[:3])))) < 1e-14
