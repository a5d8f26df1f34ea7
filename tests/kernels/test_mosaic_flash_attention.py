"""flash_attention in Mosaic GPU, lowered for a Hopper GPU without one: every config of every shape that it takes."""

import re
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._dispatch import select
from ejkernel.kernels._pallas.gpu.flash_attention import (
    LEAST_KEYS,
    SHORT,
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    supports,
    supports_bwd,
    supports_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import (
    FEATURES,
    SHARED_BYTES,
    blocks_of_keys,
    shared_bytes,
    space,
)
from ejkernel.kernels._pallas.gpu.flash_attention.head_dims import parts_of, tile_width
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import E4M3
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import LIMITS as E4M3_LIMITS
from ejkernel.kernels._pallas.gpu.flash_attention.tiles import COLUMNS, LIMITS
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import ATTENTION_SHAPES, Platform, Target

HOPPER = Target("cuda", "NVIDIA H200")
CUSTOM_CALL = "mosaic_gpu_v2"


def call(shape) -> tuple[Operands, FlashAttentionSpec]:
    sizes = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in shape.sizes.items() if name in "qkv"}
    sinks = jax.ShapeDtypeStruct((1, shape.heads, shape.sinks), jnp.float32) if shape.sinks else None
    return Operands(**sizes, sinks=sinks), FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def run(operation, spec, config):
    """The operation as a function of the operands (and tangents), the outputs and a cotangent of o."""

    def forward(x, outputs, do):
        return flash_attention(*x, spec=spec, config=config)

    def backward(x, outputs, do):
        wrt = ("q", "k", "v") if x.sinks is None else ("q", "k", "v", "sinks")
        return flash_attention_bwd(x, outputs, Outputs(do, None), wrt=wrt, spec=spec, config=config)

    def tangent(x, outputs, do):
        return flash_attention_jvp(x, outputs, x, spec=spec, config=config)

    return {"flash_attention": forward, "flash_attention_jvp": tangent, "flash_attention_bwd": backward}[operation]


def arguments(x: Operands):
    batch, queries, heads, _ = x.q.shape
    o = jax.ShapeDtypeStruct((batch, queries, heads, x.v.shape[3]), x.q.dtype)
    return x, Outputs(o, jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)), o


CALLS = {name: call(shape) for name, shape in ATTENTION_SHAPES.items()}
PREDICATES = {"flash_attention": supports, "flash_attention_jvp": supports_jvp, "flash_attention_bwd": supports_bwd}
# Of shapes whose programs differ in sizes alone, the first.
# Head dims that are no powers of two, but for that of latents which are expanded.
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


@pytest.mark.parametrize("limits, dtype", [(LIMITS, jnp.float16), (LIMITS, jnp.bfloat16), (E4M3_LIMITS, E4M3)])
def test_sums_keep_weights_in_range(limits, dtype):
    """None beyond the dtype's greatest passes; like weights under a new maximum do, or each block would begin again."""
    assert limits.row_sum_limit <= jnp.finfo(dtype).max
    assert 2 ** (limits.p_scale_log2 + limits.rescale_threshold) <= limits.row_sum_limit
    assert all(2**limits.p_scale_log2 * block_k / COLUMNS <= limits.row_sum_limit for block_k in (64, 128))


@pytest.mark.parametrize(
    "name, queries, block_q",
    [
        ("bert-large", 512, 128),
        ("h16-d64-full", 1024, 192),
        ("h16-d64", 1024, 128),
        ("h16-d64", 4096, 192),
        ("h16-d128-full", 1024, 128),
        ("h16-d128-full", 4096, 192),
        ("h16-d128", 4096, 128),
        ("h16-d128", 8192, 192),
        ("gemma3-27b-local", 16384, 128),
    ],
)
def test_large_tiles_pay_from_some_queries_on(name, queries, block_q):
    x, spec = CALLS[name]
    x = x._replace(
        **{field: jax.ShapeDtypeStruct((1, queries, *getattr(x, field).shape[2:]), jnp.bfloat16) for field in "qkv"}
    )
    assert space("flash_attention", x, spec, HOPPER)[0].block_q == block_q


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="before 0.12 JAX itself writes no kernel twice the same")
@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gemma3-12b-local", "h16-d128-full"])
def test_the_text_is_the_same_every_time(name):
    """A compilation cache finds a program by its text."""
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


def test_the_library_picks_it():
    x, spec = CALLS["llama3-8b"]
    assert select("flash_attention", spec, x, HOPPER).platform == Platform.PALLAS
    assert select("flash_attention", spec, x, Target("cuda", "NVIDIA A100-SXM4-80GB")).platform != Platform.PALLAS
    text = lowered(lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, causal=True), *x[:3])
    assert CUSTOM_CALL in text


def test_inside_a_shard_map_that_checks_its_axes():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    part = jax.P("x", None, "y")
    of_a_part = lambda *x: ejkernel.lax.flash_attention(*x, causal=True)
    attention = jax.shard_map(of_a_part, mesh=mesh, in_specs=part, out_specs=part)
    x = jax.device_put([jnp.ones((4, 2 * SHORT, 4, 64), jnp.bfloat16)] * 3, jax.NamedSharding(mesh, part))
    total = lambda x: attention(*x).astype(jnp.float32).sum()
    assert lowered(jax.grad(total), x).count(f"custom_call @{CUSTOM_CALL}") == 2


def test_where_xla_splits_the_program():
    """The forward brings along an array of its own: which block of threads has which tile."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put([jnp.ones((4, 2 * SHORT, 4, 64), jnp.bfloat16)] * 3, jax.NamedSharding(mesh, jax.P("x")))
    attention = lambda x: ejkernel.lax.flash_attention(*x, causal=True)
    tangent = lambda x: jax.jvp(attention, (x,), (x,))
    for function, calls in ((attention, 1), (tangent, 2), (jax.grad(lambda x: attention(x).sum()), 2)):
        assert lowered(function, x).count("custom_call @CustomSPMDPartitioning") == calls


q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
REFUSED = {
    "platform": (dict(target=Target("tpu")), "not on tpu"),
    "capability": (dict(target=Target("cuda", "NVIDIA A100-SXM4-80GB")), "capability 9.0, not 8.0"),
    "dtype": (dict(q=jax.ShapeDtypeStruct(q.shape, jnp.float32)), "q is float32"),
    "head dim": (dict(q=jax.ShapeDtypeStruct((2, 128, 4, 84), q.dtype)), "a head dim of 84"),
    "small head dim": (dict(v=jax.ShapeDtypeStruct((2, 128, 4, 8), q.dtype)), "a head dim of 8"),
    "large head dim": (dict(v=jax.ShapeDtypeStruct((2, 128, 4, 264), q.dtype)), "a head dim of 264"),
    "queries": (dict(q=jax.ShapeDtypeStruct((2, 1, 4, 64), q.dtype)), "1 queries"),
    "bias": (dict(bias=jax.ShapeDtypeStruct((1, 1, 128, 128), q.dtype)), "bias"),
    "negative scale": (dict(spec=FlashAttentionSpec(softmax_scale=-1.0)), "scale of -1"),
    "sequences of few queries": (
        dict(
            k=jax.ShapeDtypeStruct((2, 900, 4, 64), q.dtype),
            cu_seqlens_q=jax.ShapeDtypeStruct((1, 5), jnp.int32),
        ),
        "4 sequences share 128 queries",
    ),
    "hidden first keys": (
        dict(q=jax.ShapeDtypeStruct((2, 64, 4, 64), q.dtype), window=(9, 0)),
        "some keys are seen by no query",
    ),
    "hidden last keys": (dict(window=(None, -1)), "some keys are seen by no query"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_it_does_not_take(name):
    changed, reason = REFUSED[name]
    target, spec = changed.pop("target", HOPPER), changed.pop("spec", None)
    spec = spec or FlashAttentionSpec(window=changed.pop("window", (None, None)))
    assert reason in supports(spec, Operands(q, q, q)._replace(**changed), target)


@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "kv", "s", "vs"])
def test_tangents_of_some_operands(moving):
    sinks = jax.ShapeDtypeStruct((1, 4, 2), jnp.float32)
    x, outputs, _ = arguments(Operands(q, q, q, sinks=sinks))
    spec = FlashAttentionSpec(causal=True)
    (config, *_) = space("flash_attention_jvp", x, spec, HOPPER)
    tangents = Operands(*(q if name in moving else None for name in "qkv"), sinks=sinks if "s" in moving else None)
    run = lambda *a: flash_attention_jvp(*a, spec=spec, config=config)
    assert CUSTOM_CALL in lowered(run, x, outputs, tangents)


IDS, CUTS = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32), jax.ShapeDtypeStruct((1, 5), jnp.int32)
SIGHTS = {
    "segments": dict(q_segment_ids=IDS, kv_segment_ids=IDS),
    "packed": dict(cu_seqlens_q=CUTS, cu_seqlens_k=CUTS),
}


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
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


@pytest.mark.parametrize("sight", [None, *SIGHTS])
def test_a_gradient_is_two_kernels(sight, monkeypatch):
    """Packed sequences have no batch axis. The sequences are short, so that little is traced."""
    for length in ("LEAST_KEYS", "SHORT"):
        monkeypatch.setattr(f"ejkernel.kernels._pallas.gpu.flash_attention.{length}", 1)
    arrays = SIGHTS.get(sight, {})
    x = jax.ShapeDtypeStruct(q.shape[1:], q.dtype) if sight == "packed" else q
    arrays = {
        name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if sight == "packed" else a for name, a in arrays.items()
    }
    attention = lambda x, arrays: ejkernel.lax.flash_attention(*x, causal=True, **arrays).astype(jnp.float32).sum()
    assert lowered(jax.grad(attention), (x, x, x), arrays).count(f"custom_call @{CUSTOM_CALL}") == 2


def test_calls_without_arrays_of_who_sees_whom_pay_nothing_for_them():
    """No integer is read or computed before the kernel; which tiles a block of threads has is a constant."""
    x, spec = CALLS["llama3-8b"]
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    text = lowered(run("flash_attention", spec, config), *arguments(x))
    before = text.split("custom_call @")[0].split("func.func public")[1]
    integers = [line for line in before.splitlines()[1:] if "i32" in line]
    assert len(integers) == 1 and "stablehlo.constant" in integers[0], integers


def test_few_keys_are_left_to_smaller_blocks():
    """By their number, or by the window."""
    few, many = (jax.ShapeDtypeStruct((2, n, 4, 64), jnp.bfloat16) for n in (LEAST_KEYS - 1, 4 * LEAST_KEYS))
    narrow = FlashAttentionSpec(causal=True, window=(127, None))
    for f in (flash_attention, flash_attention_jvp, flash_attention_bwd):
        assert "a query sees 255 keys" in f.supports(FlashAttentionSpec(), Operands(few, few, few), HOPPER)
        assert "a query sees 128 keys" in f.supports(narrow, Operands(many, many, many), HOPPER)
        assert f.supports(FlashAttentionSpec(), Operands(many, many, many), HOPPER) is None


def test_short_gradients_of_64_features_are_left_to_smaller_blocks():
    shape = lambda n, D: jax.ShapeDtypeStruct((2, n, 4, D), jnp.bfloat16)

    def left(queries, keys, D):
        x = Operands(shape(queries, D), shape(keys, D), shape(keys, D))
        return flash_attention_bwd.supports(FlashAttentionSpec(), x, HOPPER)

    assert "512 queries and 512 keys of 64 features" in left(512, 512, 64)
    assert left(1024, 512, 64) is left(512, 1024, 64) is left(512, 512, 128) is None


def test_says_which_gradients_of_certain_bits_it_does_not_take():
    x, packed = Operands(q, q, q), Operands(q, q, q, **SIGHTS["packed"])
    spec, batch_invariant = FlashAttentionSpec(deterministic=True), FlashAttentionSpec(batch_invariant=True)
    assert supports_bwd(spec, x, HOPPER) is supports_bwd(batch_invariant, x, HOPPER) is None
    assert supports_bwd(spec, packed, HOPPER) is None
    assert "sequences before it" in supports_bwd(batch_invariant, packed, HOPPER)
    many = jax.ShapeDtypeStruct((1, 2**19, 4, 64), q.dtype)
    assert "table" in supports_bwd(spec, Operands(many, many, many, **SIGHTS["packed"]), HOPPER)


@pytest.mark.parametrize("sight", ["full", "causal", *SIGHTS])
@pytest.mark.parametrize(
    "D, V", [(72, 72), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((64, 64), (192, 128), (256, 256)))]
)
def test_gradients_of_certain_bits_lower(D, V, sight):
    x = of_head_dims(D, V, q.shape[1] if sight in SIGHTS else 640, **SIGHTS.get(sight, {}))
    spec = FlashAttentionSpec(causal=sight != "full", deterministic=True)
    (config, *_) = space("flash_attention_bwd", x, spec, HOPPER)
    text = lowered(run("flash_attention_bwd", spec, config), *arguments(x))
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


HEAD_DIMS = [(D, D) for D in (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)]
HEAD_DIMS += [(192, 128), (96, 64), (64, 128), (72, 104), (40, 72), (256, 16), (80, 160), (136, 136), (40, 256)]


def of_head_dims(D: int, V: int, length: int = 640, **arrays) -> Operands:
    sized = lambda heads, width: jax.ShapeDtypeStruct((2, length, heads, width), jnp.bfloat16)
    return Operands(sized(4, D), sized(2, D), sized(2, V), **arrays)


# A head dim of each number of parts and each swizzle, with the most frequent masks; the rest takes long.
FAST = [(24, 24), (72, 72), (80, 80), (96, 64), (160, 160)]


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize(
    "D, V, sight",
    [
        pytest.param(*size, sight, marks=[] if size in FAST and sight in ("causal", "segments") else pytest.mark.slow)
        for size in HEAD_DIMS
        for sight in ("full", "causal", *SIGHTS)
    ],
)
def test_head_dims_lower(D, V, sight, operation):
    """Without a mask by every config, and where all masks meet by the likeliest. No feature is padded."""
    x = of_head_dims(D, V, q.shape[1] if sight in SIGHTS else 640, **SIGHTS.get(sight, {}))
    spec = FlashAttentionSpec(causal=sight != "full")
    if sight in SIGHTS:
        spec = replace(spec, window=(50, None), softcap=30.0)
    if reason := PREDICATES[operation](spec, x, HOPPER):
        assert operation == "flash_attention_jvp" and "tangents take" in reason
        assert D % 16 or V % 16 or (D != V and max(D / 192, V / 128) > 1)
        return
    for config in space(operation, x, spec, HOPPER)[: None if sight == "full" else 1]:
        text = lowered(run(operation, spec, config), *arguments(x))
        assert text.count(f"custom_call @{CUSTOM_CALL}") == 1
        assert sight in SIGHTS or not re.search(r"stablehlo.pad .*high = \[[^]]*\b[1-9]\d*\]", text)


@pytest.mark.parametrize("features", range(16, 257, 8))
@pytest.mark.parametrize("widest", [32, 64])
@pytest.mark.parametrize("even", [False, True], ids=["", "even"])
def test_parts_of_a_head_dim_hold_it(even, widest, features):
    """They follow one another, the columns beyond the features are less than a row, and only a row alone is cut."""
    parts = parts_of(features, widest, even)
    widths = [part.stop - part.start for part in parts]
    assert [part.start for part in parts] == [sum(widths[:n]) for n in range(len(parts))]
    assert tile_width(features, widest, even) == sum(widths) and parts[-1].start < features <= parts[-1].stop
    assert (features % 16 == 0 and widths == [features]) or all(w <= widest and w in (16, 32, 64) for w in widths)
    assert not even or len(set(widths)) == 1


def test_every_pair_of_head_dims_has_configs_that_fit():
    for (D, V), causal in product(product(range(16, 257, 8), repeat=2), (False, True)):
        length = 16384
        x, spec = of_head_dims(D, V, length), FlashAttentionSpec(causal=causal)
        configs = space("flash_attention", x, spec, HOPPER)
        assert configs, (D, V)
        for c in configs:
            assert c.block_k in blocks_of_keys(V)
            registers = tile_width(V) / 2 + c.block_k * 3 / 4
            assert shared_bytes((c.block_q, c.block_k, c.num_stages), D, V) <= SHARED_BYTES
            assert registers <= {128: 192, 192: 128}[c.block_q], (D, V, c)


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize("wrong", [dict(block_q=48), dict(block_k=72), dict(num_stages=9)], ids=str)
def test_blocks_that_no_kernel_is_made_for_are_refused(wrong, operation):
    x, spec = CALLS["llama3-8b"]
    config = replace(space(operation, x, spec, HOPPER)[0], **wrong)
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{operation}: config.{name} is {value}; the Mosaic GPU kernel takes"):
        jax.eval_shape(run(operation, spec, config), *arguments(x))


def test_blocks_that_exceed_shared_memory_are_refused():
    x, spec = CALLS["h16-d256"]
    config = replace(space("flash_attention", x, spec, HOPPER)[0], block_k=128)
    with pytest.raises(ValueError, match=r"128 queries and 128 keys in 2 stages take .* bytes of shared memory"):
        jax.eval_shape(run("flash_attention", spec, config), *arguments(x))
