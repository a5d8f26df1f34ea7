"""The configs of the kernel of quantized_matmul: block_k rows of codes, and block_n codes of a row, at a time.

block_m is rows of x. block_n is brought to whole registers of words and of groups, or to all codes of a row.
"""

from ejkernel.primitives.quantized_matmul import Operands, QuantizedMatmulSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from .. import round_up

LANES, ROWS = 128, 16
MOST_WORDS = 2**19
"""Words of a tile; beside them there are their scales, zeros and weights in float32."""
# (rows of codes, codes of a row), the most promising first.
BLOCKS = ((512, 8192), (256, 8192), (128, 8192), (256, 16384))


def space(operation: str, operands: Operands, spec: QuantizedMatmulSpec, target: Target) -> list[QuantizedMatmulConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    rows = operands.x.shape[0] * operands.x.shape[1]
    block_m = min(128, round_up(rows, ROWS))
    of = dict(platform=Platform.PALLAS, backend=Backend.TPU)
    return [QuantizedMatmulConfig(block_m, codes, rows_of_codes, **of) for rows_of_codes, codes in BLOCKS]


def words_of_tile(words: int, codes: int, spec: QuantizedMatmulSpec) -> int:
    """Words of a tile of about so many codes of a row: all of a row, or those of a multiple of 128 groups."""
    whole = LANES * spec.group_size * spec.bits // 32
    return min(words, max(1, codes * spec.bits // 32 // whole) * whole)
