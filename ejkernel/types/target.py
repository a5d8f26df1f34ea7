"""What a program is being lowered for: a platform of JAX and, where it is known, the kind of the device."""

import re
from dataclasses import dataclass

from .enums import Backend

# The compute capability that is assumed where a program is lowered for CUDA without a GPU in sight.
DEFAULT_CUDA_CAPABILITY = 90
_CAPABILITY_OF_KIND = (
    (r"\b(B200|GB200|B300|GB300)\b", 100),
    (r"\b(H100|H200|H800|H20|GH200)\b", 90),
    (r"\b(L4|L40S?|RTX 4\d{3}|RTX 6000 Ada)\b", 89),
    (r"\b(A10G?|A40|RTX 3\d{3}|RTX A\d{4})\b", 86),
    (r"\b(A100|A800|A30)\b", 80),
)


@dataclass(frozen=True)
class Target:
    """A platform as `jax.jit(...).lower(lowering_platforms=...)` names it, and the device's kind where it is known.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        device_kind: as in `jax.Device.device_kind`, e.g. "NVIDIA H200"; None when a program is lowered for a device
            that this process does not have.
    """

    platform: str
    device_kind: str | None = None

    @property
    def backend(self) -> Backend:
        """The hardware backend of the registry that this platform belongs to."""
        return Backend({"cuda": "gpu", "rocm": "gpu"}.get(self.platform, self.platform))

    @property
    def compute_capability(self) -> int | None:
        """Of a CUDA device, e.g. 90; `DEFAULT_CUDA_CAPABILITY` where the kind is not known; None elsewhere."""
        if self.platform != "cuda":
            return None
        for pattern, capability in _CAPABILITY_OF_KIND:
            if self.device_kind and re.search(pattern, self.device_kind):
                return capability
        return DEFAULT_CUDA_CAPABILITY

    def __str__(self) -> str:
        return f"{self.platform} ({self.device_kind})" if self.device_kind else self.platform
