"""The operations in the form of ejkernel 0.0.78, as data: the order of their arrays, their options and allowed values.

`_release.py` binds a call by this table and translates the rest. Options under `chosen_here` affect how 0.0.78
computes, never what; here the Executor chooses that. Options under `only` may have values that ask for, or permit, what
is done anyway; any other value raises, with the reason given beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Only:
    """The allowed values of an option, and the reason."""

    default: Any
    allows: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class Form:
    """The form of one operation.

    Attributes:
        arrays: the positional arguments in order.
        required: the number of arrays, from the first on, that a call must have.
        options: keywords with their defaults.
        only: keywords with a restricted set of values.
        chosen_here: keywords that accept any value, since they only affect how a result is computed.
        marks: keywords that no other call of the modules API has, so that a call with one of them is in this form.
        is_told_by: (arrays by name) → whether the arrays of a call show that it is in this form.
        by_position: a call with more positional arrays than this is in this form.
        has_mesh: whether it takes platform, cfg, mesh, in_specs and out_specs.
    """

    arrays: tuple[str, ...]
    required: int
    options: Mapping[str, Any]
    only: Mapping[str, Only] = field(default_factory=dict)
    chosen_here: tuple[str, ...] = ()
    marks: frozenset[str] = frozenset()
    is_told_by: Callable[[Mapping[str, Any]], bool] = lambda call: False
    by_position: int | None = None
    has_mesh: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        """Every keyword with its default."""
        only = {name: rule.default for name, rule in self.only.items()}
        return {**self.options, **only, **dict.fromkeys(self.chosen_here), **(_MESH if self.has_mesh else {})}


def _rank(call: Mapping[str, Any], name: str) -> int | None:
    return None if (x := call.get(name)) is None or not hasattr(x, "shape") else len(x.shape)


def _two_float_dtypes(call: Mapping[str, Any]) -> bool:
    """Whether lhs and rhs are of two float dtypes of 16 bits and more."""
    found = [getattr(call.get(name), "dtype", None) for name in ("lhs", "rhs")]
    is_float = lambda dtype: dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    return all(map(is_float, found)) and found[0] != found[1]


_MESH = dict.fromkeys(("platform", "cfg", "mesh", "in_specs", "out_specs"))
_none = lambda reason: Only(None, lambda x: x is None, reason)
_is = lambda value, reason: Only(value, lambda x: x is value or x == value, reason)

_PRECISION = Only(
    jax.lax.Precision.DEFAULT,
    lambda x: x in (None, "default", jax.lax.Precision.DEFAULT),
    "products are of the dtype of the arrays, added up in float32; give float32 arrays for more",
)
_LOGITS_DTYPE = Only(
    jnp.float32,
    lambda x: x is None or np.dtype(x).itemsize <= 4,
    "logits are float32; give float64 arrays for more",
)
_MASK_VALUE = Only(
    None,
    lambda x: x is None or float(x) <= -1e4,
    "what is masked has the weight 0, so it must be None or a large negative number",
)
_COMPUTE_DTYPE = Only(
    jnp.bfloat16,
    lambda x: x is None or np.dtype(x).itemsize <= 4,
    "products are of the dtype of the arrays, added up in float32",
)
_SCALE = _none("the pages of this operation have no scale")
_BUILDER = _none("who sees whom is said by mask_info, causal and sliding_window; or give block_mask, see block_mask_of")

_POOLS = ("key_indices_pages", "key_signs_pages", "key_norms_pages", "value_indices_pages", "value_norms_pages")
_TABLES = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
_MATRICES = ("rotation_matrix", "qjl_projection", "key_codebook", "value_codebook")

_DENSE = dict(mask_info=None, causal=False, sliding_window=None, softmax_scale=None, logits_soft_cap=None)
_PAGED = dict(softmax_scale=None, logits_soft_cap=None, sliding_window=None)

FORMS: dict[str, Form] = {
    "flash_attention": Form(
        ("q", "k", "v", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux", "block_tables"),
        required=3,
        options=_DENSE | dict(dropout_prob=0.0, dropout_seed=None),
        only=dict(
            normalize_output=_is(True, "weights are always divided by their sum; return_lse of ejkernel.lax gives it"),
            precision=_PRECISION,
            logits_dtype=_LOGITS_DTYPE,
        ),
        marks=frozenset(("mask_info", "normalize_output", "logits_dtype")),
    ),
    "attention": Form(
        ("q", "k", "v", "bias", "dropout_rng", "softmax_aux"),
        required=3,
        options=_DENSE | dict(init_bias=None, deterministic=True, dtype=jnp.bfloat16, dropout_prob=0.0),
        only=dict(softmax_dtype=Only(None, _LOGITS_DTYPE.allows, _LOGITS_DTYPE.reason)),
        has_mesh=False,
    ),
    "scaled_dot_product_attention": Form(
        ("q", "k", "v", "bias", "cum_seqlens_q", "cum_seqlens_k"),
        required=3,
        options={name: x for name, x in _DENSE.items() if name != "logits_soft_cap"} | dict(init_bias=None),
    ),
    "blocksparse_attention": Form(
        ("q", "k", "v", "softmax_aux", "bias"),
        required=3,
        options=_DENSE | dict(causal=True, attention_mask=None, chunk_size=None),
        only=dict(
            sequence_parallelism_mesh_axis_name=_none("a sequence over devices is that of ring_attention"),
            qkv_layouts=_BUILDER,
            mask_builder=_BUILDER,
            purify=_is(False, "rows that see nothing are 0 already"),
        ),
        chosen_here=("fused_backward",),
        marks=frozenset(("mask_info", "attention_mask", "chunk_size", "mask_builder", "qkv_layouts", "fused_backward")),
    ),
    "ring_attention": Form(
        ("q", "k", "v", "softmax_aux", "bias"),
        required=3,
        options=_DENSE | dict(axis_name=None, chunk_size=None),
        only=dict(mask_builder=_BUILDER),
        chosen_here=("fused_backward",),
        marks=frozenset(("mask_info", "chunk_size", "mask_builder", "fused_backward", "mesh", "sliding_window")),
    ),
    "ragged_decode_attention": Form(
        ("q", "k", "v", "sequence_start", "sequence_end", "softmax_aux"),
        required=5,
        options=_PAGED | dict(num_splits=None, return_lse=False),
        is_told_by=lambda call: (
            _rank(call, "q") == 4
            or (_rank(call, "softmax_aux") == 1 and call["softmax_aux"].shape[0] != call["q"].shape[-2])
            or (isinstance(call.get("in_specs"), tuple | list) and len(call["in_specs"]) == 6)
        ),
    ),
    "ragged_page_attention_v2": Form(
        ("q", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs", "softmax_aux"),
        required=6,
        options=_PAGED,
        only=dict(compute_dtype=_COMPUTE_DTYPE, mask_value=_MASK_VALUE),
        chosen_here=("optimized", "vmem_limit_bytes"),
    ),
    "ragged_page_attention_v3": Form(
        ("q", "k", "v", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs", "softmax_aux"),
        required=8,
        options=_PAGED | dict(softmax_scale=1.0),
        only=dict.fromkeys(("q_scale", "k_scale", "v_scale"), _SCALE),
        chosen_here=("vmem_limit_bytes",),
        marks=frozenset(("q_scale", "k_scale", "v_scale", "vmem_limit_bytes")),
        is_told_by=lambda call: (
            _rank(call, "block_tables") == 1
            or _rank(call, "kv_pages") == 5
            or getattr(call.get("num_seqs"), "shape", ()) == (3,)
        ),
    ),
    "ragged_page_attention_v2_turboquant": Form(
        ("q", *_POOLS, *_TABLES, *_MATRICES, "softmax_aux"),
        required=14,
        options=_PAGED | dict(bits=None, qjl_dim=None),
        only=dict(compute_dtype=_COMPUTE_DTYPE, mask_value=_MASK_VALUE),
        chosen_here=("vmem_limit_bytes",),
        marks=frozenset(("bits", "qjl_dim", "compute_dtype", "mask_value", "vmem_limit_bytes")),
    ),
    "ragged_page_attention_v3_turboquant": Form(
        ("q", "k", "v", *_POOLS, *_TABLES, *_MATRICES, "softmax_aux"),
        required=16,
        options=_PAGED | dict(bits=None, qjl_dim=None),
        chosen_here=("vmem_limit_bytes",),
        marks=frozenset(("bits", "qjl_dim", "vmem_limit_bytes")),
        is_told_by=lambda call: _rank(call, "block_tables") == 1 or getattr(call.get("num_seqs"), "shape", ()) == (3,),
    ),
    "unified_attention": Form(
        (
            *("q", "key_cache", "value_cache", "context_lens", "block_tables", "query_start_loc"),
            *("alibi_slopes", "qq_bias", "softmax_aux"),
        ),
        required=6,
        options=_PAGED,
        only=dict(causal=_is(True, "attention over pages is causal")),
        chosen_here=("seq_threshold_3d",),
    ),
    "multi_latent_ragged_page_attention": Form(
        (
            *("queries_nope", "queries_pe", "keys_values", "keys_pe", "kv_pages"),
            *("context_lens", "block_tables", "query_start_loc", "distribution"),
        ),
        required=9,
        options=_PAGED,
        only=dict(mask_value=_MASK_VALUE, q_scale=_SCALE, k_scale=_SCALE, v_scale=_SCALE),
    ),
    "grouped_matmul": Form(
        ("lhs", "rhs", "group_sizes", "group_offset", "existing_out", "rhs_scale"),
        required=3,
        options=dict(rhs_bias=None, transpose_rhs=False, preferred_element_type=jnp.float32)
        | dict(use_v2=False, use_v3=False),
        only=dict(precision=_PRECISION, out_shard_callback=_none("constrain the result, which is returned")),
        chosen_here=("interpret", "do_padding"),
        marks=frozenset(("rhs_bias", "precision", "out_shard_callback", "interpret", "do_padding", "use_v2", "use_v3")),
        is_told_by=lambda call: _rank(call, "rhs_scale") == 4 or _two_float_dtypes(call),
        by_position=3,
    ),
    "quantized_matmul": Form(
        ("x", "w", "scales", "zeros"),
        required=3,
        options=dict(transpose=False, group_size=None, bits=None, mode="affine", axis=None)
        | dict(fuse=True, strict_fuse=None, allow_dense_fallback=None, tpu_path=None),
        chosen_here=("use_best_config", "gemv_mode", "revsplit_k", "revsplit_k_parts"),
        marks=frozenset(
            (
                *("axis", "fuse", "strict_fuse", "allow_dense_fallback", "tpu_path"),
                *("use_best_config", "gemv_mode", "revsplit_k", "revsplit_k_parts"),
            )
        ),
    ),
    "gated_delta_rule": Form(
        ("q", "k", "v", "beta", "g", "initial_state"),
        required=4,
        options=dict(use_qk_l2norm=True, return_state=False),
        chosen_here=("use_chunked", "autotune_chunk_candidates"),
        marks=frozenset(("use_chunked", "autotune_chunk_candidates")),
    ),
    "ragged_gated_delta_rule": Form(
        ("query", "key", "value", "beta", "decay", "recurrent_state", "query_start_loc", "state_indices"),
        required=4,
        options=dict(use_qk_l2norm=True),
        chosen_here=("chunk_size",),
        marks=frozenset(("query", "key", "value", "decay", "recurrent_state", "chunk_size")),
    ),
    "state_space_v1": Form(
        ("x", "A", "B", "C", "D", "dt", "gate", "initial_state", "conv_state"),
        required=6,
        options=dict(act_fn=None),
        marks=frozenset(("gate", "conv_state", "act_fn")),
    ),
    "state_space_v2": Form(
        ("x", "A", "B", "C", "D", "dt", "gate", "initial_state", "conv_state"),
        required=6,
        options=dict(n_groups=None, act_fn=None, use_gated_rmsnorm=False, rmsnorm_eps=1e-5),
        chosen_here=("precision",),
        marks=frozenset(("gate", "conv_state", "act_fn", "n_groups", "use_gated_rmsnorm", "rmsnorm_eps", "precision")),
    ),
    "mean_pooling": Form(
        ("x", "cu_seqlens"), required=1, options=dict(chunk_size=32), is_told_by=lambda call: _rank(call, "x") == 4
    ),
}
FORMS["multi_latent_ragged_page_attention_v2"] = FORMS["multi_latent_ragged_page_attention"]
