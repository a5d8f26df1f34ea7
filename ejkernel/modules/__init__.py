"""Operations as kernel objects and as functions that choose their platform and mesh.

A call in the form of ejkernel 0.0.78, by its keywords, config or shapes, keeps its meaning there where the two differ;
docs/from-the-release.md has the whole table:

| | in the form of 0.0.78 | in the form of this library, as in `ejkernel.lax` |
|---|---|---|
| `causal` of S queries and K keys | counted from the first of each (top-left) | from the last of each (bottom-right) |
| a window of an int w, dense | (w, w) | (w − 1, 0) |
| `softmax_aux` [n] | per head if n is their number, otherwise shared by all | per head |
| a row that sees nothing | 0 | 0 |
| `softmax_scale` left out of `ragged_page_attention_v3` | 1 | D**-0.5 |
| `existing_out` by position | added to every row | the result in rows of no group |
| `group_offset` by position | lhs begins with the first group that rhs has | lhs has the rows of all groups |
| lhs and rhs of two float dtypes | promoted to a common one | an error in lax |
| an option that cannot be honoured | an error | an error |

Type checkers and editors read their signatures in `__init__.pyi`, which `tests/stubs.py` writes.
"""

from . import _release_dense as _release_dense  # the four register their translations
from . import _release_paged as _release_paged
from . import _release_products as _release_products
from . import _release_recurrent as _release_recurrent
from ._public_function import public_function as _function
from ._release import either as _either
from ._release import release_function as _release
from .base import KernelConfig, create_default_executor, detect_platform
from .operations.block_mask_of import block_mask_of
from .operations.blocksparse_attention import BlocksparseAttention
from .operations.configs import GroupedMatmulConfig, UnifiedAttentionConfig
from .operations.differential_attention import differential_attention
from .operations.flash_attention import FlashAttention
from .operations.flash_mla import FlashMLA
from .operations.gated_delta_rule import GatedDeltaRule
from .operations.gla import GLA
from .operations.grouped_matmul import GroupedMatmul
from .operations.lightning_attention import LightningAttention
from .operations.lightning_indexer import lightning_indexer
from .operations.mean_pooling import MeanPooling
from .operations.merge_attention import merge_attention
from .operations.merge_attention_shards import merge_attention_shards
from .operations.multi_latent_page_attention import MultiLatentPageAttention
from .operations.native_sparse_attention import NativeSparseAttention
from .operations.native_sparse_blocks import NativeSparseBlocks
from .operations.native_sparse_decode_attention import NativeSparseDecodeAttention
from .operations.page_attention import PageAttention
from .operations.page_plan import page_plan
from .operations.quantized_matmul import QuantizedMatmul
from .operations.ragged_decode_attention import RaggedDecodeAttention
from .operations.ragged_gated_delta_rule import RaggedGatedDeltaRule
from .operations.ragged_page_attention import RaggedPageAttention
from .operations.ragged_page_attention_v2_turboquant import RaggedPageAttentionV2TurboQuant
from .operations.ragged_page_attention_v3 import RaggedPageAttentionV3
from .operations.ragged_page_attention_v3_turboquant import RaggedPageAttentionV3TurboQuant
from .operations.recurrent import Recurrent
from .operations.ring_attention import ring_attention as _ring_attention
from .operations.ring_order import ring_order
from .operations.state_space_v1 import StateSpaceV1
from .operations.state_space_v2 import StateSpaceV2

flash_attention = _either(_function(FlashAttention))
blocksparse_attention = _either(_function(BlocksparseAttention), flash_attention)
flash_mla = _function(FlashMLA)
gated_delta_rule = _either(_function(GatedDeltaRule))
gla = _function(GLA)
grouped_matmul = _either(_function(GroupedMatmul))
lightning_attention = _function(LightningAttention)
mean_pooling = _either(_function(MeanPooling))
multi_latent_page_attention = _function(MultiLatentPageAttention)
native_sparse_attention = _function(NativeSparseAttention)
native_sparse_blocks = _function(NativeSparseBlocks)
native_sparse_decode_attention = _function(NativeSparseDecodeAttention)
page_attention = _function(PageAttention)
quantized_matmul = _either(_function(QuantizedMatmul))
ragged_decode_attention = _either(_function(RaggedDecodeAttention))
ragged_gated_delta_rule = _either(_function(RaggedGatedDeltaRule))
ragged_page_attention = _function(RaggedPageAttention)
ragged_page_attention_v2_turboquant = _either(_function(RaggedPageAttentionV2TurboQuant))
ragged_page_attention_v3 = _either(_function(RaggedPageAttentionV3))
ragged_page_attention_v3_turboquant = _either(_function(RaggedPageAttentionV3TurboQuant))
recurrent = _function(Recurrent)
ring_attention = _either(
    _ring_attention,
    (_ring_attention, flash_attention),
    softmax_aux="sinks",
    logits_soft_cap="softcap",
    cfg="config",
)
state_space_v1 = _either(_function(StateSpaceV1))
state_space_v2 = _either(_function(StateSpaceV2))

# Operations that exist only in the form of ejkernel 0.0.78.
attention = _release("attention", flash_attention)
multi_latent_ragged_page_attention = _release("multi_latent_ragged_page_attention", multi_latent_page_attention)
multi_latent_ragged_page_attention_v2 = _release("multi_latent_ragged_page_attention_v2", multi_latent_page_attention)
ragged_page_attention_v2 = _release("ragged_page_attention_v2", ragged_page_attention)
scaled_dot_product_attention = _release("scaled_dot_product_attention", flash_attention)
unified_attention = _release("unified_attention", ragged_page_attention)

__all__ = [
    "GLA",
    "BlocksparseAttention",
    "FlashAttention",
    "FlashMLA",
    "GatedDeltaRule",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "KernelConfig",
    "LightningAttention",
    "MeanPooling",
    "MultiLatentPageAttention",
    "NativeSparseAttention",
    "NativeSparseBlocks",
    "NativeSparseDecodeAttention",
    "PageAttention",
    "QuantizedMatmul",
    "RaggedDecodeAttention",
    "RaggedGatedDeltaRule",
    "RaggedPageAttention",
    "RaggedPageAttentionV2TurboQuant",
    "RaggedPageAttentionV3",
    "RaggedPageAttentionV3TurboQuant",
    "Recurrent",
    "StateSpaceV1",
    "StateSpaceV2",
    "UnifiedAttentionConfig",
    "attention",
    "block_mask_of",
    "blocksparse_attention",
    "create_default_executor",
    "detect_platform",
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
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "native_sparse_attention",
    "native_sparse_blocks",
    "native_sparse_decode_attention",
    "page_attention",
    "page_plan",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v2_turboquant",
    "ragged_page_attention_v3",
    "ragged_page_attention_v3_turboquant",
    "recurrent",
    "ring_attention",
    "ring_order",
    "scaled_dot_product_attention",
    "state_space_v1",
    "state_space_v2",
    "unified_attention",
]
