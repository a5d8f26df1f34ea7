"""Whether the installed JAX has what the kernels touch of Mosaic GPU beside its public names.

Where JAX has moved it, the kernels leave a call to Triton and say why, in the place of an error while they are traced.
It is looked for in the text of JAX: to import Pallas takes half a second, and a program that holds a kernel from a
cache does not need it.
"""

import functools
import re
from pathlib import Path

import jax

_FOLDER = Path(jax.__file__).parent
_USED = {
    "experimental/mosaic/gpu/fragmented_array.py": (
        "class FragmentedArray",
        "_registers: np.ndarray",
        "_layout: FragmentedLayout",
        "_is_signed: bool | None",
        "def splat",
        "def broadcast_in_dim",
        "def registers_shape",
        "def mlir_dtype",
    ),
    "experimental/mosaic/gpu/utils.py": ("def memref_ptr",),
    "experimental/pallas/mosaic_gpu.py": ("inline_mgpu", "RefType", "Layout"),
}
"""By file, what `_inline` uses. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""


@functools.cache
def moved(folder: Path = _FOLDER) -> str | None:
    """What the installed JAX lacks of what the kernels are built on, or None."""
    for name, used in _USED.items():
        file = folder / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for what in used:
            if not re.search(rf"\b{re.escape(what)}", text):
                return f"jax {jax.__version__} has no {what!r} in {name}, which the kernel is built on"
    return None
