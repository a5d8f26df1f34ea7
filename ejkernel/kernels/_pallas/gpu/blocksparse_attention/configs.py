"""Which configs the forward of blocksparse_attention is run with: those of flash_attention with tiles within blocks."""

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig, Target

from ..flash_attention import configs as of_flash


def space(name: str, operands: Operands, spec: BlocksparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    configs = of_flash.space(_of_flash(name), operands.attention, spec, target)
    return [config for config in configs if fits(config, operands, spec)]


def fits(config: KernelConfig, operands: Operands, spec: BlocksparseAttentionSpec) -> bool:
    """Whether every tile is within one block, and each key of a kept tile is seen by a query of it.

    One that is not might be seen by no query at all, and hold anything: the band has to end at the edges of tiles.
    """
    lengths, tiles = (operands.q.shape[1], operands.k.shape[1]), (config.block_q, config.block_k)
    visibility = visibility_of(operands.attention, spec)
    within = all(
        block >= length or block % tile == 0
        for block, length, tile in zip(spec.block_size, lengths, tiles, strict=True)
    )
    edges = [] if visibility.high is None else [config.block_q + visibility.high]
    edges += [] if visibility.low is None else [visibility.low]
    steps = [config.block_q] if edges and config.block_q < lengths[0] else []
    return within and all(edge % config.block_k == 0 for edge in edges + steps)


def refuses(operation: str, config: KernelConfig) -> str | None:
    """What the kernel has against a config, or None."""
    return of_flash.refuses(_of_flash(operation), config)


def _of_flash(name: str) -> str:
    return name.replace("blocksparse", "flash")
