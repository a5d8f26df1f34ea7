"""TurboQuant, arXiv 2504.19874: keys and values of a cache in a few bits of each feature, whose products are unbiased.

The operations over a cache of this kind are ragged_page_attention_v3_turboquant, which quantises the keys and values of
a step itself, and ragged_page_attention_v2_turboquant; `quantise` gives what belongs into the pages of the latter.
"""

from ...xla_utils.turboquant import Matrices, Quantised, dequantised_keys, dequantised_values, quantise
from .codebook import LloydMaxCodebook, solve_lloyd_max
from .matrices import generate_projection_matrix, generate_rotation_matrix

__all__ = [
    "LloydMaxCodebook",
    "Matrices",
    "Quantised",
    "dequantised_keys",
    "dequantised_values",
    "generate_projection_matrix",
    "generate_rotation_matrix",
    "quantise",
    "solve_lloyd_max",
]
