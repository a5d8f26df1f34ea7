"""Which configs the kernel of multi_latent_page_attention is run with: heads, tokens, keys and parts of a program."""

import math
from dataclasses import replace

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

# Rows of a tile, heads of tokens: what a matrix unit takes, and what is accumulated in the registers of eight warps. In
# float32, which no matrix unit multiplies, that is less.
LEAST_ROWS, MOST_ROWS, MOST_ROWS_OF_FLOAT32 = 16, 64, 16
HOPPER = 90
# (keys of a tile, warps, stages) by the rows of a tile, the likeliest first.
SIZES = {
    16: ((32, 4, 2), (64, 8, 2), (32, 8, 2), (16, 4, 2)),
    32: ((32, 8, 2), (64, 8, 2), (16, 8, 2)),
    64: ((64, 8, 2), (32, 8, 3), (32, 8, 2), (16, 8, 2)),
}
SIZES_OF_FLOAT32 = ((16, 4, 1),)
# The variant for few rows on Hopper, whose products then take slots of 16 bits from shared memory, and its size.
TRANSPOSED, TRANSPOSED_SIZE = "transposed", (64, 4, 2)
# Configs that are timed, of each number of parts.
WORTH_TIMING = 3
# Keys that a part has at least, so that merging costs little beside it.
LEAST_KEYS = 256
# The same, and how many parts at most, where the batch must not decide: every token of a prefill has a float32 result
# of each part.
LEAST_KEYS_OF_INVARIANT_PART, MOST_INVARIANT_PARTS = 4096, 8
# From so many waves of programs on there is nothing to gain by parts.
WAVES = 4
# Programs that a multiprocessor has registers for, by their warps.
AT_ONCE = {4: 2, 8: 1}


def rows_of(heads: int, config: MultiLatentPageAttentionConfig) -> tuple[int, int]:
    """Heads and tokens of a tile, both powers of two."""
    block = min(_power_of_two(heads), config.heads_per_block, MOST_ROWS)
    return block, max(LEAST_ROWS // block, min(MOST_ROWS // block, _power_of_two(config.queries_per_block)))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first.

    There is one where the batch must not decide: which is fastest depends on it.
    """
    limit = _launch.shared_memory_limit(target)
    memory = lambda config: _shared_memory(operands, config, _buffers(operands, config, target))
    fitting = [config for config in _tiles(spec, operands, target) if memory(config) <= limit]
    return [
        replace(config, num_splits=splits)
        for config in fitting[: 1 if spec.batch_invariant else WORTH_TIMING] or [smallest(operands)]
        for splits in _splits(spec, operands, target, config)
    ]


def smallest(operands: Operands) -> MultiLatentPageAttentionConfig:
    """The config that takes the least of everything."""
    return _of_rows(operands, LEAST_ROWS)[-1]


def _tiles(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """Those of as many rows as there are heads of tokens that one sequence has, and of the fewest."""
    rows = _power_of_two(operands.q_latent.shape[2]) * _power_of_two(_tokens(spec, operands))
    most = MOST_ROWS_OF_FLOAT32 if operands.q_latent.dtype == "float32" else MOST_ROWS
    wanted = max(LEAST_ROWS, min(most, rows))
    tiles = [config for rows in dict.fromkeys((wanted, LEAST_ROWS)) for config in _of_rows(operands, rows)]
    in_half = operands.q_latent.dtype != "float32" and operands.pages.dtype == operands.q_latent.dtype
    if wanted == LEAST_ROWS and in_half and target.compute_capability == HOPPER:
        keys, warps, stages = TRANSPOSED_SIZE
        sized = replace(tiles[0], keys_per_block=keys, num_warps=warps, num_stages=stages)
        tiles.insert(1, replace(sized, algorithm=TRANSPOSED))
    return tiles


def _of_rows(operands: Operands, rows: int) -> list[MultiLatentPageAttentionConfig]:
    heads = min(rows, _power_of_two(operands.q_latent.shape[2]))
    return [
        MultiLatentPageAttentionConfig(
            queries_per_block=rows // heads,
            heads_per_block=heads,
            keys_per_block=keys,
            num_warps=warps,
            num_stages=stages,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for keys, warps, stages in (SIZES_OF_FLOAT32 if operands.q_latent.dtype == "float32" else SIZES[rows])
    ]


def _tokens(spec: CacheSpec, operands: Operands) -> int:
    """Tokens of a row: those of a sequence in the step, were they shared out evenly; one, where each has a list."""
    alone = spec.batch_invariant or operands.indices is not None
    return 1 if alone else max(1, operands.q_latent.shape[1] // operands.context_lens.shape[1])


def _splits(spec: CacheSpec, operands: Operands, target: Target, config: MultiLatentPageAttentionConfig) -> list[int]:
    """Into how many parts to cut: what is asked for; the same in every step, where a batch must not decide it; so many
    that all programs run at once, as near as can be."""
    lists = operands.indices
    keys = operands.block_tables.shape[2] * operands.pages.shape[2] if lists is None else lists.shape[2]
    if spec.num_splits is not None:
        return [spec.num_splits]
    if spec.batch_invariant:
        return [min(MOST_INVARIANT_PARTS, math.ceil(keys / LEAST_KEYS_OF_INVARIANT_PART))]
    (batch, step, heads, _), sequences = operands.q_latent.shape, operands.context_lens.shape[1]
    block, tokens = rows_of(heads, config)
    rows = step if lists is not None else min(step, max(sequences, step // tokens))
    programs = batch * rows * math.ceil(heads / block)
    of_core = 1 if config.algorithm == TRANSPOSED else AT_ONCE[config.num_warps]
    at_once = of_core * (target.core_count or DEFAULT_CORE_COUNT)
    most = max(1, keys // LEAST_KEYS)
    likely = min(most, max(1, at_once // programs))
    others = (min(most, 2 * likely), max(1, likely // 2)) if programs < WAVES * at_once else ()
    return list(dict.fromkeys([likely, *others]))


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_refusal(operands: Operands, target: Target) -> str | None:
    """Why the smallest tiles do not fit the shared memory of a target, or None."""
    config = smallest(operands)
    return _launch.memory_refusal(_shared_memory(operands, config, _buffers(operands, config, target)), target)


def excess(operands: Operands, config: MultiLatentPageAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    limit, needed = _launch.limit_of_environment(), _shared_memory(operands, config, config.num_stages)
    if limit is None or needed <= limit:
        return None
    return f"the config takes up to {needed} bytes of shared memory, {_launch.LIMIT_VARIABLE} allows {limit}"


def _shared_memory(operands: Operands, config: MultiLatentPageAttentionConfig, buffers: int) -> int:
    """Bytes of so many tiles of slots, of one that is converted if they are, of the queries and of their weights."""
    rows, keys = math.prod(rows_of(operands.q_latent.shape[2], config)), config.keys_per_block
    width = sum(max(LEAST_ROWS, _power_of_two(x.shape[3])) for x in (operands.q_latent, operands.q_rope))
    size, cached = operands.q_latent.dtype.itemsize, operands.pages.dtype.itemsize
    converted = 0 if cached == size else keys * width * size
    return buffers * keys * width * cached + converted + rows * (width + keys) * size


def _buffers(operands: Operands, config: MultiLatentPageAttentionConfig, target: Target) -> int:
    """Tiles of slots in shared memory: num_stages, one less where products are fed from registers, and two more with
    the tensor memory of Blackwell, of which some tiles are copies in another layout."""
    rows, stages = math.prod(rows_of(operands.q_latent.shape[2], config)), config.num_stages
    least = 1 if _launch.limit_of_environment() is None else stages
    from_registers = rows < MOST_ROWS and config.algorithm != TRANSPOSED
    if from_registers or target.multiplies_from_registers:
        return max(least, stages - 1)
    return stages + 2 if (target.compute_capability or 0) >= 100 else stages


def refuses(config: MultiLatentPageAttentionConfig) -> str | None:
    """What the kernel has against a config, or None."""
    if (heads := config.heads_per_block) & (heads - 1):
        return f"config.heads_per_block is {heads}; Triton needs a power of two"
    wrong = _launch.refuses("latent_kernel", of_launch(config))
    return wrong and wrong.replace("block_k", "keys_per_block")


def of_launch(config: MultiLatentPageAttentionConfig) -> KernelConfig:
    """What a launch is told."""
    return KernelConfig(block_k=config.keys_per_block, num_warps=config.num_warps, num_stages=config.num_stages)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
