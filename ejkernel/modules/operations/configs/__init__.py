"""Config classes of ejkernel 0.0.78, for programs that build and store them.

Of such a config an operation takes `platform`, and `fwd_params` and `bwd_params` where they are given. The backend is
that of the device, whatever a config says. Its other numbers are those of the kernels of 0.0.78: the Executor chooses
them here. A config of this library's kernels is one of the operation's `config_class` or a mapping of its fields, as
`cfg=` too.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ....types import BwdParams, FwdParams

_NESTED = {"fwd_params": FwdParams, "bwd_params": BwdParams}


@dataclass(frozen=True)
class BaseOperationConfig:
    """What every config says: the platform of an implementation, and its backend."""

    platform: str = "auto"
    backend: str = "any"

    def to_dict(self) -> dict[str, Any]:
        """The fields, nested ones as dicts too."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """The config of `to_dict`; names that it has not are refused."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"{cls.__name__}: no field {', '.join(unknown)}; the fields are {sorted(known)}")
        nested = {n: _NESTED[n](**x) for n, x in given.items() if n in _NESTED and isinstance(x, Mapping)}
        return cls(**{**given, **nested})

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config of `to_json`."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class _Params(BaseOperationConfig):
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None


@dataclass(frozen=True)
class FlashAttentionConfig(_Params):
    """Of flash_attention: block sizes of the forward and of the backward."""


@dataclass(frozen=True)
class BlockSparseAttentionConfig(_Params):
    """Of blocksparse_attention."""


@dataclass(frozen=True)
class RingAttentionConfig(_Params):
    """Of ring_attention."""


@dataclass(frozen=True)
class RaggedDecodeAttentionConfig(BaseOperationConfig):
    """Of ragged_decode_attention."""

    fwd_params: FwdParams | None = None


@dataclass(frozen=True)
class _Tiles(BaseOperationConfig):
    block_q: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class AttentionConfig(_Tiles):
    """Of attention."""


@dataclass(frozen=True)
class ScaledDotProductAttentionConfig(_Tiles):
    """Of scaled_dot_product_attention."""


@dataclass(frozen=True)
class GroupedMatmulConfig(BaseOperationConfig):
    """Of grouped_matmul; `bypass_xla_tiling` is of the kernels of 0.0.78 too."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2
    bypass_xla_tiling: bool = False


@dataclass(frozen=True)
class MeanPoolingConfig(BaseOperationConfig):
    """Of mean_pooling."""

    block_size: int = 64
    block_dim: int = 64
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class RaggedPageAttentionv2Config(BaseOperationConfig):
    """Of ragged_page_attention_v2."""

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class RaggedPageAttentionv3Config(BaseOperationConfig):
    """Of ragged_page_attention_v3."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class UnifiedAttentionConfig(BaseOperationConfig):
    """Of unified_attention."""

    seq_threshold_3d: int | None = None
    num_par_softmax_segments: int | None = None
    block_dim: int = 128
    num_warps: int | None = None
    num_stages: int | None = None


@dataclass(frozen=True)
class MultiLatentRaggedPageAttentionConfig(BaseOperationConfig):
    """Of multi_latent_ragged_page_attention."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class MultiLatentRaggedPageAttentionV2Config(BaseOperationConfig):
    """Of multi_latent_ragged_page_attention_v2."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: tuple[int, int, int] | int | None = None
    num_queries_per_block: tuple[int, int, int] | int | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class GatedDeltaRuleConfig(BaseOperationConfig):
    """Of gated_delta_rule."""

    chunk_size: int = 64


__all__ = [name for name, x in list(globals().items()) if isinstance(x, type) and name.endswith("Config")]
