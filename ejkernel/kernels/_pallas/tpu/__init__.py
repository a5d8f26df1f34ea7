"""Kernels of Pallas that Mosaic compiles for TPUs."""

SMEM_BYTES = 768 * 1024
"""Scalar memory that a kernel may fill: every chip since v4 has 1 MiB, and the compiler takes some of it."""
