"""TurboQuant, arXiv 2504.19874: keys and values of a cache in a few bits of each feature, whose products are unbiased.

`ejkernel.xla_utils.turboquant` has the mathematics. The operations over a cache of this kind are
ragged_page_attention_v2_turboquant and ragged_page_attention_v3_turboquant.
"""

from .codebook import LloydMaxCodebook, solve_lloyd_max
from .matrices import generate_projection_matrix, generate_rotation_matrix

__all__ = ["LloydMaxCodebook", "generate_projection_matrix", "generate_rotation_matrix", "solve_lloyd_max"]
