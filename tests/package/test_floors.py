"""A floor imports only floors below it, no two rooms import each other, and one file alone touches private JAX."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From the top down; the last is the ground, which every floor may import. Rooms of one floor do not import each other.
# What is not named here (`cli` and files that stand in ejkernel/ itself) is the roof: it imports what it likes.
FLOORS = (
    {"lax"},
    {"modules"},
    {"lowering"},
    {"ops"},
    {"kernels"},
    {"primitives"},
    {"types"},
    {"callib", "xla_utils"},
    {"errors", "compat"},
)
ROOF = -1


def sources() -> Iterator[tuple[str, Path]]:
    """Every module by its installed name."""
    for folder, above in (("ejkernel", ()), ("lowering", ("ejkernel",))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join((*above, *path.relative_to(ROOT).with_suffix("").parts)), path


def imports(name: str, path: Path) -> Iterator[str]:
    """The full names that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            yield ast.unparse(node)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def floor(name: str) -> int:
    return next((i for i, rooms in enumerate(FLOORS) if room(name) in rooms), ROOF)


def folder(name: str, modules: dict[str, Path]) -> str:
    """The package that `name` (a module, or something inside one) lives in."""
    while name not in modules and f"{name}.__init__" not in modules:
        name = name.rpartition(".")[0]
    return name.rpartition(".")[0] if name in modules else name


def test_every_floor_imports_only_floors_below():
    upward = [
        f"{name} imports {target}"
        for name, path in sources()
        for target in imports(name, path)
        if target.split(".")[0] == "ejkernel" and room(name) != room(target)
        if floor(name) != ROOF and floor(target) <= floor(name)
    ]
    assert upward == []


def test_no_two_rooms_of_kernels_import_each_other():
    """Rooms are folders side by side; what stands in a folder and what is in a folder below it are one room."""
    modules = {name: path for name, path in sources() if room(name) == "kernels"}
    pairs = {
        (folder(name, modules), folder(target, modules))
        for name, path in modules.items()
        for target in imports(name, path)
        if target.startswith("ejkernel.kernels.")
    }
    apart = lambda a, b: not f"{b}.".startswith(f"{a}.")
    assert [(a, b) for a, b in sorted(pairs) if a < b and (b, a) in pairs and apart(a, b)] == []


def test_private_jax_is_touched_in_compat_alone():
    private = {name for name, path in sources() for target in imports(name, path) if "jax._src" in target}
    assert private == {"ejkernel.compat"}


def test_every_folder_is_a_floor():
    """A floor that was renamed must be renamed here, or its files would pass for the roof."""
    folders = {room(name) for name, path in sources() if path.parent != ROOT / "ejkernel"}
    assert folders == set().union(*FLOORS[:-1]) | {"cli"}
