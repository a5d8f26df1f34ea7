"""Configs: the frozen, hashable choices that change how an operation is computed and never what it computes."""

from dataclasses import dataclass

from ._repr import ShortRepr
from .enums import Backend, Platform


@dataclass(frozen=True, repr=False)
class KernelConfig(ShortRepr):
    """Block sizes and launch parameters of one call.

    A config that was chosen for a target names the implementation platform and the backend it was chosen for. A config
    given by a user may leave both open ("auto", "any"): the dispatcher then picks the implementation by priority.

    Attributes:
        block_q: query block size (rows of a tile).
        block_k: key/value block size (columns of a tile).
        block_d: block size along the feature dimension, where an operation tiles it.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
        platform: "triton", "pallas", "cuda", "cute", "xla" or "auto".
        backend: "gpu", "tpu", "cpu" or "any".
        algorithm: a variant of the algorithm, where several exist.
        priority: selection priority when several configs match.
    """

    block_q: int = 128
    block_k: int = 128
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 2
    platform: Platform | str = "auto"
    backend: Backend | str = Backend.ANY
    algorithm: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class FwdParams:
    """Launch parameters of a forward attention kernel."""

    q_blocksize: int = 128
    kv_blocksize: int = 128
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class BwdParams:
    """Launch parameters of a backward attention kernel."""

    q_blocksize: int = 64
    kv_blocksize: int = 64
    num_warps: int = 4
    num_stages: int = 2
