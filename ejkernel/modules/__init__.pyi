"""Written by tests/stubs.py from the signatures of the functions."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from jax import Array
from jax.lax import Precision
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int8, Int32, Integer, UInt8, UInt32

from ..types import (
    BlockMask,
    ConfigLike,
    CuSeqlens,
    DropoutKey,
    LogitsBias,
    LogitsMask,
    MaskInfo,
    Platform,
    RecurrentState,
    Scale,
    Sinks,
    Window,
)
from .base import KernelConfig as KernelConfig
from .base import create_default_executor as create_default_executor
from .base import detect_platform as detect_platform
from .operations.block_mask_of import block_mask_of as block_mask_of
from .operations.blocksparse_attention import BlocksparseAttention as BlocksparseAttention
from .operations.configs import BaseOperationConfig
from .operations.configs import GroupedMatmulConfig as GroupedMatmulConfig
from .operations.configs import UnifiedAttentionConfig as UnifiedAttentionConfig
from .operations.differential_attention import differential_attention as differential_attention
from .operations.flash_attention import FlashAttention as FlashAttention
from .operations.flash_mla import FlashMLA as FlashMLA
from .operations.gated_delta_rule import GatedDeltaRule as GatedDeltaRule
from .operations.gla import GLA as GLA
from .operations.grouped_matmul import GroupedMatmul as GroupedMatmul
from .operations.lightning_attention import LightningAttention as LightningAttention
from .operations.lightning_indexer import lightning_indexer as lightning_indexer
from .operations.mean_pooling import MeanPooling as MeanPooling
from .operations.merge_attention import merge_attention as merge_attention
from .operations.merge_attention_shards import merge_attention_shards as merge_attention_shards
from .operations.multi_latent_page_attention import MultiLatentPageAttention as MultiLatentPageAttention
from .operations.native_sparse_attention import NativeSparseAttention as NativeSparseAttention
from .operations.native_sparse_blocks import NativeSparseBlocks as NativeSparseBlocks
from .operations.native_sparse_decode_attention import NativeSparseDecodeAttention as NativeSparseDecodeAttention
from .operations.page_attention import PageAttention as PageAttention
from .operations.page_plan import page_plan as page_plan
from .operations.quantized_matmul import QuantizedMatmul as QuantizedMatmul
from .operations.ragged_decode_attention import RaggedDecodeAttention as RaggedDecodeAttention
from .operations.ragged_gated_delta_rule import RaggedGatedDeltaRule as RaggedGatedDeltaRule
from .operations.ragged_page_attention import RaggedPageAttention as RaggedPageAttention
from .operations.ragged_page_attention_v2_turboquant import (
    RaggedPageAttentionV2TurboQuant as RaggedPageAttentionV2TurboQuant,
)
from .operations.ragged_page_attention_v3 import RaggedPageAttentionV3 as RaggedPageAttentionV3
from .operations.ragged_page_attention_v3_turboquant import (
    RaggedPageAttentionV3TurboQuant as RaggedPageAttentionV3TurboQuant,
)
from .operations.recurrent import Recurrent as Recurrent
from .operations.ring_order import ring_order as ring_order
from .operations.state_space_v1 import StateSpaceV1 as StateSpaceV1
from .operations.state_space_v2 import StateSpaceV2 as StateSpaceV2

def attention(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    dropout_rng: DropoutKey | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    logits_soft_cap: float | None = None,
    init_bias: Callable[[], LogitsBias] | None = None,
    deterministic: bool = True,
    dtype: DTypeLike | None = ...,
    dropout_prob: float = 0.0,
    softmax_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len kv_len"]]:
    """In the form of ejkernel 0.0.78."""

@overload
def blocksparse_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    block_mask: BlockMask,
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    softmax_aux: Sinks | None = None,
    cum_seqlens_q: CuSeqlens | None = None,
    cum_seqlens_k: CuSeqlens | None = None,
    dropout_seed: int | Integer[Array, ""] | None = None,
    *,
    block_size: tuple[int, int] = (128, 128),
    causal: bool = False,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_prob: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
):
    """`ejkernel.lax.blocksparse_attention`, with a choice of platform and mesh."""

@overload
def blocksparse_attention(
    q: Float[Array, "batch q_heads q_len head_dim"],
    k: Float[Array, "batch kv_heads kv_len head_dim"],
    v: Float[Array, "batch kv_heads kv_len v_head_dim"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    bias: LogitsBias | None = None,
    *,
    mask_info: MaskInfo | None = None,
    causal: bool = True,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    logits_soft_cap: float | None = None,
    attention_mask: Bool[Array, "batch kv_len"]
    | Integer[Array, "batch kv_len"]
    | Bool[Array, "batch q_len kv_len"]
    | Bool[Array, "#batch #q_heads q_len kv_len"]
    | None = None,
    chunk_size: int | None = None,
    sequence_parallelism_mesh_axis_name: None = None,
    qkv_layouts: None = None,
    mask_builder: None = None,
    purify: bool = False,
    fused_backward: bool | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def flash_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    softmax_aux: Sinks | None = None,
    cum_seqlens_q: CuSeqlens | None = None,
    cum_seqlens_k: CuSeqlens | None = None,
    dropout_seed: int | Integer[Array, ""] | None = None,
    *,
    causal: bool = False,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_prob: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
):
    """`ejkernel.lax.flash_attention`, with a choice of platform and mesh."""

@overload
def flash_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"]
    | Float[Array, "kv_tokens kv_heads head_dim"]
    | Float[Array, "pages page_size kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"]
    | Float[Array, "kv_tokens kv_heads v_head_dim"]
    | Float[Array, "pages page_size kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    cum_seqlens_q: CuSeqlens | None = None,
    cum_seqlens_k: CuSeqlens | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    block_tables: Integer[Array, "batch pages_per_seq"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Integer[Array, ""] | None = None,
    normalize_output: bool = True,
    precision: Precision | str | None = ...,
    logits_dtype: DTypeLike | None = ...,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def flash_mla(
    q: Float[Array, "batch q_len heads head_dim"],
    kv_latent: Float[Array, "batch kv_len latent_dim"],
    k_rope: Float[Array, "batch kv_len rope_dim"],
    w_kc: Float[Array, "latent_dim heads nope_dim"],
    w_vc: Float[Array, "latent_dim heads v_head_dim"],
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    softmax_aux: Sinks | None = None,
    dropout_seed: int | Integer[Array, ""] | None = None,
    *,
    causal: bool = False,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_prob: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_len heads v_head_dim"]
    | tuple[Float[Array, "batch q_len heads v_head_dim"], Float[Array, "batch heads q_len"]]
):
    """`ejkernel.lax.flash_mla`, with a choice of platform and mesh."""

@overload
def gated_delta_rule(
    q: Float[Array, "batch seq_len kv_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len q_heads v_head_dim"],
    beta: Float[Array, "batch seq_len q_heads"],
    g: Float[Array, "batch seq_len q_heads"] | None = None,
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = True,
    return_state: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """`ejkernel.lax.gated_delta_rule`, with a choice of platform and mesh."""

@overload
def gated_delta_rule(
    q: Float[Array, "batch seq_len kv_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len q_heads v_head_dim"],
    beta: Float[Array, "batch seq_len q_heads"],
    g: Float[Array, "batch seq_len q_heads"] | None = None,
    initial_state: RecurrentState | None = None,
    *,
    use_qk_l2norm: bool = True,
    return_state: bool = False,
    use_chunked: bool | None = None,
    autotune_chunk_candidates: tuple[int, ...] | list[int] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def gla(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    g: Float[Array, "batch seq_len q_heads head_dim"],
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """`ejkernel.lax.gla`, with a choice of platform and mesh."""

@overload
def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "groups k n"]
    | Int8[Array, "groups k n"]
    | Float[Array, "groups n k"]
    | Int8[Array, "groups n k"],
    group_sizes: Integer[Array, " all_groups"],
    group_offset: int | Integer[Array, ""] | Integer[Array, " 1"] | None = None,
    existing_out: Float[Array, "m n"] | None = None,
    rhs_scale: Float[Array, ""]
    | Float[Array, " groups"]
    | Float[Array, "groups n"]
    | Float[Array, "groups 1 n"]
    | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike = ...,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "m n"]:
    """`ejkernel.lax.grouped_matmul`, with a choice of platform and mesh."""

@overload
def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "groups k n"]
    | Int8[Array, "groups k n"]
    | Float[Array, "groups n k"]
    | Int8[Array, "groups n k"],
    group_sizes: Integer[Array, " all_groups"],
    group_offset: int | Integer[Array, ""] | Integer[Array, " 1"] | None = None,
    existing_out: Float[Array, "m n"] | None = None,
    rhs_scale: Float[Array, ""]
    | Float[Array, " groups"]
    | Float[Array, "groups n"]
    | Float[Array, "groups 1 n"]
    | Float[Array, "groups 1 1 n"]
    | None = None,
    *,
    rhs_bias: Float[Array, "groups 1 n"] | Float[Array, "groups n"] | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike = ...,
    use_v2: bool = False,
    use_v3: bool = False,
    precision: Precision | str | None = ...,
    out_shard_callback: None = None,
    interpret: bool | None = None,
    do_padding: bool | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def lightning_attention(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    g_gamma: Float[Array, " q_heads"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """`ejkernel.lax.lightning_attention`, with a choice of platform and mesh."""

@overload
def mean_pooling(
    x: Float[Array, "batch seq_len features"] | Float[Array, "tokens features"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "batch features"] | Float[Array, "sequences features"]:
    """`ejkernel.lax.mean_pooling`, with a choice of platform and mesh."""

@overload
def mean_pooling(
    x: Float[Array, "batch seq_len heads features"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = 32,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def multi_latent_page_attention(
    q_latent: Float[Array, "tokens q_heads latent_dim"],
    q_rope: Float[Array, "tokens q_heads rope_dim"],
    pages: Float[Array, "pages page_size latent_dim+rope_dim"] | Int8[Array, "pages page_size latent_dim+rope_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    softmax_aux: Sinks | None = None,
    k_scale: float | Float[Array, ""] | Float[Array, " 1"] | Float[Array, "pages page_size 1"] | None = None,
    plan: Int32[Array, "rows items 8"] | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    indices: Integer[Array, "tokens top_k"] | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "tokens q_heads latent_dim"]
    | tuple[Float[Array, "tokens q_heads latent_dim"], Float[Array, "tokens q_heads"]]
):
    """`ejkernel.lax.multi_latent_page_attention`, with a choice of platform and mesh."""

def multi_latent_ragged_page_attention(
    queries_nope: Float[Array, "tokens q_heads latent_dim"],
    queries_pe: Float[Array, "tokens q_heads rope_dim"],
    keys_values: Float[Array, "tokens latent_dim"],
    keys_pe: Float[Array, "tokens rope_dim"],
    kv_pages: Float[Array, "pages page_size features"] | Float[Array, "pages packed_slots packing features"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"] | Integer[Array, " table_entries"],
    query_start_loc: Integer[Array, " sequences+1"],
    distribution: int | Integer[Array, ""] | Integer[Array, " 1"] | Integer[Array, " 3"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    mask_value: float | None = None,
    q_scale: None = None,
    k_scale: None = None,
    v_scale: None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> tuple[
    Float[Array, "tokens q_heads latent_dim"],
    Float[Array, "pages page_size features"] | Float[Array, "pages packed_slots packing features"],
]:
    """In the form of ejkernel 0.0.78."""

def multi_latent_ragged_page_attention_v2(
    queries_nope: Float[Array, "tokens q_heads latent_dim"],
    queries_pe: Float[Array, "tokens q_heads rope_dim"],
    keys_values: Float[Array, "tokens latent_dim"],
    keys_pe: Float[Array, "tokens rope_dim"],
    kv_pages: Float[Array, "pages page_size features"] | Float[Array, "pages packed_slots packing features"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"] | Integer[Array, " table_entries"],
    query_start_loc: Integer[Array, " sequences+1"],
    distribution: int | Integer[Array, ""] | Integer[Array, " 1"] | Integer[Array, " 3"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    mask_value: float | None = None,
    q_scale: None = None,
    k_scale: None = None,
    v_scale: None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> tuple[
    Float[Array, "tokens q_heads latent_dim"],
    Float[Array, "pages page_size features"] | Float[Array, "pages packed_slots packing features"],
]:
    """In the form of ejkernel 0.0.78."""

def native_sparse_attention(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    g_cmp: Float[Array, "batch q_len q_heads"] | None = None,
    g_slc: Float[Array, "batch q_len q_heads"] | None = None,
    g_swa: Float[Array, "batch q_len q_heads"] | None = None,
    block_indices: Integer[Array, "batch q_len kv_heads blocks"] | None = None,
    cum_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    return_block_indices: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Int32[Array, "batch q_len kv_heads blocks"]]
):
    """`ejkernel.lax.native_sparse_attention`, with a choice of platform and mesh."""

def native_sparse_blocks(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    cum_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Int32[Array, "batch q_len kv_heads block_counts"]:
    """`ejkernel.lax.native_sparse_blocks`, with a choice of platform and mesh."""

def native_sparse_decode_attention(
    q: Float[Array, "batch q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_end: Integer[Array, " batch"],
    k_cmp: Float[Array, "batch kv_blocks kv_heads head_dim"] | None = None,
    v_cmp: Float[Array, "batch kv_blocks kv_heads v_head_dim"] | None = None,
    g_cmp: Float[Array, "batch q_heads"] | None = None,
    g_slc: Float[Array, "batch q_heads"] | None = None,
    g_swa: Float[Array, "batch q_heads"] | None = None,
    block_indices: Integer[Array, "batch kv_heads blocks"] | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    sliding_window: Window | None = None,
    softmax_scale: float | None = None,
    return_block_indices: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Int32[Array, "batch kv_heads blocks"]]
):
    """`ejkernel.lax.native_sparse_decode_attention`, with a choice of platform and mesh."""

def page_attention(
    q: Float[Array, "sequences q_heads head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"] | Int8[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"] | Int8[Array, "pages page_size kv_heads v_head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    softmax_aux: Sinks | None = None,
    k_scale: float
    | Float[Array, ""]
    | Float[Array, " kv_heads"]
    | Float[Array, "pages page_size kv_heads"]
    | None = None,
    v_scale: float
    | Float[Array, ""]
    | Float[Array, " kv_heads"]
    | Float[Array, "pages page_size kv_heads"]
    | None = None,
    plan: Int32[Array, "sequences items 8"] | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "sequences q_heads v_head_dim"]
    | tuple[Float[Array, "sequences q_heads v_head_dim"], Float[Array, "sequences q_heads"]]
):
    """`ejkernel.lax.page_attention`, with a choice of platform and mesh."""

@overload
def quantized_matmul(
    x: Float[Array, "m k"] | Float[Array, "b m k"],
    w: UInt32[Array, "rows words"],
    scales: Float[Array, "rows groups"] | UInt8[Array, "rows groups"],
    zeros: Float[Array, "rows groups"] | None = None,
    *,
    transpose: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"] = "affine",
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "m n"] | Float[Array, "b m n"]:
    """`ejkernel.lax.quantized_matmul`, with a choice of platform and mesh."""

@overload
def quantized_matmul(
    x: Float[Array, "m k"] | Float[Array, "b m k"],
    w: UInt32[Array, "rows words"],
    scales: Float[Array, "rows groups"] | UInt8[Array, "rows groups"],
    zeros: Float[Array, "rows groups"] | None = None,
    *,
    transpose: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"] = "affine",
    axis: Literal["row", "col"] | None = None,
    fuse: bool = True,
    strict_fuse: bool | None = None,
    allow_dense_fallback: bool | None = None,
    tpu_path: Literal["hybrid", "packed", "predecode"] | None = None,
    use_best_config: bool | None = None,
    gemv_mode: str | None = None,
    revsplit_k: str | None = None,
    revsplit_k_parts: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def ragged_decode_attention(
    q: Float[Array, "batch q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_start: Integer[Array, " batch"],
    sequence_end: Integer[Array, " batch"],
    softmax_aux: Sinks | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Float[Array, "batch q_heads"]]
):
    """`ejkernel.lax.ragged_decode_attention`, with a choice of platform and mesh."""

@overload
def ragged_decode_attention(
    q: Float[Array, "batch q_heads head_dim"] | Float[Array, "batch 1 q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_start: Integer[Array, " batch"],
    sequence_end: Integer[Array, " batch"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def ragged_gated_delta_rule(
    q: Float[Array, "tokens kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens q_heads v_head_dim"],
    beta: Float[Array, "tokens q_heads"],
    g: Float[Array, "tokens q_heads"] | None,
    states: Float[Array, "slots q_heads head_dim v_head_dim"],
    query_start_loc: CuSeqlens,
    state_indices: Integer[Array, " sequences"],
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = True,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> tuple[Float[Array, "tokens q_heads v_head_dim"], Float[Array, "slots q_heads head_dim v_head_dim"]]:
    """`ejkernel.lax.ragged_gated_delta_rule`, with a choice of platform and mesh."""

@overload
def ragged_gated_delta_rule(
    query: Float[Array, "tokens kv_heads head_dim"],
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens q_heads v_head_dim"],
    beta: Float[Array, "tokens q_heads"],
    decay: Float[Array, "tokens q_heads"] | None = None,
    recurrent_state: Float[Array, "slots q_heads head_dim v_head_dim"] | None = None,
    query_start_loc: CuSeqlens | None = None,
    state_indices: Integer[Array, " sequences"] | None = None,
    *,
    use_qk_l2norm: bool = True,
    chunk_size: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def ragged_page_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size keys_and_values head_dim"]
    | Int8[Array, "pages page_size keys_and_values head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    softmax_aux: Sinks | None = None,
    k_scale: float
    | Float[Array, ""]
    | Float[Array, " kv_heads"]
    | Float[Array, "pages page_size kv_heads"]
    | None = None,
    v_scale: float
    | Float[Array, ""]
    | Float[Array, " kv_heads"]
    | Float[Array, "pages page_size kv_heads"]
    | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    plan: Int32[Array, "rows items 8"] | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """`ejkernel.lax.ragged_page_attention`, with a choice of platform and mesh."""

def ragged_page_attention_v2(
    q: Float[Array, "tokens q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size keys_and_values head_dim"]
    | Int8[Array, "pages page_size keys_and_values head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    compute_dtype: DTypeLike | None = ...,
    mask_value: float | None = None,
    optimized: bool | None = None,
    vmem_limit_bytes: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """In the form of ejkernel 0.0.78."""

@overload
def ragged_page_attention_v2_turboquant(
    q: Float[Array, "tokens q_heads head_dim"],
    key_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    key_signs_pages: UInt8[Array, "pages page_size kv_heads sign_bytes"],
    key_norms_pages: Float[Array, "pages page_size kv_heads 2"],
    value_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    value_norms_pages: Float[Array, "pages page_size kv_heads"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    rotation_matrix: Float[Array, "head_dim head_dim"],
    qjl_projection: Float[Array, "qjl_dim head_dim"],
    key_codebook: Float[Array, " key_entries"],
    value_codebook: Float[Array, " value_entries"],
    softmax_aux: Sinks | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """`ejkernel.lax.ragged_page_attention_v2_turboquant`, with a choice of platform and mesh."""

@overload
def ragged_page_attention_v2_turboquant(
    q: Float[Array, "tokens q_heads head_dim"],
    key_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    key_signs_pages: UInt8[Array, "pages page_size kv_heads sign_bytes"],
    key_norms_pages: Float[Array, "pages page_size kv_heads 2"],
    value_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    value_norms_pages: Float[Array, "pages page_size kv_heads"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    rotation_matrix: Float[Array, "head_dim head_dim"],
    qjl_projection: Float[Array, "qjl_dim head_dim"],
    key_codebook: Float[Array, " key_entries"],
    value_codebook: Float[Array, " value_entries"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    bits: int | None = None,
    qjl_dim: int | None = None,
    compute_dtype: DTypeLike | None = ...,
    mask_value: float | None = None,
    vmem_limit_bytes: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def ragged_page_attention_v3(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: Float[Array, "pages page_size 2*kv_heads head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    softmax_aux: Sinks | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "pages page_size 2*kv_heads head_dim"]]
    | tuple[
        Float[Array, "tokens q_heads head_dim"],
        Float[Array, "tokens q_heads"],
        Float[Array, "pages page_size 2*kv_heads head_dim"],
    ]
):
    """`ejkernel.lax.ragged_page_attention_v3`, with a choice of platform and mesh."""

@overload
def ragged_page_attention_v3(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: Float[Array, "pages page_size pooled_heads padded_dim"]
    | Float[Array, "pages page_size packed_heads packing padded_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"] | Integer[Array, " table_entries"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"] | Integer[Array, " 3"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = 1.0,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    q_scale: None = None,
    k_scale: None = None,
    v_scale: None = None,
    vmem_limit_bytes: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def ragged_page_attention_v3_turboquant(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    key_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    key_signs_pages: UInt8[Array, "pages page_size kv_heads sign_bytes"],
    key_norms_pages: Float[Array, "pages page_size kv_heads 2"],
    value_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    value_norms_pages: Float[Array, "pages page_size kv_heads"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    rotation_matrix: Float[Array, "head_dim head_dim"],
    qjl_projection: Float[Array, "qjl_dim head_dim"],
    key_codebook: Float[Array, " key_entries"],
    value_codebook: Float[Array, " value_entries"],
    softmax_aux: Sinks | None = None,
    *,
    sliding_window: Window | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    tuple[
        Float[Array, "tokens q_heads head_dim"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        UInt8[Array, "pages page_size kv_heads sign_bytes"],
        Float[Array, "pages page_size kv_heads 2"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        Float[Array, "pages page_size kv_heads"],
    ]
    | tuple[
        Float[Array, "tokens q_heads head_dim"],
        Float[Array, "tokens q_heads"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        UInt8[Array, "pages page_size kv_heads sign_bytes"],
        Float[Array, "pages page_size kv_heads 2"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        Float[Array, "pages page_size kv_heads"],
    ]
):
    """`ejkernel.lax.ragged_page_attention_v3_turboquant`, with a choice of platform and mesh."""

@overload
def ragged_page_attention_v3_turboquant(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    key_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    key_signs_pages: UInt8[Array, "pages page_size kv_heads sign_bytes"],
    key_norms_pages: Float[Array, "pages page_size kv_heads 2"],
    value_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    value_norms_pages: Float[Array, "pages page_size kv_heads"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"] | Integer[Array, " table_entries"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"] | Integer[Array, " 3"],
    rotation_matrix: Float[Array, "head_dim head_dim"],
    qjl_projection: Float[Array, "qjl_dim head_dim"],
    key_codebook: Float[Array, " key_entries"],
    value_codebook: Float[Array, " value_entries"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    bits: int | None = None,
    qjl_dim: int | None = None,
    vmem_limit_bytes: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def recurrent(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    g: Float[Array, "batch seq_len q_heads"] | None = None,
    gk: Float[Array, "batch seq_len q_heads head_dim"] | None = None,
    gv: Float[Array, "batch seq_len q_heads v_head_dim"] | None = None,
    g_gamma: Float[Array, " q_heads"] | None = None,
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """`ejkernel.lax.recurrent`, with a choice of platform and mesh."""

@overload
def ring_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    bias: Float[Array, "#batch #q_heads #q_len #all_keys"]
    | Float[Array, "#q_heads #q_len #all_keys"]
    | Float[Array, "#q_len #all_keys"]
    | Float[Array, " #all_keys"]
    | Float[Array, ""]
    | None = None,
    mask: Bool[Array, "#batch #q_heads #q_len #all_keys"]
    | Bool[Array, "#q_heads #q_len #all_keys"]
    | Bool[Array, "#q_len #all_keys"]
    | Bool[Array, " #all_keys"]
    | Bool[Array, ""]
    | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    axis_name: str | tuple[str, ...],
    layout: Literal["zigzag", "striped", "contiguous"] = "zigzag",
    strategy: Literal["auto", "ring", "all_gather", "ulysses", "usp"] = "auto",
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
):
    """`ejkernel.lax.ring_attention`, with a choice of platform and mesh."""

@overload
def ring_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    bias: Float[Array, "#batch #q_heads #q_len #all_keys"]
    | Float[Array, "#q_heads #q_len #all_keys"]
    | Float[Array, "#q_len #all_keys"]
    | Float[Array, " #all_keys"]
    | Float[Array, ""]
    | None = None,
    *,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    logits_soft_cap: float | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
    mask_builder: None = None,
    fused_backward: bool | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def scaled_dot_product_attention(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    cum_seqlens_q: Integer[Array, " batch"] | None = None,
    cum_seqlens_k: Integer[Array, " batch"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: Window | None = None,
    softmax_scale: Scale | None = None,
    init_bias: Callable[[], LogitsBias] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "batch q_len q_heads v_head_dim"]:
    """In the form of ejkernel 0.0.78."""

@overload
def state_space_v1(
    x: Float[Array, "batch seq_len channels"],
    A: Float[Array, "channels state"],
    B: Float[Array, "batch seq_len state"],
    C: Float[Array, "batch seq_len state"],
    D: Float[Array, " channels"] | None,
    dt: Float[Array, "batch seq_len channels"],
    initial_state: Float[Array, "batch channels state"] | Float[Array, "sequences channels state"] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    return_state: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len channels"]
    | tuple[
        Float[Array, "batch seq_len channels"],
        Float[Array, "batch channels state"] | Float[Array, "sequences channels state"],
    ]
):
    """`ejkernel.lax.state_space_v1`, with a choice of platform and mesh."""

@overload
def state_space_v1(
    x: Float[Array, "batch seq_len channels"],
    A: Float[Array, "channels state"],
    B: Float[Array, "batch seq_len state"],
    C: Float[Array, "batch seq_len state"],
    D: Float[Array, " channels"] | None,
    dt: Float[Array, "batch seq_len channels"],
    gate: Float[Array, "batch seq_len channels"] | None = None,
    initial_state: Float[Array, "batch channels state"] | Float[Array, "sequences channels state"] | None = None,
    conv_state: Float[Array, " ..."] | None = None,
    *,
    act_fn: Callable[[Float[Array, " ..."]], Float[Array, " ..."]] | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

@overload
def state_space_v2(
    x: Float[Array, "batch seq_len heads head_dim"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch seq_len groups state"],
    C: Float[Array, "batch seq_len groups state"],
    D: Float[Array, " heads"] | None,
    dt: Float[Array, "batch seq_len heads"],
    initial_state: Float[Array, "batch heads head_dim state"]
    | Float[Array, "sequences heads head_dim state"]
    | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    return_state: bool = False,
    platform: Platform | str | None = None,
    cfg: ConfigLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> (
    Float[Array, "batch seq_len heads head_dim"]
    | tuple[
        Float[Array, "batch seq_len heads head_dim"],
        Float[Array, "batch heads head_dim state"] | Float[Array, "sequences heads head_dim state"],
    ]
):
    """`ejkernel.lax.state_space_v2`, with a choice of platform and mesh."""

@overload
def state_space_v2(
    x: Float[Array, "batch seq_len heads head_dim"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch seq_len groups state"],
    C: Float[Array, "batch seq_len groups state"],
    D: Float[Array, " heads"] | None,
    dt: Float[Array, "batch seq_len heads"],
    gate: Float[Array, "batch seq_len heads*head_dim"] | None = None,
    initial_state: Float[Array, "batch heads head_dim state"]
    | Float[Array, "sequences heads head_dim state"]
    | None = None,
    conv_state: Float[Array, " ..."] | None = None,
    *,
    n_groups: int | None = None,
    act_fn: Callable[[Float[Array, " ..."]], Float[Array, " ..."]] | None = None,
    use_gated_rmsnorm: bool = False,
    rmsnorm_eps: float = 1e-05,
    precision: Precision | str | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Any:
    """In the form of ejkernel 0.0.78."""

def unified_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    key_cache: Float[Array, "pages page_size kv_heads head_dim"],
    value_cache: Float[Array, "pages page_size kv_heads head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    qq_bias: Float[Array, "queries queries"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "heads sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: Window | None = None,
    causal: bool = True,
    seq_threshold_3d: int | None = None,
    platform: Platform | str | None = None,
    cfg: ConfigLike | BaseOperationConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[str, PartitionSpec]
    | tuple[PartitionSpec, ...]
    | list[PartitionSpec]
    | tuple[PartitionSpec | None, ...]
    | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """In the form of ejkernel 0.0.78."""
