"""The platforms that implementations are written in, and the backends that they run on."""

from enum import StrEnum


class Platform(StrEnum):
    """The platforms of implementations: what an implementation is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    CUTE = "cute"
    XLA = "xla"


class Backend(StrEnum):
    """The hardware backends of implementations; `ANY` is for all of them."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"
