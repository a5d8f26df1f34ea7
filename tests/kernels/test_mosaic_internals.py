"""Internals of JAX that the Hopper kernels use: if JAX has moved them, calls go to Triton."""

import ast
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu import _internals, _supports
from ejkernel.types import Target

FILES = [(file, what) for file, used in _internals._USED.items() for what in used]
HOPPER = Target("cuda", "NVIDIA H200")


@pytest.mark.core
def test_the_installed_jax_has_the_names_in_use():
    assert _internals.moved() is None


@pytest.mark.parametrize(("name", "what"), FILES, ids=lambda x: x)
def test_every_moved_name_is_noticed(name, what, tmp_path):
    for file in _internals._USED:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_internals._ROOTS[file.partition("/")[0]] / file, tmp_path / file)
    assert _internals.moved(tmp_path) is None
    _internals.moved.cache_clear()
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text.replace(what, "another_name"))
    assert f"no {what!r} in {name}" in _internals.moved(tmp_path)


# Modules of which every attribute in use is in the list, by the names that `_inline` gives them.
PRIVATE = {
    "fragmented_array": ("jax/experimental/mosaic/gpu/fragmented_array.py",),
    "utils": ("jax/experimental/mosaic/gpu/utils.py",),
    "plgpu": ("jax/experimental/pallas/mosaic_gpu.py",),
    "Layout": ("jax/_src/pallas/mosaic_gpu/core.py",),
    "arith": tuple(f"jaxlib/mlir/dialects/{name}.py" for name in ("arith", "_arith_ops_gen", "_arith_enum_gen")),
    "llvm": ("jaxlib/mlir/dialects/_llvm_ops_gen.py",),
    "math": ("jaxlib/mlir/dialects/_math_ops_gen.py",),
    "vector": ("jaxlib/mlir/dialects/_vector_ops_gen.py",),
}
# jax.numpy, numpy and JAX are public; the types of `ir` are in no source text.
PUBLIC = {"jnp", "np", "Array", "ir", "Any", "Callable", "Iterator", "NamedTuple", "Sequence", "reduce"}
INLINE = [ast.parse(file.read_text()) for file in sorted(Path(_internals.__file__).with_name("_inline").glob("*.py"))]


def in_use() -> set[tuple[str, str]]:
    """(module, attribute) of the attributes that `_inline` reads of imported modules and of layouts."""
    found = {(node.value, node.attr) for tree in INLINE for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    name = lambda of: of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    return {(name(of), attribute) for of, attribute in found if name(of) in PRIVATE}


def listed(module: str) -> set[str]:
    """The names of a module that the list has."""
    return {re.findall(r"\w+", what)[-1] for file in PRIVATE[module] for what in _internals._USED.get(file, ())}


def test_every_imported_module_is_public_or_private():
    """One that is new here has to be sorted into PRIVATE, with its names in the list, or PUBLIC."""
    imported = {
        alias.asname or alias.name.rpartition(".")[2]
        for tree in INLINE
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names
    }
    assert imported == PRIVATE.keys() - {"Layout"} | PUBLIC


def test_the_list_has_every_name_in_use():
    missing = {(module, name) for module, name in in_use() if name not in listed(module) | {"reduce"}}
    assert len(in_use()) > 25 and missing == set()


def test_every_name_in_the_list_is_in_use():
    used = {node.attr for tree in INLINE for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.arg for tree in INLINE for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    names = [re.match(r"(?:class |def )?(\w+)", what)[1] for _, what in FILES]
    assert [name for name in names if name not in used] == []


def test_then_triton_takes_the_call(monkeypatch):
    """A refusal with its reason, instead of an error while the kernel is traced."""
    monkeypatch.setattr(_supports, "moved", lambda: "jax 9 has no Layout")
    x = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)
    found = ejkernel.explain("flash_attention", x, x, x, causal=True, target=HOPPER)
    assert "triton/gpu with" in str(found) and "jax 9 has no Layout" in str(found)
