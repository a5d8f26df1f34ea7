"""Kernels of Pallas that Mosaic compiles for TPUs."""

from ejkernel.types import KernelConfig

SMEM_BYTES = 768 * 1024
"""Scalar memory that a kernel may fill: every chip since v4 has 1 MiB, and the compiler takes some of it."""
SUBLANES = 8
"""Rows of a register: blocks are made of whole ones."""
MOST_ROWS = 4096
"""Of a block: kernels are unrolled over the parts of one, and vector memory holds no larger ones."""


def refuses(name: str, config: KernelConfig) -> str | None:
    """Why kernels that use the blocks of a config as they are cannot run with it, or None."""
    del name
    for block in ("block_q", "block_k"):
        if (size := getattr(config, block)) % SUBLANES or size > MOST_ROWS:
            return f"config.{block} is {size}; the TPU kernels need a multiple of {SUBLANES} of at most {MOST_ROWS}"
    return None
