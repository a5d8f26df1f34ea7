"""Kernels as operations of JAX: pure functions of arrays and static options, one operation per file.

Type checkers and editors read their signatures in `__init__.pyi`, which `tests/stubs.py` writes.
"""

from .block_mask_of import block_mask_of
from .blocksparse_attention import blocksparse_attention
from .differential_attention import differential_attention
from .flash_attention import flash_attention
from .flash_mla import flash_mla
from .gated_delta_rule import gated_delta_rule
from .gla import gla
from .grouped_matmul import grouped_matmul
from .lightning_attention import lightning_attention
from .lightning_indexer import lightning_indexer
from .mean_pooling import mean_pooling
from .merge_attention import merge_attention
from .merge_attention_shards import merge_attention_shards
from .multi_latent_page_attention import multi_latent_page_attention
from .native_sparse_attention import native_sparse_attention
from .native_sparse_blocks import native_sparse_blocks
from .native_sparse_decode_attention import native_sparse_decode_attention
from .page_attention import page_attention
from .page_plan import page_plan
from .quantized_matmul import quantized_matmul
from .ragged_decode_attention import ragged_decode_attention
from .ragged_gated_delta_rule import ragged_gated_delta_rule
from .ragged_page_attention import ragged_page_attention
from .ragged_page_attention_v2_turboquant import ragged_page_attention_v2_turboquant
from .ragged_page_attention_v3 import ragged_page_attention_v3
from .ragged_page_attention_v3_turboquant import ragged_page_attention_v3_turboquant
from .recurrent import recurrent
from .ring_attention import ring_attention
from .ring_order import ring_order
from .state_space_v1 import state_space_v1
from .state_space_v2 import state_space_v2

__all__ = [
    "block_mask_of",
    "blocksparse_attention",
    "differential_attention",
    "flash_attention",
    "flash_mla",
    "gated_delta_rule",
    "gla",
    "grouped_matmul",
    "lightning_attention",
    "lightning_indexer",
    "mean_pooling",
    "merge_attention",
    "merge_attention_shards",
    "multi_latent_page_attention",
    "native_sparse_attention",
    "native_sparse_blocks",
    "native_sparse_decode_attention",
    "page_attention",
    "page_plan",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention",
    "ragged_page_attention_v2_turboquant",
    "ragged_page_attention_v3",
    "ragged_page_attention_v3_turboquant",
    "recurrent",
    "ring_attention",
    "ring_order",
    "state_space_v1",
    "state_space_v2",
]
