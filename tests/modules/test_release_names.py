"""The 48 names that EasyDeL 0.3.0 imports, from 15 modules."""

import importlib
import logging

import jax.numpy as jnp

from ejkernel import callib, loggings, ops

NAMES = {
    "ejkernel": ("__version__",),
    "ejkernel.callib": ("cdiv", "ejit"),
    "ejkernel.callib._ejit": ("_get_args_signature",),
    "ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface": ("_decode_path",),
    "ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd": ("_ragged_gdr_chunked_prefill",),
    "ejkernel.loggings": ("get_logger",),
    "ejkernel.modules": (
        "GroupedMatmulConfig",
        "UnifiedAttentionConfig",
        "attention",
        "blocksparse_attention",
        "flash_attention",
        "gated_delta_rule",
        "grouped_matmul",
        "multi_latent_ragged_page_attention",
        "multi_latent_ragged_page_attention_v2",
        "ragged_decode_attention",
        "ragged_gated_delta_rule",
        "ragged_page_attention_v2",
        "ragged_page_attention_v3",
        "ragged_page_attention_v3_turboquant",
        "ring_attention",
        "scaled_dot_product_attention",
        "state_space_v1",
        "state_space_v2",
        "unified_attention",
    ),
    "ejkernel.modules.operations": ("quantized_matmul",),
    "ejkernel.modules.operations.configs": (
        "AttentionConfig",
        "BaseOperationConfig",
        "BlockSparseAttentionConfig",
        "FlashAttentionConfig",
        "GatedDeltaRuleConfig",
        "MultiLatentRaggedPageAttentionConfig",
        "MultiLatentRaggedPageAttentionV2Config",
        "RaggedPageAttentionv2Config",
        "RaggedPageAttentionv3Config",
        "RingAttentionConfig",
        "ScaledDotProductAttentionConfig",
        "UnifiedAttentionConfig",
    ),
    "ejkernel.modules.operations.ragged_page_attention_v2_turboquant": ("ragged_page_attention_v2_turboquant",),
    "ejkernel.ops": ("forward_autotune_only",),
    "ejkernel.quantization": ("dequantize", "prepack_quantized_weights", "quantize"),
    "ejkernel.quantization.turboquant.codebook": ("solve_lloyd_max",),
    "ejkernel.quantization.turboquant.matrices": ("generate_projection_matrix", "generate_rotation_matrix"),
    "ejkernel.types": ("MaskInfo",),
}


def test_every_name_can_be_imported():
    assert (sum(map(len, NAMES.values())), len(NAMES)) == (48, 15)
    for module, names in NAMES.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is not None


def test_ejit_is_jit():
    f = callib.ejit(static_argnames=("n",), donate_argnames=["x"])(lambda x, n: x * n)
    g = callib.ejit(lambda x: x + 1)
    assert f(jnp.ones(3), n=2).tolist() == [2, 2, 2] and g(jnp.ones(3)).tolist() == [2, 2, 2]
    assert g.lower(jnp.ones(3)).as_text() and callib.cdiv(7, 2) == 4


def test_signatures_tell_shapes_and_dtypes_apart():
    from ejkernel.callib._ejit import _get_args_signature

    of = lambda x: _get_args_signature((x,), {"y": [x]})
    assert of(jnp.ones(3)) == of(jnp.zeros(3)) and isinstance(of(jnp.ones(3)), str)
    assert len({of(jnp.ones(3)), of(jnp.ones(4)), of(jnp.ones(3, jnp.int32)), of(3)}) == 4


def test_loggers_say_a_thing_once(caplog):
    logger = loggings.get_logger("of a test", logging.INFO)
    for _ in range(2):
        logger.warning_once("a %s", "warning")
        logger.info_once("a warning")
        logger.info("said")
    assert [record.getMessage() for record in caplog.records] == ["a warning", "a warning", "said", "said"]


def test_only_the_forward_is_measured():
    with ops.forward_autotune_only():
        assert callib.ejit(lambda x: x)(1) == 1
