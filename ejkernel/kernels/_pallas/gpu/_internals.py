"""Whether the installed JAX still has the private parts of Mosaic GPU, and of MLIR in jaxlib, that the kernels use.

Where JAX has moved one, `supports` says so and a call goes to Triton, instead of failing while the kernel is traced.
The check searches the source text of JAX: importing Pallas takes half a second, and a program that loads its kernels
from a cache does not need it.
"""

import functools
import re
from pathlib import Path

import jax
import jaxlib

_ROOTS = {package.__name__: Path(package.__file__).parents[1] for package in (jax, jaxlib)}
_USED = {
    "jax/experimental/mosaic/gpu/fragmented_array.py": (
        "class FragmentedArray",
        "_registers: np.ndarray",
        "_layout: FragmentedLayout",
        "_is_signed: bool | None",
        "def splat",
        "def store_tiled(",
        "def broadcast_in_dim",
        "def registers_shape",
        "def mlir_dtype",
    ),
    "jax/experimental/mosaic/gpu/utils.py": ("def bytewidth(", "def memref_ptr(", "def warpgroup_barrier("),
    "jax/experimental/pallas/mosaic_gpu.py": (
        "inline_mgpu",
        "RefType",
        "Layout",
        "ShapeDtypeStruct",
        "SwizzleTransform",
        "TilingTransform",
        "commit_smem",
        "layout_cast",
    ),
    "jax/_src/pallas/mosaic_gpu/core.py": (
        "def to_mgpu(",
        "WGMMA =",
        "WGMMA_8BIT =",
        "WG_SPLAT =",
        "_WGMMA_ACC_32BIT =",
    ),
    "jaxlib/mlir/dialects/_arith_enum_gen.py": ("class CmpIPredicate",),
    "jaxlib/mlir/dialects/_arith_ops_gen.py": (
        "def addf(",
        "def addi(",
        "def andi(",
        "def bitcast(",
        "def cmpi(",
        "def divui(",
        "def extsi(",
        "def extui(",
        "def maxnumf(",
        "def mulf(",
        "def muli(",
        "def negf(",
        "def ori(",
        "def shrui(",
        "def subi(",
        "def xori(",
    ),
    "jaxlib/mlir/dialects/arith.py": ("def constant(",),
    "jaxlib/mlir/dialects/_llvm_ops_gen.py": ("def extractvalue(", "def inline_asm(", "def ptrtoint("),
    "jaxlib/mlir/dialects/_math_ops_gen.py": ("def fma(",),
    "jaxlib/mlir/dialects/_vector_ops_gen.py": (
        "def bitcast(",
        "def broadcast(",
        "def extract(",
        "def from_elements(",
    ),
}
"""The names that `_inline` uses, by file. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.

The types of `jaxlib.mlir.ir`, which every lowering of JAX uses, are compiled and have no source text.
"""


@functools.cache
def moved(folder: Path | None = None) -> str | None:
    """A sentence on the first name that the installed JAX lacks, or None if it has all of them.

    `folder` has the packages jax and jaxlib; None: each is where Python finds it.
    """
    for name, used in _USED.items():
        file = (folder or _ROOTS[name.partition("/")[0]]) / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for what in used:
            # The files of MLIR are large, and a plain search is much faster than an expression.
            if what not in text or not re.search(rf"\b{re.escape(what)}", text[max(0, text.index(what) - 1) :]):
                return f"jax {jax.__version__} has no {what!r} in {name}, which the kernel is built on"
    return None
