"""Packages import only from layers below their own, without cycles, and only one file uses private JAX."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From top to bottom; every layer may import the last. Packages of one layer do not import each other.
# What is not named here (`cli` and the files in ejkernel/ itself) is above all layers and may import from any.
LAYERS = (
    {"serving"},
    {"lax"},
    {"modules"},
    {"lowering"},
    {"ops"},
    {"kernels"},
    {"primitives"},
    {"types", "quantization"},
    {"callib", "xla_utils"},
    {"errors", "compat"},
)
TOP = -1


def sources() -> Iterator[tuple[str, Path]]:
    """Every module by its installed name."""
    for folder, above in (("ejkernel", ()), ("lowering", ("ejkernel",))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join((*above, *path.relative_to(ROOT).with_suffix("").parts)), path


def imports(name: str, path: Path, with_functions: bool = True) -> Iterator[str]:
    """The full names that a module imports, anywhere in its code or only when it is itself imported."""
    for node in nodes(parsed(path), with_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            yield ast.unparse(node)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(tree: ast.AST, with_functions: bool) -> Iterator[ast.AST]:
    """The nodes of a tree, with or without the bodies of functions."""
    yield tree
    if with_functions or not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(tree):
            yield from nodes(child, with_functions)


def module(name: str, modules: dict[str, Path]) -> str | None:
    """The module that defines `name`, or is `name`."""
    while name:
        if found := next((of for of in (name, f"{name}.__init__") if of in modules), None):
            return found
        name = name.rpartition(".")[0]
    return None


def package(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def layer(name: str) -> int:
    return next((i for i, packages in enumerate(LAYERS) if package(name) in packages), TOP)


def folder(name: str, modules: dict[str, Path]) -> str:
    """The package of `name`, a module or a name in one."""
    while name not in modules and f"{name}.__init__" not in modules:
        name = name.rpartition(".")[0]
    return name.rpartition(".")[0] if name in modules else name


def test_every_layer_imports_only_layers_below():
    upward = [
        f"{name} imports {target}"
        for name, path in sources()
        for target in imports(name, path)
        if target.split(".")[0] == "ejkernel" and package(name) != package(target)
        if layer(name) != TOP and layer(target) <= layer(name)
    ]
    assert upward == []


def test_no_modules_import_each_other():
    """Directly or through others, while they are imported. A function may import modules when it is called."""
    modules = dict(sources())
    graph = {
        name: {module(target, modules) for target in imports(name, path, with_functions=False)} - {None, name}
        for name, path in modules.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)  # a cycle is an error that lists it


def test_no_two_folders_of_kernels_import_each_other():
    """Sibling folders; a folder and its subfolders count as one."""
    modules = {name: path for name, path in sources() if package(name) == "kernels"}
    pairs = {
        (folder(name, modules), folder(target, modules))
        for name, path in modules.items()
        for target in imports(name, path)
        if target.startswith("ejkernel.kernels.")
    }
    apart = lambda a, b: not f"{b}.".startswith(f"{a}.")
    assert [(a, b) for a, b in sorted(pairs) if a < b and (b, a) in pairs and apart(a, b)] == []


def test_private_jax_is_used_only_in_compat():
    private = {name for name, path in sources() for target in imports(name, path) if "jax._src" in target}
    assert private == {"ejkernel.compat"}


def test_every_folder_is_in_a_layer():
    """A renamed package must be renamed here too, or its files could import from any layer."""
    folders = {package(name) for name, path in sources() if path.parent != ROOT / "ejkernel"}
    assert folders == set().union(*LAYERS[:-1]) | {"cli"}
