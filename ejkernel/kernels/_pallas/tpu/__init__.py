"""Kernels of Pallas that Mosaic compiles for TPUs."""

from ejkernel.types import OperationConfig

SMEM_BYTES = 768 * 1024
"""Bytes of scalar memory for a kernel: every chip from v4 on has 1 MiB, of which the compiler needs some."""
VMEM_BYTES = 56 * 2**20
"""Bytes of vector memory for a kernel: every chip from v5e on has at least 64 MiB, but on some the compiler's default
is 16 MiB."""
SUBLANES = 8
"""The rows of a register; blocks are made of whole registers."""
MOST_ROWS = 4096
"""The most rows of a block: kernels are unrolled over its parts, and vector memory holds no larger blocks."""


def refuses(name: str, config: OperationConfig, blocks: tuple[str, ...] = ("block_q", "block_k")) -> str | None:
    """Why kernels that use the blocks of a config as they are, `blocks` by name, cannot run with it, or None."""
    del name
    for block in blocks:
        if (size := getattr(config, block)) % SUBLANES or size > MOST_ROWS:
            return f"config.{block} is {size}; the TPU kernels need a multiple of {SUBLANES} of at most {MOST_ROWS}"
    return None


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
