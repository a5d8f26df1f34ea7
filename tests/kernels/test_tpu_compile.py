"""The TPU kernels pass the real TPU compiler, for every generation, within its memories.

Compiling all configs of all named shapes takes hours; a normal run has the heuristic configs for a few shapes on each
generation, and a few calls with rarer operands; `benchmarks.tpu_compile` keeps a record.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel
from benchmarks import tpu_compile as programs
from ejkernel.kernels._pallas.tpu.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.kernels._pallas.tpu.flash_attention.launch import VMEM_BYTES
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.types import ATTENTION_SHAPES
from ejkernel.types.shapes import shapes_of
from tests.gpu.attention_cases import CASES

from .tpu_compiler import TARGETS, compiled, device

pytest.importorskip("libtpu")

IMPLEMENTATIONS = {f.__name__: f for f in (flash_attention, flash_attention_bwd, flash_attention_jvp)}
# The programs of a normal run: shapes with heuristic configs, and calls from the list of cases.
QUICK_SHAPES = {
    ("v5e", "flash_attention", "gemma3-27b-local"),
    ("v5e", "flash_attention_bwd", "gpt-oss-local"),
    ("v5p", "flash_attention_jvp", "llama3-8b"),
    ("v5p", "flash_attention", "gpt-oss"),
    ("v6e", "flash_attention", "llama3-8b"),
    ("v6e", "flash_attention_bwd", "bert-large"),
    ("tpu7x", "flash_attention_bwd", "gemma2-9b-local"),
    ("tpu7x", "flash_attention_jvp", "vit-large"),
    ("v5e", "mean_pooling_bwd", "texts"),
    ("v5p", "gla", "gla-1.3b"),
    ("v6e", "grouped_matmul", "mixtral-8x7b-up"),
    ("tpu7x", "lightning_attention_bwd", "minimax-text-01"),
}
QUICK_CASES = {
    ("v5e", "bias of pairs, capped", "float32"),
    ("v5p", "segments, causal, bias", "bfloat16"),
    ("v6e", "packed, window, sinks", "bfloat16"),
    ("tpu7x", "mask of keys, causal", "bfloat16"),
}


@pytest.mark.parametrize("generation, primitive, shape", sorted(QUICK_SHAPES))
def test_named_shapes(generation, primitive, shape):
    """The heuristics' config."""
    operation = KERNELS[primitive].algorithm.name
    x, spec = programs.call(operation, shapes_of(operation)[shape])
    config = kernel_registry.find(primitive, "pallas", "tpu").implementation.heuristic(spec, x, TARGETS[generation])
    assert "tpu_custom_call" in programs.compiled_call(generation, primitive, x, spec, config).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("", "_bwd", "_jvp"))
@pytest.mark.parametrize("operation", programs.measured_on_tpus())
@pytest.mark.parametrize("generation", TARGETS)
def test_every_config(generation, operation, kind):
    """Every config of the space of every named shape: listing them takes seconds, too slow for a collection."""
    listed = [x for x in programs.programs([generation], [operation]) if x.primitive == operation + kind]
    assert listed
    for program in listed:
        try:
            assert "tpu_custom_call" in programs.compiled(program).as_text()
        except Exception as error:
            error.add_note(str(program))
            raise


@pytest.mark.parametrize(
    "generation, case, dtype",
    [
        pytest.param(
            generation,
            case,
            dtype,
            marks=() if (generation, case.name, dtype) in QUICK_CASES else pytest.mark.slow,
            id=f"{generation}-{case.name}-{dtype}",
        )
        for generation in TARGETS
        for case in CASES
        for dtype in ("bfloat16", "float32")
        if not case.spec.dropout_rate
    ],
)
def test_operands_and_options(generation, case, dtype):
    """Forward, backward and tangent with all operands of a call, by the heuristic configs."""
    x, spec = case.make(300, jnp.dtype(dtype))
    x = jax.eval_shape(lambda: x)
    for name, implementation in IMPLEMENTATIONS.items():
        config = implementation.heuristic(spec, x, TARGETS[generation])
        assert "tpu_custom_call" in programs.compiled_call(generation, name, x, spec, config).as_text()


@pytest.mark.parametrize("operation", ("flash_attention_bwd", "flash_attention_jvp"))
@pytest.mark.parametrize("generation", [pytest.param(g, marks=() if g == "v5p" else pytest.mark.slow) for g in TARGETS])
def test_splits_of_keys(generation, operation):
    """The tangent of a split accumulates o in float32 in its output."""
    x, spec = programs.call("flash_attention", ATTENTION_SHAPES["llama3-8b"])
    spec = replace(spec, split=True)
    config = IMPLEMENTATIONS[operation].heuristic(spec, x, TARGETS[generation])
    assert "tpu_custom_call" in programs.compiled_call(generation, operation, x, spec, config).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
@pytest.mark.parametrize("generation", ["v5p", "tpu7x"])
def test_the_largest_tiles(generation, operation):
    """A bias and a mask for every logit, beside as much of dq as is kept, on the smallest vector memory."""
    x, spec = programs.call("flash_attention", ATTENTION_SHAPES["llama3-70b"])
    logits = (1, 1, x.q.shape[1], x.k.shape[1])
    x = x._replace(bias=jax.ShapeDtypeStruct(logits, jnp.float32), mask=jax.ShapeDtypeStruct(logits, jnp.bool_))
    config = IMPLEMENTATIONS[operation].heuristic(spec, x, TARGETS[generation])
    assert "tpu_custom_call" in programs.compiled_call(generation, operation, x, spec, config).as_text()


@pytest.mark.parametrize("generation", TARGETS)
def test_memory_of_a_core(generation):
    """No kernel may need more than the smallest vector memory, whether or not the target is known."""
    core = device(generation)
    assert core.device_kind == TARGETS[generation].device_kind
    abstract = jax.sharding.AbstractDevice(device_kind=core.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
        assert pltpu.get_tpu_info().vmem_capacity_bytes > VMEM_BYTES


@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        ("float16", {}, "float16"),
        ("bfloat16", dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "dropout"),
        ("bfloat16", {}, "features"),
    ],
)
def test_calls_unsupported_by_kernels_still_compile(dtype, options, reason):
    """The reason is given, and XLA's implementation takes the call."""
    features = 264 if reason == "features" else 64
    q = jax.ShapeDtypeStruct((1, 256, 2, features), jnp.dtype(dtype))
    attend = lambda q: ejkernel.lax.flash_attention(q, q, q, **options)
    said = str(ejkernel.explain("flash_attention", q, q, q, target=TARGETS["v6e"], **options))
    assert reason in said
    assert "tpu_custom_call" not in compiled(attend, "v6e", q).as_text()
