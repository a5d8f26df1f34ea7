"""flash_attention in Mosaic GPU, lowered for a Hopper GPU without one: every config of every shape that it takes."""

import jax
import jax.numpy as jnp
import pytest
from programs import all_equations

import ejkernel
from ejkernel.kernels._pallas.gpu._inline.products import product
from ejkernel.kernels._pallas.gpu.flash_attention import (
    SHORT,
    flash_attention,
    flash_attention_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import (
    FEATURES,
    space,
)
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import E4M3
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import LIMITS as E4M3_LIMITS
from ejkernel.kernels._pallas.gpu.flash_attention.tiles import COLUMNS, LIMITS
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .mosaic import CALLS, CUSTOM_CALL, HOPPER, PREDICATES, SIGHTS, arguments, kernels, lowered, q, run

# Of shapes whose programs differ only in sizes, the first.
# Head dims that are not powers of two, except that of expanded latents.
is_between = lambda name, x: x.q.shape[3] not in (64, 128, 256) and name != "deepseek-v3"
UNLIKE = list({(x.q.shape[3], x.v.shape[3], spec): name for name, (x, spec) in reversed(CALLS.items())}.values())
CONFIGS = [
    pytest.param(
        operation,
        name,
        config,
        id=f"{operation}, {name}, {config.block_q}x{config.block_k}x{config.num_stages}",
        marks=[pytest.mark.slow] if place or name not in UNLIKE or is_between(name, x) else [],
    )
    for operation, predicate in PREDICATES.items()
    for name, (x, spec) in CALLS.items()
    if predicate(spec, x, HOPPER) is None
    for place, config in enumerate(space(operation, x, spec, HOPPER))
]


@pytest.mark.parametrize("operation, name, config", CONFIGS)
def test_lowers(operation, name, config):
    x, spec = CALLS[name]
    text = lowered(run(operation, spec, config), *arguments(x))
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


def products(spec: FlashAttentionSpec, segments: bool = False) -> int:
    """The number of products of tiles in the program of the forward, which its compile time follows."""
    x = Operands(*[jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)] * 3)
    if segments:
        ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
        x = x._replace(q_segment_ids=ids, kv_segment_ids=ids)
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    program = jax.make_jaxpr(lambda x: flash_attention(*x, spec=spec, config=config))(x)
    emitted = [equation.params.get("mgpu_fn") for equation in all_equations(program)]
    return sum(emit is not None and emit.__qualname__.startswith(f"{product.__name__}.") for emit in emitted)


def test_masks_of_two_sides_add_no_products():
    """Masked and full blocks are in one loop."""
    full, window = products(FlashAttentionSpec()), dict(causal=True, window=(1023, None))
    assert full > 0
    assert products(FlashAttentionSpec(**window)) == products(FlashAttentionSpec(**window, softcap=50.0)) == full
    assert products(FlashAttentionSpec(), segments=True) == full


@pytest.mark.parametrize("limits, dtype", [(LIMITS, jnp.float16), (LIMITS, jnp.bfloat16), (E4M3_LIMITS, E4M3)])
def test_sums_keep_weights_in_range(limits, dtype):
    """No weight above the dtype's maximum passes; weights under a new maximum do, or each block would start again."""
    assert limits.row_sum_limit <= jnp.finfo(dtype).max
    assert 2 ** (limits.p_scale_log2 + limits.rescale_threshold) <= limits.row_sum_limit
    assert all(2**limits.p_scale_log2 * block_k / COLUMNS <= limits.row_sum_limit for block_k in (64, 128))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="before 0.12 JAX itself writes no kernel twice the same")
@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gemma3-12b-local", "h16-d128-full"])
def test_the_text_is_the_same_every_time(name):
    """A compilation cache looks a program up by its text."""
    x, spec = CALLS[name]
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    first, again = (lowered(lambda *x: flash_attention(*x, spec=spec, config=config), *x) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize("queries, keys", [(64, 64), (77, 300), (1000, 130)])
def test_lengths_that_fill_no_tile(queries, keys, operation):
    x = Operands(*(jax.ShapeDtypeStruct((2, n, 2, 64), jnp.float16) for n in (queries, keys, keys)))
    spec = FlashAttentionSpec(causal=True)
    assert PREDICATES[operation](spec, x, HOPPER) is None
    (config, *_) = space(operation, x, spec, HOPPER)
    assert CUSTOM_CALL in lowered(run(operation, spec, config), *arguments(x))


def test_inside_a_shard_map_that_checks_its_axes():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    part = jax.P("x", None, "y")
    of_a_part = lambda *x: ejkernel.lax.flash_attention(*x, causal=True)
    attention = jax.shard_map(of_a_part, mesh=mesh, in_specs=part, out_specs=part)
    x = jax.device_put([jnp.ones((4, 2 * SHORT, 4, 64), jnp.bfloat16)] * 3, jax.NamedSharding(mesh, part))
    total = lambda x: attention(*x).astype(jnp.float32).sum()
    assert lowered(jax.grad(total), x).count(f"custom_call @{CUSTOM_CALL}") == 2


def test_where_xla_splits_the_program():
    """The forward has an additional array: which thread block has which tile."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put([jnp.ones((4, 2 * SHORT, 4, 64), jnp.bfloat16)] * 3, jax.NamedSharding(mesh, jax.P("x")))
    attention = lambda x: ejkernel.lax.flash_attention(*x, causal=True)
    tangent = lambda x: jax.jvp(attention, (x,), (x,))
    for function, calls in ((attention, 1), (tangent, 2), (jax.grad(lambda x: attention(x).sum()), 2)):
        assert lowered(function, x).count("custom_call @CustomSPMDPartitioning") == calls


@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "kv", "s", "vs"])
def test_tangents_of_some_operands(moving):
    sinks = jax.ShapeDtypeStruct((1, 4, 2), jnp.float32)
    x, outputs, _ = arguments(Operands(q, q, q, sinks=sinks))
    spec = FlashAttentionSpec(causal=True)
    (config, *_) = space("flash_attention_jvp", x, spec, HOPPER)
    tangents = Operands(*(q if name in moving else None for name in "qkv"), sinks=sinks if "s" in moving else None)
    run = lambda *a: flash_attention_jvp(*a, spec=spec, config=config)
    assert CUSTOM_CALL in lowered(run, x, outputs, tangents)


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize(
    "D, V", [pytest.param(*size, marks=pytest.mark.slow if i else ()) for i, size in enumerate(FEATURES)]
)
@pytest.mark.parametrize("sight", SIGHTS)
def test_segments_and_packed_sequences(sight, D, V, operation):
    sized = lambda heads, width: jax.ShapeDtypeStruct((*q.shape[:2], heads, width), q.dtype)
    x = Operands(sized(4, D), sized(2, D), sized(2, V), **SIGHTS[sight])
    spec = FlashAttentionSpec(causal=True, window=(50, None), softcap=30.0)
    assert PREDICATES[operation](spec, x, HOPPER) is None
    (config, *_) = space(operation, x, spec, HOPPER)
    text = lowered(run(operation, spec, config), *arguments(x))
    assert text.count(f"custom_call @{CUSTOM_CALL}") == kernels(operation, x)


@pytest.mark.parametrize("operation", ["flash_attention", "flash_attention_bwd"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
@pytest.mark.parametrize("options", [{}, dict(causal=True, softcap=30.0), dict(precision="e4m3")], ids=str)
def test_a_scale_that_is_an_operand(options, shape, operation):
    wide = jax.ShapeDtypeStruct((2, 1024, 4, 128), q.dtype)
    bias = jax.ShapeDtypeStruct((1, 4, 1024, 1024), q.dtype) if "softcap" in options else None
    x, spec = Operands(wide, wide, wide, bias=bias), FlashAttentionSpec(**options)
    x = x._replace(softmax_scale=jax.ShapeDtypeStruct(shape, jnp.float32))
    assert PREDICATES[operation](spec, x, HOPPER) is None
    (config, *_) = space(operation, x, spec, HOPPER)
    assert CUSTOM_CALL in lowered(run(operation, spec, config), *arguments(x))


@pytest.mark.parametrize("sight", [None, *SIGHTS])
def test_a_gradient_is_two_kernels(sight, monkeypatch):
    """Packed sequences have no batch axis. The sequences are short, to trace little."""
    for length in ("LEAST_KEYS", "SHORT"):
        monkeypatch.setattr(f"ejkernel.kernels._pallas.gpu.flash_attention.{length}", 1)
    arrays = SIGHTS.get(sight, {})
    x = jax.ShapeDtypeStruct(q.shape[1:], q.dtype) if sight == "packed" else q
    arrays = {
        name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if sight == "packed" else a for name, a in arrays.items()
    }
    attention = lambda x, arrays: ejkernel.lax.flash_attention(*x, causal=True, **arrays).astype(jnp.float32).sum()
    wanted = sum(kernels(name, Operands(x, x, x, **arrays)) for name in ("flash_attention", "flash_attention_bwd"))
    assert lowered(jax.grad(attention), (x, x, x), arrays).count(f"custom_call @{CUSTOM_CALL}") == wanted


def test_calls_without_visibility_arrays_have_no_overhead():
    """No integer is read or computed before the kernel; the tiles of a thread block are a constant."""
    x, spec = CALLS["llama3-8b"]
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    text = lowered(run("flash_attention", spec, config), *arguments(x))
    before = text.split("custom_call @")[0].split("func.func public")[1]
    integers = [line for line in before.splitlines()[1:] if "i32" in line]
    constant, barrier = integers
    assert "stablehlo.constant" in constant and "optimization_barrier" in barrier, integers
