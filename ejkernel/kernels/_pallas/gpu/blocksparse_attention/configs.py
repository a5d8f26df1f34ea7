"""Which configs the forward of blocksparse_attention is run with: those of flash_attention with tiles within blocks."""

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig, Target

from ..flash_attention import configs as of_flash


def space(name: str, operands: Operands, spec: BlocksparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    configs = of_flash.space(_of_flash(name), operands.attention, spec, target)
    return [config for config in configs if fits(name, (config.block_q, config.block_k), operands, spec)]


def fits(name: str, tile: tuple[int, int], operands: Operands, spec: BlocksparseAttentionSpec) -> bool:
    """Whether every tile lies within one block of the mask, and the band ends at block boundaries.

    Then every key of a tile that is computed is visible to some query; a key that no query sees may hold NaN, and may
    not be multiplied. For the same reason every query of a tile of the backward sees a key.
    """
    lengths = operands.q.shape[1], operands.k.shape[1]
    block_q, block_k = blocks = tuple(map(min, spec.block_size, lengths))
    if any(block < length and block % size for block, length, size in zip(blocks, lengths, tile, strict=True)):
        return False
    visibility = visibility_of(operands.attention, spec)
    if not (band := [end for end in (visibility.low, visibility.high) if end is not None]):
        return True
    keys_have_queries = block_q == lengths[0] or all(n % block_k == 0 for n in (block_q, *band))
    queries_have_keys = not name.endswith("_bwd") or all(n % tile[0] == 0 for n in (tile[1], *band))
    return keys_have_queries and queries_have_keys


def check(name: str, tile: tuple[int, int], operands: Operands, spec: BlocksparseAttentionSpec) -> None:
    """Raises where tiles do not fit."""
    if not fits(name, tile, operands, spec):
        raise ValueError(
            f"{name}: tiles of {tile[0]} queries and {tile[1]} keys do not fit into blocks of {spec.block_size}, "
            f"or the window or causality ends within them"
        )


def refuses(operation: str, config: KernelConfig) -> str | None:
    """What the kernel has against a config, or None."""
    return of_flash.refuses(_of_flash(operation), config)


def _of_flash(name: str) -> str:
    return name.replace("blocksparse", "flash")
