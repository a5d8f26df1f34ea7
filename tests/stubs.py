"""The stubs of `ejkernel.lax` and `ejkernel.modules`: their signatures, for type checkers and editors.

The functions are made when the packages are imported, those of the modules API with other names of arguments and in two
forms. `python tests/stubs.py --write` writes the stubs from the signatures that they have then.
"""

import argparse
import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from jax import Array
from jax.lax import Precision
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import AbstractArray

from ejkernel import lax, modules
from ejkernel.modules import base
from ejkernel.modules._argument_names import modules_parameters
from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS
from ejkernel.modules._public_function import OWN_PARAMETERS
from ejkernel.modules._release import signature_of
from ejkernel.modules._release_table import FORMS
from ejkernel.modules._signatures import result_type
from ejkernel.modules.operations.configs import BaseOperationConfig
from ejkernel.types import MaskInfo, Platform, arguments

ROOT = Path(modules.__file__).parents[2]
# Unions that have a name, the larger ones first.
ALIASES = {"DTypeLike": DTypeLike} | {
    name: of for name, of in vars(arguments).items() if isinstance(of, types.UnionType) and name != "OneConfig"
}
# Other types by the module and the name that the stub imports them under.
PLACES: dict[Any, tuple[str, str]] = {
    Any: ("typing", "Any"),
    Callable: ("collections.abc", "Callable"),
    Precision: ("jax.lax", "Precision"),
    Array: ("jax", "Array"),
    AbstractMesh: ("jax.sharding", "AbstractMesh"),
    Mapping: ("collections.abc", "Mapping"),
    Mesh: ("jax.sharding", "Mesh"),
    PartitionSpec: ("jax.sharding", "PartitionSpec"),
    arguments.CuSeqlens: ("..types", "CuSeqlens"),
    MaskInfo: ("..types", "MaskInfo"),
    Platform: ("..types", "Platform"),
    BaseOperationConfig: (".operations.configs", "BaseOperationConfig"),
}
PLAIN = (bool, float, int, str, tuple, list)


class Writer:
    """Writes annotations as source, and collects the names to be imported by module."""

    def __init__(self) -> None:
        self.imports: dict[str, set[str]] = {}

    def name(self, module: str, name: str) -> str:
        self.imports.setdefault(module, set()).add(name)
        return name

    def type(self, of: Any) -> str:
        """The source of an annotation."""
        if of is None or of is type(None):
            return "None"
        if isinstance(of, list):  # the arguments of a Callable
            return f"[{', '.join(map(self.type, of))}]"
        if of in PLAIN:
            return of.__name__
        if of in PLACES:
            return self.name(*PLACES[of])
        if isinstance(of, type) and issubclass(of, AbstractArray):
            self.name("jax", "Array")
            dims = f" {of.dim_str}" if of.dim_str and " " not in of.dim_str else of.dim_str
            return f'{self.name("jaxtyping", of.dtype.__name__)}[Array, "{dims}"]'
        origin, parts = get_origin(of), get_args(of)
        if origin in (Union, types.UnionType):
            return self.union(parts)
        if origin is Literal:
            return f"{self.name('typing', 'Literal')}[{', '.join(map(repr, parts))}]"
        if origin is not None:
            of_parts = ", ".join("..." if part is ... else self.type(part) for part in parts)
            return f"{self.type(origin)}[{of_parts}]"
        raise ValueError(f"{of!r} has no source in the stub; add its module to PLACES")

    def union(self, parts: Iterable[Any]) -> str:
        """The source of a union, with the names of those that are in it."""
        parts, written = list(parts), []
        for alias, of in ALIASES.items():
            members = get_args(of)
            if all(member in parts for member in members) and type(None) not in members:
                parts = [part for part in parts if part not in members]
                written.append(self.name("jax.typing" if alias == "DTypeLike" else "..types", alias))
        return " | ".join([*written, *map(self.type, sorted(parts, key=lambda part: part is type(None)))])

    def function(
        self, name: str, parameters: Iterable[inspect.Parameter], result: Any, says: str, *, overload: bool = False
    ) -> str:
        """The source of a signature, with a docstring of one line."""
        written, keywords = [], False
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and not keywords:
                keywords = True
                written.append("*")
            default = repr(p.default) if p.default is None or type(p.default) in PLAIN else "..."
            written.append(f"{p.name}: {self.type(p.annotation)}" + f" = {default}" * (p.default is not p.empty))
        mark = f"@{self.name('typing', 'overload')}\n" if overload else ""
        return f'{mark}def {name}({", ".join(written)}) -> {self.type(result)}:\n    """{says}"""\n'


def of_modules(name: str) -> tuple[list[inspect.Parameter], Any] | None:
    """Parameters and result of a function of the modules API, None if it is only in the form of 0.0.78."""
    if name in OPERATIONS:
        own = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=x)
            for n, x in OWN_PARAMETERS.items()
        ]
        return [*modules_parameters(OPERATIONS[name]), *own], result_type(OPERATIONS[name])
    if name in COMPOSED:
        signature = inspect.signature(COMPOSED[name])
        return list(signature.parameters.values()), signature.return_annotation
    return None


def functions_of_lax(write: Writer, name: str) -> str:
    """The signature of an operation in the lax API."""
    signature = inspect.signature(getattr(lax, name))
    says = getattr(lax, name).__doc__.partition("\n")[0]
    return write.function(name, signature.parameters.values(), signature.return_annotation, says)


def functions_of_modules(write: Writer, name: str) -> str:
    """The signature in the modules API, or of each of its two forms, of which that of 0.0.78 has any result."""
    present, form, written = of_modules(name), FORMS.get(name), []
    if present is not None:
        says = f"`ejkernel.lax.{name}`, with a choice of platform and mesh."
        written.append(write.function(name, *present, says, overload=form is not None))
    if form is not None:
        signature = inspect.signature(getattr(modules, name)) if present is None else signature_of(name)
        parameters, says = signature.parameters.values(), "In the form of ejkernel 0.0.78."
        result = signature.return_annotation
        written.append(write.function(name, parameters, result, says, overload=present is not None))
    return "".join(written)


def imported(write: Writer, package: ModuleType, name: str) -> bool:
    """Whether a name is that of a class or of a function with a signature of its own, which the stub imports."""
    if name in OPERATIONS or (package is modules and name in FORMS):
        return False
    operation = f"ejkernel.modules.operations.{name}"
    module = operation if name in COMPOSED else getattr(package, name).__module__
    module = base.__name__ if hasattr(base, name) else module
    above = "." if package is modules else "..modules."
    write.name(above + module.removeprefix("ejkernel.modules."), f"{name} as {name}")
    return True


def stub(package: ModuleType) -> str:
    """The text of a stub, as ruff formats it."""
    write, functions = Writer(), {lax: functions_of_lax, modules: functions_of_modules}[package]
    body = [functions(write, name) for name in package.__all__ if not imported(write, package, name)]
    imports = [f"from {module} import {', '.join(sorted(names))}" for module, names in write.imports.items()]
    text = "\n".join(['"""Written by tests/stubs.py from the signatures of the functions."""', *imports, *body])
    for command in (["check", "--fix-only", "--select", "I"], ["format"]):
        text = _ruff([*command, "--stdin-filename", str(path_of(package)), "-"], text)
    return text


def path_of(package: ModuleType) -> Path:
    """The file of a package's stub."""
    return Path(package.__file__).with_suffix(".pyi")


def _ruff(arguments: list[str], text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the stubs; otherwise 1 if one is not up to date")
    write, outdated = parser.parse_args().write, False
    for package in (lax, modules):
        path, text = path_of(package), stub(package)
        if write:
            path.write_text(text, encoding="utf-8")
        outdated |= path.read_text(encoding="utf-8") != text
    return int(outdated)


if __name__ == "__main__":
    raise SystemExit(main())
