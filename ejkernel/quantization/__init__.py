"""Quantised weights for `ejkernel.lax.quantized_matmul`: quantisation, the format of codes, and dequantisation.

    weights = prepack_quantized_weights(w, mode="nf4", group_size=64, transpose=False)      # w [K, N]
    o = ejkernel.lax.quantized_matmul(x, *weights, mode="nf4", group_size=64)               # x [M, K] → o [M, N]

| mode | bits | group_size | value of a code | scale of a group |
|---|---|---|---|---|
| affine | 1 to 8 | 16 to 1024 | (code − zero) · scale | float; the zero is another float |
| nf4 | 4 | 16 to 1024 | NF4[code] · scale | float |
| mxfp4, mxfp8 | 4, 8 | 32 | e2m1 or e4m3 of the code · 2^scale | int8 exponent, kept as uint8 |
| nvfp4, nvfp8 | 4, 8 | 16 | e2m1 or e4m3 of the code · scale | float8_e4m3fn, kept as uint8 |

The codes of a row form a stream of bits, which is cut into uint32 words, lowest bits first: 4-bit code c begins at bit
4·(c mod 8) of word c div 8. Groups are consecutive codes, and end where a word ends. Layouts and codes are those of
ejkernel 0.0.78, so that weights stored with it can be read. The biased exponents of the OCP microscaling formats (e8m0)
become those of mxfp4 or mxfp8 by `(e8m0 - 127).astype(uint8)`.
"""

from ._formats import Format, Mode, format_of
from ._weights import Axis, dequantize, prepack_quantized_weights, quantize

__all__ = ["Axis", "Format", "Mode", "dequantize", "format_of", "prepack_quantized_weights", "quantize"]
