"""Checks of the arguments of attention over pages that are quantised by TurboQuant: pools, matrices, codebooks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import type_error, value_error
from ...xla_utils.turboquant import MOST_ENTRIES
from ._arguments import array, int32, require_dtype, require_known, require_rank
from ._attention import sinks_of_heads
from ._pages import check_tables, count_of_sequences

RANKS = {
    "key_indices_pages": "pages, slots of a page, heads, bytes of indices",
    "key_signs_pages": "pages, slots of a page, heads, bytes of signs",
    "key_norms_pages": "pages, slots of a page, heads, the two norms",
    "value_indices_pages": "pages, slots of a page, heads, bytes of indices",
    "value_norms_pages": "pages, slots of a page, heads",
}


def operands_of_cache(
    operation: str,
    q: Any,
    pools: Mapping[str, Any],
    tables: Mapping[str, Any],
    num_seqs: Any,
    matrices: Mapping[str, Any],
    sinks: Any,
) -> dict[str, Any]:
    """The primitive's operands except those of the step's tokens; raises if one does not fit the others."""
    pools, tables = ({name: array(operation, name, x) for name, x in of.items()} for of in (pools, tables))
    matrices = _checked_matrices(operation, q, matrices)
    _check_pools(operation, q, pools, matrices["qjl_projection"])
    check_tables(operation, **tables)
    return dict(
        **{name: x[None] for name, x in pools.items()},
        **{name: int32(x)[None] for name, x in tables.items()},
        num_seqs=count_of_sequences(operation, num_seqs, **tables),
        **{name: x.astype(np.promote_types(q.dtype, np.float32))[None] for name, x in matrices.items()},
        sinks=sinks_of_heads(operation, sinks, q.shape[1], q),
    )


def example_of_cache(heads: int, features: int) -> dict[str, Any]:
    """Pools of four pages of 128 slots, tables of four sequences of one page each, and matrices for four bits."""
    array = jax.ShapeDtypeStruct
    of_pages = lambda dtype, *last: array((4, 128, heads, *last), dtype)
    tables = dict(context_lens=(4,), block_tables=(4, 1), query_start_loc=(5,), num_seqs=(1,))
    matrices = dict(rotation_matrix=(features, features), qjl_projection=(features, features))
    matrices |= dict(key_codebook=(8,), value_codebook=(16,))
    return dict(
        key_indices_pages=of_pages(jnp.uint8, features // 2),
        key_signs_pages=of_pages(jnp.uint8, features // 8),
        key_norms_pages=of_pages(jnp.bfloat16, 2),
        value_indices_pages=of_pages(jnp.uint8, features // 2),
        value_norms_pages=of_pages(jnp.bfloat16),
        **{name: array(of, jnp.int32) for name, of in tables.items()},
        **{name: array(of, jnp.float32) for name, of in matrices.items()},
    )


def _check_pools(operation: str, q, pools: Mapping[str, Any], projection: Any) -> None:
    """Raises unless the pools [P, page, G, ·] fit each other, the queries, and the projection [e, D]."""
    require_dtype(operation, np.floating, "a float type", q=q)
    for name, x in pools.items():
        axes = RANKS[name]
        require_rank(operation, axes.count(",") + 1, axes, **{name: x})
        if name.endswith("norms_pages"):
            require_dtype(operation, np.floating, "a float type", **{name: x})
        elif x.dtype != np.uint8:
            raise type_error(operation, f"{name} has dtype {x.dtype}; it must be uint8", **{name: x})
        if 0 in x.shape:
            raise value_error(operation, f"{name} has the shape {x.shape}; no axis of it may be 0", **{name: x})
    (heads, features), rows = q.shape[1:], projection.shape[0]
    slots = pools["value_norms_pages"].shape
    widths = dict(key_indices_pages=features // 2, key_signs_pages=rows // 8, key_norms_pages=2)
    widths |= dict(value_indices_pages=features // 2)
    for name, width in widths.items():
        if pools[name].shape != (*slots, width):
            rule = f"of {features} features, {rows} rows of qjl_projection and such value_norms_pages"
            raise value_error(operation, f"{name} must be {[*slots, width]}, {rule}", q=q, **pools)
    if heads % slots[2]:
        rule = "query heads must be a multiple of key/value heads"
        raise value_error(operation, f"the pages have {slots[2]} heads but q has {heads}; {rule}", q=q, **pools)


def _checked_matrices(operation: str, q, given: Mapping[str, Any]) -> dict[str, Any]:
    """The checked rotation [D, D], projection [e, D] and codebooks."""
    found = {name: array(operation, name, x) for name, x in given.items()}
    require_dtype(operation, np.floating, "a float type", **found)
    (rotation, projection, *codebooks), features = found.values(), q.shape[2]
    require_rank(operation, 2, "rotated features, features", rotation_matrix=rotation)
    require_rank(operation, 2, "rows of the projection, features", qjl_projection=projection)
    for what, size in (("the number of features", features), ("the number of rows", projection.shape[0])):
        require_known(operation, what, size, q=q, qjl_projection=projection)
    if features == 0 or features % 2:
        raise value_error(operation, f"q has {features} features; they must be even: a byte has two indices", q=q)
    if rotation.shape != (features, features):
        raise value_error(operation, f"rotation_matrix must be [{features}, {features}]", q=q, rotation_matrix=rotation)
    if projection.shape[1] != features or projection.shape[0] % 8 or projection.shape[0] == 0:
        rule = f"[rows, {features}], the rows a multiple of 8: a byte has eight signs"
        raise value_error(operation, f"qjl_projection must be {rule}", q=q, qjl_projection=projection)
    for name, x in zip(("key_codebook", "value_codebook"), codebooks, strict=True):
        require_rank(operation, 1, "entries", **{name: x})
        require_known(operation, f"the number of entries of {name}", x.shape[0], **{name: x})
        if not 1 <= x.shape[0] <= MOST_ENTRIES:
            rule = f"there must be from 1 to {MOST_ENTRIES}: an index has four bits"
            raise value_error(operation, f"{name} has {x.shape[0]} entries; {rule}", **{name: x})
    return found
