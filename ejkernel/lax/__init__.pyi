"""Written by tests/stubs.py from the signatures of the functions."""

from typing import Literal

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int8, Int32, Integer, UInt8, UInt32

from ..modules.operations.block_mask_of import block_mask_of as block_mask_of
from ..modules.operations.differential_attention import differential_attention as differential_attention
from ..modules.operations.lightning_indexer import lightning_indexer as lightning_indexer
from ..modules.operations.merge_attention import merge_attention as merge_attention
from ..modules.operations.merge_attention_shards import merge_attention_shards as merge_attention_shards
from ..modules.operations.page_plan import page_plan as page_plan
from ..modules.operations.ring_attention import ring_attention as ring_attention
from ..modules.operations.ring_order import ring_order as ring_order
from ..types import (
    BlockMask,
    ConfigLike,
    CuSeqlens,
    DropoutKey,
    LogitsBias,
    LogitsMask,
    RecurrentState,
    Scale,
    Sinks,
    Window,
)

def blocksparse_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    block_mask: BlockMask,
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    block_size: tuple[int, int] = (128, 128),
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
    """Softmax attention over the blocks of keys that a mask keeps for each block of queries."""

def flash_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
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
    """Softmax attention, computed in tiles in memory linear in the sequence."""

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
    sinks: Sinks | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_len heads v_head_dim"]
    | tuple[Float[Array, "batch q_len heads v_head_dim"], Float[Array, "batch heads q_len"]]
):
    """Multi-head latent attention for training and prefill: keys and values are projections of a latent per position."""

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
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """The gated delta rule: a recurrence over a state h [K, V], whose value at a key is replaced; computed in chunks."""

def gla(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    gk: Float[Array, "batch seq_len q_heads head_dim"],
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """Gated linear attention: a recurrence over a state h [K, V] for each head, computed in chunks."""

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
    config: ConfigLike | None = None,
) -> Float[Array, "m n"]:
    """The rows of each group times the matrix of that group: the product of a mixture of experts."""

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
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """Lightning attention: a recurrence over a state h [K, V] for each head, computed in chunks."""

def mean_pooling(
    x: Float[Array, "batch seq_len features"] | Float[Array, "tokens features"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
    config: ConfigLike | None = None,
) -> Float[Array, "batch features"] | Float[Array, "sequences features"]:
    """The mean of the tokens of each sequence, added up in float32."""

def multi_latent_page_attention(
    q_latent: Float[Array, "tokens q_heads latent_dim"],
    q_rope: Float[Array, "tokens q_heads rope_dim"],
    pages: Float[Array, "pages page_size latent_dim+rope_dim"] | Int8[Array, "pages page_size latent_dim+rope_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
    k_scale: float | Float[Array, ""] | Float[Array, " 1"] | Float[Array, "pages page_size 1"] | None = None,
    plan: Int32[Array, "rows items 8"] | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    indices: Integer[Array, "tokens top_k"] | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "tokens q_heads latent_dim"]
    | tuple[Float[Array, "tokens q_heads latent_dim"], Float[Array, "tokens q_heads"]]
):
    """Multi-head latent attention over a paged cache in its absorbed form, for any mix of prefill, decode and drafts."""

def native_sparse_attention(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    g_cmp: Float[Array, "batch q_len q_heads"] | None = None,
    g_slc: Float[Array, "batch q_len q_heads"] | None = None,
    g_swa: Float[Array, "batch q_len q_heads"] | None = None,
    block_indices: Integer[Array, "batch q_len kv_heads blocks"] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    window: Window | None = None,
    softmax_scale: Scale | None = None,
    return_block_indices: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Int32[Array, "batch q_len kv_heads blocks"]]
):
    """Native sparse attention: a gated sum of attention to means of blocks, to selected blocks, and to a window."""

def native_sparse_blocks(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    config: ConfigLike | None = None,
) -> Int32[Array, "batch q_len kv_heads block_counts"]:
    """The blocks of keys that each query attends to in native sparse attention: its own, the first, and the best."""

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
    window: Window | None = None,
    softmax_scale: float | None = None,
    return_block_indices: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Int32[Array, "batch kv_heads blocks"]]
):
    """A step of decoding with native sparse attention: one query of each sequence over a cache with means of blocks."""

def page_attention(
    q: Float[Array, "sequences q_heads head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"] | Int8[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"] | Int8[Array, "pages page_size kv_heads v_head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    sinks: Sinks | None = None,
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
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "sequences q_heads v_head_dim"]
    | tuple[Float[Array, "sequences q_heads v_head_dim"], Float[Array, "sequences q_heads"]]
):
    """A step of decoding over a paged cache: one query of each sequence attends over the sequence's keys and values."""

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
    config: ConfigLike | None = None,
) -> Float[Array, "m n"] | Float[Array, "b m n"]:
    """Rows times a matrix of quantised weights, which are stored as codes of a few bits: x · W, or x · Wᵀ."""

def ragged_decode_attention(
    q: Float[Array, "batch q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_start: Integer[Array, " batch"],
    sequence_end: Integer[Array, " batch"],
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Float[Array, "batch q_heads"]]
):
    """A step of decoding over a dense cache: one query of each sequence attends over a part of the sequence's keys."""

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
    config: ConfigLike | None = None,
) -> tuple[Float[Array, "tokens q_heads v_head_dim"], Float[Array, "slots q_heads head_dim v_head_dim"]]:
    """A step of serving with the gated delta rule, for packed tokens of several sequences whose states are in a pool."""

def ragged_page_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size keys_and_values head_dim"]
    | Int8[Array, "pages page_size keys_and_values head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
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
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """A step of serving over a paged cache, for any mix of prefill, chunks of a prefill, decode and drafts."""

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
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """A step of serving that reads, and does not write, a paged cache quantised by TurboQuant."""

def ragged_page_attention_v3(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: Float[Array, "pages page_size 2*kv_heads head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    config: ConfigLike | None = None,
) -> (
    tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "pages page_size 2*kv_heads head_dim"]]
    | tuple[
        Float[Array, "tokens q_heads head_dim"],
        Float[Array, "tokens q_heads"],
        Float[Array, "pages page_size 2*kv_heads head_dim"],
    ]
):
    """A step of serving: the step's keys and values go into a paged cache, over which its queries then attend."""

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
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    config: ConfigLike | None = None,
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
    """A step of serving that writes its keys and values into a cache quantised by TurboQuant, and attends over it."""

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
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
):
    """Linear attention with decays: a recurrence over a state h [K, V] for each head, computed in chunks."""

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
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len channels"]
    | tuple[
        Float[Array, "batch seq_len channels"],
        Float[Array, "batch channels state"] | Float[Array, "sequences channels state"],
    ]
):
    """The selective state space of Mamba: a recurrence over a state h [N] of each channel, computed in chunks."""

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
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch seq_len heads head_dim"]
    | tuple[
        Float[Array, "batch seq_len heads head_dim"],
        Float[Array, "batch heads head_dim state"] | Float[Array, "sequences heads head_dim state"],
    ]
):
    """The state space of Mamba-2: a recurrence over a state h [P, N] of each head with one decay, computed in chunks."""
