"""Derivatives of flash_attention in XLA: higher orders, transposes, linear memory, and inside shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp, reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .xla_attention import SMALL, SPEC, case, cotangent, directions, distance, normal, of_kernel, only, plain

pytestmark = pytest.mark.usefixtures("x64")


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


# --- Transforms and memory --------------------------------------------------------------------------------------------


def wired(operands, spec):
    """The three functions connected like the primitives: differentiable by the rules of the trio."""

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


@pytest.mark.slow
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
