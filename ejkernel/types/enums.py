"""The platforms that implementations are written in, and the backends that they run on."""

from enum import StrEnum


class Platform(StrEnum):
    """Supported kernel implementation platforms: the framework that an implementation is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    CUTE = "cute"
    XLA = "xla"


class Backend(StrEnum):
    """Target hardware backends. `ANY` matches every query."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"
