"""What a measured config is bound to: every file that its implementation is made of."""

from pathlib import Path

import pytest

from ejkernel.kernels import _registry
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._primitive_kernel import KERNELS, source_files
from ejkernel.types import Backend, Platform

FOLDER = Path(_registry.__file__).parent


@pytest.mark.core
@pytest.mark.parametrize("operation", sorted(KERNELS))
def test_an_edit_of_a_kernel_is_seen(operation):
    """Files that an operation has to itself, and those of its family."""
    files = {str(path.relative_to(FOLDER)) for path in source_files(operation)}
    name = operation.removesuffix("_jvp").removesuffix("_bwd")
    algorithm = "_recurrence" if name in ("recurrent", "gla", "lightning_attention") else name
    entries = kernel_registry.list_implementations(operation)
    platforms = {entry.platform for entry in entries}
    assert f"_xla/{algorithm}.py" in files
    assert all(entry.backend != Backend.TPU for entry in entries) or f"_pallas/tpu/{algorithm}/configs.py" in files
    assert Platform.TRITON not in platforms or {f"_triton/{algorithm}/configs.py", "_triton/_launch.py"} <= files
    others = {"flash_attention", "grouped_matmul", "mean_pooling", "_recurrence"} - {algorithm}
    assert not any(file.startswith(f"_triton/{other}/") for file in files for other in others)
