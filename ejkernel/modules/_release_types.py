"""The types of the arguments and results of operations in the form of ejkernel 0.0.78.

Signatures, stubs and documents show them. An argument that the operation has under the same name in the modules API has
its type from there. Written here are the others, and those that take arrays of more shapes in the form of 0.0.78.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from jax.lax import Precision
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from ..types import MaskInfo, Window
from ..types.arguments import CuSeqlens, DropoutKey, LogitsBias
from ._argument_names import modules_parameters
from ._composed import COMPOSED
from ._operation import OPERATIONS
from ._public_function import OWN_PARAMETERS
from .operations.configs import BaseOperationConfig

_OPTIONS = {
    # Of every operation.
    **OWN_PARAMETERS,
    "cfg": BaseOperationConfig | OWN_PARAMETERS["cfg"],
    "in_specs": OWN_PARAMETERS["in_specs"] | tuple[PartitionSpec | None, ...],
    # What is computed.
    "mask_info": MaskInfo | None,
    "causal": bool,
    "deterministic": bool,
    "sliding_window": Window | None,
    "softmax_scale": float | None,
    "logits_soft_cap": float | None,
    "dropout_prob": float,
    "init_bias": Callable[[], LogitsBias] | None,
    "chunk_size": int | None,
    "axis_name": str | tuple[str, ...] | None,
    "act_fn": Callable[[Float[Array, "..."]], Float[Array, "..."]] | None,
    "use_gated_rmsnorm": bool,
    "rmsnorm_eps": float,
    "axis": Literal["row", "col"] | None,
    # What has to agree with the arrays.
    "bits": int | None,
    "qjl_dim": int | None,
    "n_groups": int | None,
    # Values of which `FORMS` allows some.
    "normalize_output": bool,
    "purify": bool,
    "mask_value": float | None,
    "precision": Precision | str | None,
    **dict.fromkeys(("dtype", "softmax_dtype", "logits_dtype", "compute_dtype"), DTypeLike | None),
    **dict.fromkeys(("sequence_parallelism_mesh_axis_name", "qkv_layouts", "mask_builder", "out_shard_callback"), None),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), None),
    # How 0.0.78 computes.
    **dict.fromkeys(("use_v2", "use_v3", "fuse"), bool),
    **dict.fromkeys(("fused_backward", "optimized", "use_chunked", "interpret", "do_padding"), bool | None),
    **dict.fromkeys(("strict_fuse", "allow_dense_fallback", "use_best_config"), bool | None),
    **dict.fromkeys(("vmem_limit_bytes", "seq_threshold_3d", "revsplit_k_parts"), int | None),
    "tpu_path": Literal["hybrid", "packed", "predecode"] | None,
    "gemv_mode": str | None,
    "revsplit_k": str | None,
    "autotune_chunk_candidates": tuple[int, ...] | list[int] | None,
}

# Of each head, of each key/value head, or shared by all heads.
_SINKS = Float[Array, " sinks"] | Float[Array, "heads sinks"]
_Q, _K, _V = (
    Float[Array, "batch q_len q_heads head_dim"],
    Float[Array, "batch kv_len kv_heads head_dim"],
    Float[Array, "batch kv_len kv_heads v_head_dim"],
)
_DENSE = {"q": _Q, "k": _K, "v": _V, "bias": LogitsBias, "softmax_aux": _SINKS}
_PACKED_Q = Float[Array, "q_tokens q_heads head_dim"]
_PACKED_K, _PACKED_V = Float[Array, "kv_tokens kv_heads head_dim"], Float[Array, "kv_tokens kv_heads v_head_dim"]
_K_POOL = Float[Array, "pages page_size kv_heads head_dim"]
_V_POOL = Float[Array, "pages page_size kv_heads v_head_dim"]
_KV_POOL = Float[Array, "pages page_size pooled_heads padded_dim"]
_PACKED_POOL = Float[Array, "pages page_size packed_heads packing padded_dim"]
_LATENT_POOL = Float[Array, "pages page_size features"] | Float[Array, "pages packed_slots packing features"]
_TABLES = Integer[Array, "sequences pages_per_seq"]
_FLAT_TABLES = _TABLES | Integer[Array, " table_entries"]
# One number, or those of [decodes, prefills, all] sequences.
_COUNT = int | Integer[Array, ""] | Integer[Array, "1"] | Integer[Array, "3"]
_STEP = {"context_lens": Integer[Array, " sequences"], "query_start_loc": Integer[Array, " sequences+1"]}

_ARRAYS: dict[str, dict[str, Any]] = {
    "flash_attention": {
        **_DENSE,
        "q": _Q | _PACKED_Q,
        "k": _K | _PACKED_K | _K_POOL,
        "v": _V | _PACKED_V | _V_POOL,
        "block_tables": Integer[Array, "batch pages_per_seq"],
    },
    "attention": {**_DENSE, "dropout_rng": DropoutKey},
    "scaled_dot_product_attention": {
        **_DENSE,
        **dict.fromkeys(("cum_seqlens_q", "cum_seqlens_k"), Integer[Array, " batch"]),
    },
    "blocksparse_attention": {
        **_DENSE,
        "q": Float[Array, "batch q_heads q_len head_dim"],
        "k": Float[Array, "batch kv_heads kv_len head_dim"],
        "v": Float[Array, "batch kv_heads kv_len v_head_dim"],
        "attention_mask": Bool[Array, "batch kv_len"]
        | Integer[Array, "batch kv_len"]
        | Bool[Array, "batch q_len kv_len"]
        | Bool[Array, "#batch #q_heads q_len kv_len"],
    },
    "ring_attention": {"softmax_aux": _SINKS},
    "ragged_decode_attention": {
        "q": Float[Array, "batch q_heads head_dim"] | Float[Array, "batch 1 q_heads head_dim"],
        "softmax_aux": _SINKS,
    },
    "ragged_page_attention_v2": {"softmax_aux": _SINKS},
    "ragged_page_attention_v3": {
        "kv_pages": _KV_POOL | _PACKED_POOL,
        "block_tables": _FLAT_TABLES,
        "num_seqs": _COUNT,
        "softmax_aux": _SINKS,
    },
    "ragged_page_attention_v2_turboquant": {"softmax_aux": _SINKS},
    "ragged_page_attention_v3_turboquant": {"block_tables": _FLAT_TABLES, "num_seqs": _COUNT, "softmax_aux": _SINKS},
    "unified_attention": {
        "key_cache": _K_POOL,
        "value_cache": _K_POOL,
        "alibi_slopes": Float[Array, " q_heads"],
        "qq_bias": Float[Array, "queries queries"],
        "softmax_aux": _SINKS,
    },
    "multi_latent_ragged_page_attention": {
        **_STEP,
        "queries_nope": Float[Array, "tokens q_heads latent_dim"],
        "queries_pe": Float[Array, "tokens q_heads rope_dim"],
        "keys_values": Float[Array, "tokens latent_dim"],
        "keys_pe": Float[Array, "tokens rope_dim"],
        "kv_pages": _LATENT_POOL,
        "block_tables": _FLAT_TABLES,
        "distribution": _COUNT,
    },
    "grouped_matmul": {
        "rhs_scale": Float[Array, ""]
        | Float[Array, " groups"]
        | Float[Array, "groups n"]
        | Float[Array, "groups 1 n"]
        | Float[Array, "groups 1 1 n"],
        "rhs_bias": Float[Array, "groups 1 n"] | Float[Array, "groups n"],
    },
    "state_space_v1": {"gate": Float[Array, "batch seq_len channels"], "conv_state": Float[Array, "..."]},
    "state_space_v2": {"gate": Float[Array, "batch seq_len heads*head_dim"], "conv_state": Float[Array, "..."]},
    "mean_pooling": {"x": Float[Array, "batch seq_len heads features"], "cu_seqlens": CuSeqlens},
}
_ARRAYS["multi_latent_ragged_page_attention_v2"] = _ARRAYS["multi_latent_ragged_page_attention"]

# Arguments of the modules API by which those of the form of 0.0.78 are typed: of which operation, and other names.
_OPERATION = {
    "attention": "flash_attention",
    "scaled_dot_product_attention": "flash_attention",
    "ragged_page_attention_v2": "ragged_page_attention",
    "unified_attention": "ragged_page_attention",
}
_RENAMED = {"query": "q", "key": "k", "value": "v", "decay": "g", "recurrent_state": "states"}

_O = Float[Array, "batch q_len q_heads v_head_dim"]
_STEP_OF_LATENTS = tuple[Float[Array, "tokens q_heads latent_dim"], _LATENT_POOL]
RESULTS: dict[str, Any] = {
    "attention": tuple[_O, Float[Array, "batch q_heads q_len kv_len"]],
    "scaled_dot_product_attention": _O,
    "ragged_page_attention_v2": Float[Array, "tokens q_heads head_dim"],
    "unified_attention": Float[Array, "tokens q_heads head_dim"],
    "multi_latent_ragged_page_attention": _STEP_OF_LATENTS,
    "multi_latent_ragged_page_attention_v2": _STEP_OF_LATENTS,
}
"""The results of the operations that exist only in the form of 0.0.78."""


def types_of(name: str) -> dict[str, Any]:
    """The types of all arguments of an operation in the form of 0.0.78, those that may be left out without None."""
    of = _OPERATION.get(name, name)
    parameters = inspect.signature(COMPOSED[of]).parameters.values() if of in COMPOSED else ()
    parameters = modules_parameters(OPERATIONS[of]) if of in OPERATIONS else parameters
    shared = {p.name: p.annotation for p in parameters}
    renamed = {new: shared[old] for new, old in _RENAMED.items() if old in shared}
    others = {n: _OPTIONS[n] for n in (*OWN_PARAMETERS, "precision")}  # of the modules API, with another meaning there
    return {**_OPTIONS, **shared, **renamed, **others, **_ARRAYS.get(name, {})}
