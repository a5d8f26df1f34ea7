"""Whether the installed JAX still has the private parts of Mosaic GPU that the kernels use.

Where JAX has moved one, `supports` says so and a call goes to Triton, instead of failing while the kernel is traced.
The check searches the source text of JAX: importing Pallas takes half a second, and a program that loads its kernels
from a cache does not need it.
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
"""The names that `_inline` uses, by file. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""


@functools.cache
def moved(folder: Path = _FOLDER) -> str | None:
    """A sentence on the first name that the installed JAX lacks, or None if it has all of them."""
    for name, used in _USED.items():
        file = folder / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for what in used:
            if not re.search(rf"\b{re.escape(what)}", text):
                return f"jax {jax.__version__} has no {what!r} in {name}, which the kernel is built on"
    return None
