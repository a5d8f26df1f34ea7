"""Properties of a `MaskInfo` other than its visibility: lengths, shardings and a drawing."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike


class MaskSharding(NamedTuple):
    """The PartitionSpecs of the arrays of a `MaskInfo`; None for absent arrays."""

    attention_mask: PartitionSpec | None = None
    q_segment_ids: PartitionSpec | None = None
    kv_segment_ids: PartitionSpec | None = None
    cu_seqlens_q: PartitionSpec | None = None
    cu_seqlens_kv: PartitionSpec | None = None
    q_positions: PartitionSpec | None = None
    kv_positions: PartitionSpec | None = None


def is_multi_sequence(self) -> Any:
    """A bool array [], whether any id is greater than 0, so that a batch element has several segments."""
    return jnp.any(self.get_or_compute_segment_ids()[0] > 0)


def q_lens(self) -> Any:
    """The number of tokens of each segment, or of each batch element if none has several segments. Not in a trace."""
    return _lengths(self.get_or_compute_segment_ids()[0])


def kv_lens(self) -> Any:
    """As `q_lens`, of keys."""
    return _lengths(self.get_or_compute_segment_ids()[1])


def _lengths(ids) -> Any:
    ids = np.asarray(ids)
    if not (ids > 0).any():
        return jnp.asarray((ids >= 0).sum(-1), jnp.int32)
    return jnp.asarray(np.unique(ids[ids >= 0], return_counts=True)[1], jnp.int32)


def cu_seqlens_q(self) -> Any:
    """The cumulative lengths that were given, else those of `get_or_compute_qkv_cu_seqlens`."""
    return self.get_or_compute_qkv_cu_seqlens()[0] if self._cu_seqlens_q is None else self._cu_seqlens_q


def cu_seqlens_kv(self) -> Any:
    """As `cu_seqlens_q`, of keys."""
    return self.get_or_compute_qkv_cu_seqlens()[1] if self._cu_seqlens_kv is None else self._cu_seqlens_kv


def get_or_compute_qkv_cu_seqlens(
    self, *, out_dtype: DTypeLike = jnp.int32, max_segments: int = 128
) -> tuple[Any, Any]:
    """(q, kv), each [max_segments + 1]: cumulative numbers of tokens of the ids 0, 1, … in the whole batch."""
    counts = lambda ids: (ids.reshape(-1, 1) == jnp.arange(max_segments)).sum(0)
    return tuple(
        jnp.concatenate([jnp.zeros(1, out_dtype), jnp.cumsum(counts(ids)).astype(out_dtype)])
        for ids in self.get_or_compute_segment_ids()
    )


def get_shardings(self, sequence_parallel: bool = False, *, mesh: Mesh) -> MaskSharding:
    """The shardings of its arrays over a mesh by its axis names, without mesh axes that do not divide an array's axis.

    Args:
        sequence_parallel: whether queries are split over `sequence_axis_name`.
        mesh: a mesh with the named axes.
    """
    batch, heads, sequence = self.batch_axis_name, self.qheads_axis_name, self.sequence_axis_name
    for name in ("batch_axis_name", "qheads_axis_name", *(("sequence_axis_name",) if sequence_parallel else ())):
        missing = [axis for axis in _names(getattr(self, name)) if axis not in mesh.axis_names]
        if missing:
            raise ValueError(f"MaskInfo: {name} {missing[0]!r} is no axis of the mesh, which has {mesh.axis_names}")
    length = sequence if sequence_parallel else None
    wanted = dict.fromkeys(MaskSharding._fields, (batch, length)) | dict(
        attention_mask=(batch, heads, length, None), cu_seqlens_q=(None,), cu_seqlens_kv=(None,)
    )
    arrays = {name: getattr(self, name if name.endswith("positions") else f"_{name}") for name in wanted}
    return MaskSharding(**{n: _dividing(wanted[n], x.shape, mesh) for n, x in arrays.items() if x is not None})


def _names(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _dividing(entries, shape, mesh) -> PartitionSpec:
    """The entries of a spec, without those whose devices do not divide the size of their axis."""
    devices = lambda entry: int(np.prod([mesh.shape[name] for name in _names(entry)]))
    fits = lambda entry, size: entry if size % devices(entry) == 0 else None
    return PartitionSpec(*(fits(entry, size) for entry, size in zip(entries, shape, strict=False)))


def visualize(
    self,
    block_size: int | tuple[int, int] = 32,
    batch: int = 0,
    head: int = 0,
    fit_in_screen: bool = True,
    max_rows: int = 32,
    max_cols: int = 64,
    charset: Literal["unicode", "ascii"] = "unicode",
    show_segments: bool = True,
    return_str: bool = False,
) -> str | None:
    """Draws the mask in blocks, each as two characters that show whether all, some or none of its pairs are visible.

    With `fit_in_screen` blocks are made larger until there are at most max_rows times max_cols of them. Segment ids are
    at the left and above: a number, `PAD`, or `??` for a block with several.
    """
    mask = np.asarray(self.get_or_compute_attention_mask())[batch, head]
    rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
    if fit_in_screen:
        rows, columns = (
            max(b, -(-n // m)) for b, n, m in zip((rows, columns), mask.shape, (max_rows, max_cols), strict=True)
        )
    full, some = ("██", "░░") if charset == "unicode" else ("##", "..")
    sign = lambda block: full if block.all() else some if block.any() else "  "
    blocks = [
        [sign(mask[i : i + rows, j : j + columns]) for j in range(0, mask.shape[1], columns)]
        for i in range(0, mask.shape[0], rows)
    ]
    q, kv = (
        np.asarray(x)[batch].reshape(-1, n)[-1]
        for x, n in zip(self.get_or_compute_segment_ids(), mask.shape, strict=True)
    )
    number = lambda ids: "??" if (ids != ids[0]).any() else "PAD" if ids[0] < 0 else str(ids[0])
    left = [f"{number(q[i : i + rows]):>4} " if show_segments else "" for i in range(0, len(q), rows)]
    above = "".join(f"{number(kv[j : j + columns])[:2]:>2}" for j in range(0, len(kv), columns))
    edge = " " * (5 if show_segments else 0)
    lines = [f"mask {mask.shape}, batch {batch}, head {head}, blocks of {rows} x {columns}: {full} all, {some} some"]
    lines += [f"{edge} {above}"] if show_segments else []
    lines += [f"{begin}|{''.join(line)}|" for begin, line in zip(left, blocks, strict=True)]
    text = "\n".join(lines)
    if return_str:
        return text
    print(text)
    return None
