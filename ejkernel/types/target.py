"""Targets of lowering: a platform of JAX and, if it is known, the kind of device."""

import re
from dataclasses import dataclass, field

from .enums import Backend

# An H100 or H200 (SXM), which is assumed if a program is lowered for CUDA in a process without a GPU.
DEFAULT_CUDA_CAPABILITY, DEFAULT_CORE_COUNT = 90, 132
# Patterns of the driver's names of GPUs, and their compute capability; the first match counts.
_CAPABILITY_OF_KIND = (
    (r"\bAda\b", 89),  # RTX 6000 Ada Generation, beside the Quadro RTX 6000 (Turing) and the RTX A6000
    (r"\bQuadro (RTX \d{4}|T\d{3,4})|\bTITAN RTX\b", 75),
    (r"\b(B100|B200|GB200)\b", 100),
    (r"\b(B300|GB300)\b", 103),
    (r"\bThor\b", 110),
    (r"\bGB10\b", 121),
    (r"\bRTX 50[5-9]0|\bRTX PRO \d{3,4}", 120),
    (r"\b(H100|H200|H800|H20|GH200)\b", 90),
    (r"\b(L2|L4|L20|L40[SG]?)\b|\bRTX 40[5-9]0", 89),
    (r"\bOrin\b", 87),
    (r"\b(A2|A10[GM]?|A16|A40)\b|\bRTX (A\d{3,4}\b|2050|30[5-9]0)", 86),
    (r"\b(A100X?|A800|A30X?)\b", 80),
    (r"\bT4G?\b|\bRTX 20[6-9]0|\bGTX 16[5-6]0|\bNVIDIA T\d{3,4}\b", 75),
    (r"\bXavier\b", 72),
    (r"\bV100S?\b|\bTITAN V\b|\bGV100\b", 70),
)
# Their number of streaming multiprocessors, if it is not the default.
_CORE_COUNT_OF_KIND = ((r"\bH[18]00 PCIe\b", 114), (r"\bH20\b", 78), (r"\bA[18]00\b", 108))


@dataclass(frozen=True)
class Target:
    """A platform as `jax.jit(...).lower(lowering_platforms=...)` names it, and the device if it is known.

    Compute capability and core count of a CUDA device, if not given, follow from its kind. For a kind that is not in
    the tables the compute capability is None: no CUDA kernel supports it, and XLA computes, as `ejkernel.explain` says.
    (For a GPU of this process the driver gives both.)

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        device_kind: as in `jax.Device.device_kind`, e.g. "NVIDIA H200"; None when a program is lowered for a device
            that this process does not have.
        compute_capability: of a CUDA device, e.g. 90; `DEFAULT_CUDA_CAPABILITY` if no kind is given, None for unknown
            kinds and on other platforms.
        core_count: the streaming multiprocessors of a CUDA device, `DEFAULT_CORE_COUNT` if they are not known; None on
            other platforms. They decide how work is divided, not what can run; equality of targets ignores them.
    """

    platform: str
    device_kind: str | None = None
    compute_capability: int | None = None
    core_count: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.platform != "cuda":
            return
        kind = self.device_kind
        if self.compute_capability is None:
            found = _first_match(_CAPABILITY_OF_KIND, kind) if kind else DEFAULT_CUDA_CAPABILITY
            object.__setattr__(self, "compute_capability", found)
        if self.core_count is None:
            found = _first_match(_CORE_COUNT_OF_KIND, kind or "")
            object.__setattr__(self, "core_count", found or DEFAULT_CORE_COUNT)

    @property
    def backend(self) -> Backend:
        """The hardware backend of the registry that this platform belongs to."""
        return Backend({"cuda": "gpu", "rocm": "gpu"}.get(self.platform, self.platform))

    @property
    def capability(self) -> str:
        """The compute capability for messages: "9.0"."""
        return "an unknown one" if self.compute_capability is None else f"{self.compute_capability / 10}"

    @property
    def multiplies_from_registers(self) -> bool:
        """Whether tensor cores read their operands from registers (`mma`), not from shared memory.

        They read shared memory on Hopper (`wgmma`) and on Blackwell 10.x and 11.0 (`tcgen05`). GeForce and RTX PRO
        Blackwell GPUs, 12.x, are like those before Hopper.
        """
        return not 90 <= (self.compute_capability or 0) < 120

    def __str__(self) -> str:
        return f"{self.platform} ({self.device_kind})" if self.device_kind else self.platform


def _first_match(table: tuple, kind: str) -> int | None:
    return next((value for pattern, value in table if re.search(pattern, kind)), None)
