"""MaskInfo: which queries see which keys in all attention calls of a model, as segment ids, a band, or a mask.

    MaskInfo.dynamic_init(input_ids=ids, attention_mask=padding)      # [B, S], 1 where there is a token
    MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((127, 0))

No array of the size of the logits is made before `attention_mask` is read: `visibility` gives kernels the ids as ids,
and static causality and windows as numbers.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from . import _mask_changes as _changes
from . import _mask_readings as _readings
from ._mask_constructors import AXES, Axes, Constructors
from .segment_masks import (
    Band,
    as_bool,
    equal_and_valid,
    mask_to_segment_ids,
    positions_in_segments,
    within_band,
)

_ARRAYS = ("attention_mask", "q_segment_ids", "kv_segment_ids", "cu_seqlens_q", "cu_seqlens_kv")
_DATA = (*(f"_{name}" for name in _ARRAYS), "q_positions", "kv_positions")
_APPLIED = ("causal_mask_baked_in", "sliding_window_baked_in", "chunked_mask_baked_in", "token_type_ids_baked_in")


class Visibility(NamedTuple):
    """What kernels get: query i sees key j if mask, ids and band all allow it.

    Attributes:
        mask: bool [B, H or 1, Q, K], or None.
        q_segment_ids: [B, Q], negative for padding, or None.
        kv_segment_ids: [B, K], or None.
        band: (low, high): i + low ≤ j ≤ i + high, with i and j counted from 0; None is unbounded.
    """

    mask: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    band: Band


@dataclass(frozen=True, eq=False, repr=False)
class MaskInfo(Constructors):
    """Segment ids or a mask, with what was applied to them; a pytree whose flags and axis names are static.

    Attributes:
        q_positions: [B, Q] positions that a caller attached; they do not affect visibility.
        kv_positions: [B, K] likewise.
        causal_mask_baked_in: causality is included, so that operations do not apply it again.
        sliding_window_baked_in: a window is included, so that operations do not apply it again.
        chunked_mask_baked_in: `apply_chunked` was called.
        token_type_ids_baked_in: `apply_token_type_ids` was called.
        batch_axis_name: mesh axes of the batch, for `get_shardings`.
        qheads_axis_name: those of query heads.
        kvheads_axis_name: those of key/value heads.
        sequence_axis_name: those of the sequence.
    """

    _attention_mask: Any = None
    _q_segment_ids: Any = None
    _kv_segment_ids: Any = None
    _cu_seqlens_q: Any = None
    _cu_seqlens_kv: Any = None
    q_positions: Any = None
    kv_positions: Any = None
    causal_mask_baked_in: bool = False
    sliding_window_baked_in: bool = False
    chunked_mask_baked_in: bool = False
    token_type_ids_baked_in: bool = False
    batch_axis_name: Axes = ("dp", "fsdp")
    qheads_axis_name: Axes = "tp"
    kvheads_axis_name: Axes = "tp"
    sequence_axis_name: Axes = "sp"
    _band: Band = (None, None)

    def replace(self, **changes: Any) -> "MaskInfo":
        """A copy with other values of `attention_mask`, `q_segment_ids`, … or of any attribute; None keeps an array.

        A given attention_mask is complete: restrictions that were applied before are not applied to it again.
        """
        given = {name: x for name, x in changes.items() if name not in _ARRAYS or x is not None}
        fields = {f"_{name}" if name in _ARRAYS else name: x for name, x in given.items()}
        if fields.get("_attention_mask") is not None:
            fields["_band"] = (None, None)
        return replace(self, **fields)

    # --- Properties ---------------------------------------------------------------------------------------------------

    @property
    def visibility(self) -> Visibility:
        """What kernels mask by, which is the mask alone if there is one, otherwise the ids, and the band."""
        if self._attention_mask is not None:
            return Visibility(as_bool(_four_axes(self._attention_mask)), None, None, self._band)
        if (self._q_segment_ids is None) != (self._kv_segment_ids is None):
            raise ValueError("MaskInfo: it has segment ids of queries or keys alone; it must have both")
        return Visibility(None, self._q_segment_ids, self._kv_segment_ids, self._band)

    @property
    def attention_mask(self) -> Any:
        """The mask of pairs [B, H or 1, Q, K], made on demand if it was not given; None for an empty `MaskInfo`."""
        mask, q, _, band = self.visibility
        if mask is None and q is None:
            return None
        if band == (None, None) and mask is not None:
            return _four_axes(self._attention_mask)
        return self._pairs()

    def _pairs(self) -> Any:
        """The mask of pairs as bool [B, H or 1, Q, K]."""
        mask, q, kv, band = self.visibility
        if mask is None and q is None:
            raise ValueError("MaskInfo: it is empty, with neither segment ids nor an attention_mask")
        mask = equal_and_valid(q, kv)[:, None] if mask is None else mask
        return mask & within_band(band, *map(jnp.arange, mask.shape[-2:]))

    @property
    def q_segment_ids(self) -> Any:
        """The ids [B, Q], negative for padding; for a mask those of `mask_to_segment_ids`; None if empty."""
        return self._ids()[0]

    @property
    def kv_segment_ids(self) -> Any:
        """The ids [B, K] of keys, as `q_segment_ids`."""
        return self._ids()[1]

    def _ids(self, per_head: bool = False) -> tuple[Any, Any]:
        q, kv = self._q_segment_ids, self._kv_segment_ids
        if self._attention_mask is None or (q is not None and kv is not None):
            return q, kv
        of_mask = mask_to_segment_ids(self._pairs(), per_head)
        return tuple(mine if given is None else given for given, mine in zip((q, kv), of_mask, strict=True))

    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[Any, Any]:
        """(q [B, Q], kv [B, K]); of a mask, with `per_head`, those of each head."""
        q, kv = self._ids(per_head)
        if q is None or kv is None:
            raise ValueError("MaskInfo: it is empty, with neither segment ids nor an attention_mask")
        return q, kv

    def get_or_compute_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> Any:
        """`attention_mask` in a dtype."""
        mask = self.attention_mask
        if mask is None:
            return self._pairs()
        return as_bool(mask) if np.dtype(dtype) == np.bool_ else mask.astype(dtype)

    def materialize_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> "MaskInfo":
        """A copy that holds its mask."""
        return self.replace(attention_mask=self.get_or_compute_attention_mask(dtype))

    def materialize_segment_ids(self, per_head: bool = False) -> "MaskInfo":
        """A copy that holds its ids."""
        q, kv = self.get_or_compute_segment_ids(per_head)
        return replace(self, _q_segment_ids=q, _kv_segment_ids=kv)

    def to_dtype(self, dtype: DTypeLike) -> "MaskInfo":
        """A copy that holds its mask in a dtype."""
        return self.materialize_attention_mask(dtype)

    def get_qkv_masks(self, dtype: DTypeLike = jnp.bool_) -> tuple[Any, Any, Any]:
        """(q [B, Q], kv [B, K], mask [B, H or 1, Q, K]); the first two are True for tokens that are not padding."""
        q, kv = self.get_or_compute_segment_ids()
        return (q >= 0).astype(dtype), (kv >= 0).astype(dtype), self.get_or_compute_attention_mask(dtype)

    def create_bias(self, dtype: DTypeLike = jnp.float32) -> Any:
        """A bias [B, H or 1, Q, K]: 0 where a query sees a key, and the lowest finite number of the dtype elsewhere."""
        return jnp.where(self._pairs(), jnp.zeros((), dtype), jnp.finfo(dtype).min)

    @property
    def bias(self) -> Any:
        """`create_bias` in float32."""
        return self.create_bias()

    @property
    def q_attention_mask(self) -> Any:
        """[B, Q] int32, 1 for queries that are not padding."""
        return (self.get_or_compute_segment_ids()[0] >= 0).astype(jnp.int32)

    @property
    def q_position_ids(self) -> Any:
        """[B, Q] positions that begin at 0 with each segment, −1 for padding."""
        return positions_in_segments(self.get_or_compute_segment_ids()[0], padding=-1)

    def get_or_compute_positions(self) -> tuple[Any, Any]:
        """(q [B, Q], kv [B, K]): those that were attached, or positions within segments (padding: −1, 2³¹ − 1)."""
        if self.shape == (None, None, None):
            return self.q_positions, self.kv_positions
        q, kv = self.get_or_compute_segment_ids()
        q = positions_in_segments(q, -1) if self.q_positions is None else self.q_positions
        return q, positions_in_segments(kv, 2**31 - 1) if self.kv_positions is None else self.kv_positions

    @property
    def batch_size(self) -> int | None:
        """B, or None if empty."""
        return self.shape[0]

    @property
    def q_len(self) -> int | None:
        """Q, or None if empty."""
        return self.shape[1]

    @property
    def kv_len(self) -> int | None:
        """K, or None if empty."""
        return self.shape[2]

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """(B, Q, K), of the ids or else of the mask."""
        if (q := self._q_segment_ids) is not None and (kv := self._kv_segment_ids) is not None:
            return (q.shape[0], q.shape[-1], kv.shape[-1])
        if self._attention_mask is None:
            return (None, None, None)
        batch, _, q, kv = _four_axes(self._attention_mask).shape
        return (batch, q, kv)

    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same tokens: by equal ids, or by equal lengths for masks and tracers."""
        q, kv = self._q_segment_ids, self._kv_segment_ids
        if q is None or kv is None or isinstance(q, jax.core.Tracer) or isinstance(kv, jax.core.Tracer):
            return self.q_len is not None and self.q_len == self.kv_len
        # In NumPy, as a comparison by JAX would be traced where a program that is traced has these ids as constants.
        return q.shape == kv.shape and bool((np.asarray(q) == np.asarray(kv)).all())

    @property
    def baked_in_masks(self) -> dict[str, bool]:
        """Whether each of causal, sliding_window, chunked and token_type_ids was applied, by name."""
        short = lambda name: name.removesuffix("_baked_in").removesuffix("_mask")
        return {short(name): getattr(self, name) for name in _APPLIED}

    def __repr__(self) -> str:
        arrays = {name: x for name in _DATA if (x := getattr(self, name)) is not None}
        said = [f"{name.lstrip('_')}.shape={x.shape}" for name, x in arrays.items() if hasattr(x, "shape")]
        applied = [name for name, is_in in self.baked_in_masks.items() if is_in]
        return f"MaskInfo({', '.join(said + ([f'applied={applied}'] if applied else []))})"

    # --- Methods that are defined in files of their own ---------------------------------------------------------------

    apply_causal = _changes.apply_causal
    apply_sliding_window = _changes.apply_sliding_window
    apply_chunked = _changes.apply_chunked
    apply_token_type_ids = _changes.apply_token_type_ids
    apply_kv_lengths = _changes.apply_kv_lengths
    create_chunked_attention_mask = staticmethod(_changes.create_chunked_attention_mask)

    is_multi_sequence = property(_readings.is_multi_sequence)
    q_lens = property(_readings.q_lens)
    kv_lens = property(_readings.kv_lens)
    cu_seqlens_q = property(_readings.cu_seqlens_q)
    cu_seqlens_kv = property(_readings.cu_seqlens_kv)
    get_or_compute_qkv_cu_seqlens = _readings.get_or_compute_qkv_cu_seqlens
    get_shardings = _readings.get_shardings
    get_empty_sharding = staticmethod(_readings.MaskSharding)
    visualize = _readings.visualize


def _four_axes(mask: Any) -> Any:
    """[B, H or 1, Q, K] of a mask with that many axes or fewer."""
    return mask if mask.ndim == 4 else mask[:, None] if mask.ndim == 3 else mask[None, None]


jax.tree_util.register_dataclass(MaskInfo, data_fields=_DATA, meta_fields=(*_APPLIED, *AXES, "_band"))
