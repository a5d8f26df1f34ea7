"""`ejkernel.lax.merge_attention_shards`."""

from ..modules.operations.merge_attention_shards import merge_attention_shards

__all__ = ["merge_attention_shards"]
