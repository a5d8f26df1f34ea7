"""Calls in the form of ejkernel 0.0.78, bound by the table of `_release_table.py`, as calls of the modules API.

There is no second implementation here: each function translates its arguments, and calls the operation of this library.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..errors import shown, type_error, value_error
from ..kernels._registry import kernel_registry
from ._argument_names import renaming
from ._release_table import FORMS, Form
from ._release_types import RESULTS, types_of
from ._signatures import annotations_of
from .operations.configs import BaseOperationConfig

Present = Callable[..., Any]
# The translation of each operation in the form of 0.0.78: (functions of the modules API, the call, specs by name).
TRANSLATIONS: dict[str, Callable[[Any, dict[str, Any], dict[str, Any]], Any]] = {}


def translates(translation: Callable[[Any, dict[str, Any], dict[str, Any]], Any]) -> Callable[..., Any]:
    """Registers a function that translates the calls of the operation that it is named after."""
    TRANSLATIONS[translation.__name__] = translation
    return translation


def release_function(name: str, made_of: Any) -> Callable[..., Any]:
    """An operation that exists only in the form of 0.0.78, composed of functions of the modules API."""
    form, translation = FORMS[name], TRANSLATIONS[name]

    def call(*args, **kwargs):
        given = bound(name, args, kwargs)
        return translation(made_of, given, specs_of(name, given))

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__signature__ = "ejkernel.modules", signature_of(name)
    call.__annotations__ = annotations_of(call.__signature__)
    call.__doc__ = f"{translation.__doc__.strip()}\n\n    {_said(form)}"
    kernel_registry.register_operation(name, call)
    return call


def either(present: Present, made_of: Any = None, **renamed: str) -> Present:
    """A function of the modules API that also takes calls in the form of 0.0.78.

    `renamed` are the names that `present` has for options of the modules API.
    """
    name = present.__name__
    form = FORMS[name]
    in_release_form = release_function(name, made_of or present)

    def call(*args, **kwargs):
        if is_in_release_form(name, args, kwargs):
            return in_release_form(*args, **kwargs)
        if twice := [n for n in kwargs if renamed.get(n) in kwargs]:
            raise type_error(name, f"{twice[0]} and {renamed[twice[0]]} are given, two names of one argument")
        with renaming({renamed[n]: n for n in kwargs if n in renamed}):
            return present(*args, **{renamed.get(n, n): x for n, x in kwargs.items()})

    signature = inspect.signature(present)
    more = [p for n, p in in_release_form.__signature__.parameters.items() if n not in signature.parameters]
    more = [_left_out(p).replace(kind=p.KEYWORD_ONLY) for p in more]
    call.__name__ = call.__qualname__ = name
    call.__module__ = "ejkernel.modules"
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])
    call.__annotations__ = annotations_of(call.__signature__)
    order = f"with the positional arguments {', '.join(form.arrays)}"
    told = TRANSLATIONS[name].__doc__.strip()
    call.__doc__ = f"{present.__doc__}\nIn the form of ejkernel 0.0.78, {order}: {told}\n\n{_said(form)}\n"
    kernel_registry.register_operation(name, call)
    return call


def _left_out(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter made optional, as calls that are not in the form of 0.0.78 do not have it."""
    if parameter.default is not inspect.Parameter.empty:
        return parameter
    return parameter.replace(default=None, annotation=parameter.annotation | None)


def signature_of(name: str) -> inspect.Signature:
    """The signature of calls of an operation in the form of 0.0.78."""
    form, types = FORMS[name], types_of(name)
    arrays = [
        inspect.Parameter(
            n,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if i < form.required else None,
            annotation=types[n] if i < form.required else types[n] | None,
        )
        for i, n in enumerate(form.arrays)
    ]
    options = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=x, annotation=_or_none(types[n], x))
        for n, x in form.keywords.items()
    ]
    return inspect.Signature([*arrays, *options], return_annotation=RESULTS.get(name, Any))


def _or_none(type_: Any, default: Any) -> Any:
    return type_ | None if default is None and type_ is not None else type_


def _said(form: Form) -> str:
    how = f"Taken, and chosen by the Executor: {', '.join(form.chosen_here)}. " if form.chosen_here else ""
    only = [f"{name} ({rule.reason})" for name, rule in form.only.items()]
    return f"{how}{'Refused where they ask for more: ' if only else ''}{'; '.join(only)}".strip()


def bound(operation: str, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults and None for absent arrays; raises for values that are refused."""
    form = FORMS[operation]
    if len(args) > len(form.arrays):
        raise type_error(operation, f"{len(args)} positional arguments are given; it takes {', '.join(form.arrays)}")
    call = dict(zip(form.arrays, args, strict=False))
    if twice := [name for name in kwargs if name in call]:
        raise type_error(operation, f"got multiple values for argument {twice[0]!r}")
    keywords = form.keywords
    if unknown := [name for name in kwargs if name not in keywords and name not in form.arrays]:
        raise type_error(operation, f"got an unexpected keyword argument {unknown[0]!r}")
    call = {**keywords, **dict.fromkeys(form.arrays), **call, **kwargs}
    if missing := [name for name in form.arrays[: form.required] if call[name] is None]:
        raise type_error(operation, f"missing a required argument: {missing[0]!r}")
    for name, rule in form.only.items():
        if not _allowed(rule.allows, call[name]):
            raise value_error(operation, f"{name} is {shown(call[name])}; {rule.reason}")
    return {name: x for name, x in call.items() if name not in form.only and name not in form.chosen_here}


def _allowed(allows, value) -> bool:
    try:
        return bool(allows(value))
    except (TypeError, ValueError):
        return False


def is_in_release_form(operation: str, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has names, configs, positional arguments or shapes that only the form of 0.0.78 has."""
    form = FORMS[operation]
    if not form.marks.isdisjoint(kwargs) or isinstance(kwargs.get("cfg"), BaseOperationConfig):
        return True
    if form.by_position is not None and len(args) > form.by_position:
        return True
    call = {**dict(zip(form.arrays, args, strict=False)), **kwargs}
    return (
        len(args) <= len(form.arrays)
        and all(call.get(n) is not None for n in form.arrays[: form.required])
        and (form.is_told_by(call))
    )


def arrays_of(call: Mapping[str, Any], *names: str) -> list[Any]:
    """The arrays of a call by these names; NumPy arrays become arrays of JAX."""
    return [x if isinstance(x, jax.Array | None) else jnp.asarray(x) for x in map(call.get, names)]


def specs_of(operation: str, call: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    """The `in_specs` of a call by name; a tuple is in the order of arrays, and None is replicated, or for no array."""
    given = call.get("in_specs")
    if given is None or isinstance(given, Mapping):
        return {} if given is None else dict(given)
    if isinstance(given, PartitionSpec) or not isinstance(given, tuple | list):
        raise type_error(operation, f"in_specs is {shown(given)}; it must be a mapping by name or a tuple")
    names = FORMS[operation].arrays
    if len(given) > len(names):
        raise value_error(
            operation, f"in_specs has {len(given)} specs; there are {len(names)} arrays: {', '.join(names)}"
        )
    found = dict(zip(names, given, strict=False))
    return {n: PartitionSpec() if spec is None else spec for n, spec in found.items() if call.get(n) is not None}


def entries_of(specs: Mapping[str, PartitionSpec], name: str, axes: int) -> tuple[Any, ...]:
    """The entries of a spec, padded to the number of axes."""
    spec = tuple(specs.get(name, ()))
    return spec + (None,) * (axes - len(spec))


def run(present: Present, call: Mapping[str, Any], arguments: Mapping[str, Any], specs: Mapping[str, Any]) -> Any:
    """Calls the operation of this library with the platform, config and mesh of the call.

    Its errors name the arrays as the call does.
    """
    with renaming(_renamed(call, arguments)):
        return _run(present, call, arguments, specs)


def _renamed(call: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The names of arrays in the call that have other names as arguments of the operation."""
    given = [id(x) for x in call.values()]
    names = {id(x): name for name, x in call.items() if hasattr(x, "shape") and given.count(id(x)) == 1}
    others = {name: names[id(x)] for name, x in arguments.items() if id(x) in names}
    return {name: of_call for name, of_call in others.items() if name not in call and of_call not in arguments}


def _run(present: Present, call: Mapping[str, Any], arguments: Mapping[str, Any], specs: Mapping[str, Any]) -> Any:
    platform, cfg = platform_and_config(present.__name__, call)
    given = {name: x for name, x in arguments.items() if x is not None}
    if call.get("mesh") is None:
        outside = {n: call[n] for n in ("in_specs", "out_specs") if call.get(n) is not None}
        return present(**given, platform=platform, cfg=cfg, **outside)
    out_specs = PartitionSpec() if call["out_specs"] is None else call["out_specs"]
    if isinstance(out_specs, list | tuple) and not isinstance(out_specs, PartitionSpec):
        out_specs = tuple(PartitionSpec() if spec is None else spec for spec in out_specs)
    # A mesh axis of size 1 may be in the spec of queries and not in that of pages: it splits nothing.
    specs = {name: _of_split_axes(specs[name], call["mesh"]) for name in given if name in specs}
    out_specs = jax.tree.map(
        lambda spec: _of_split_axes(spec, call["mesh"]), out_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return present(**given, platform=platform, cfg=cfg, mesh=call["mesh"], in_specs=specs, out_specs=out_specs)


def _of_split_axes(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """A spec without axes of size 1, which split nothing."""
    names = lambda entry: entry if isinstance(entry, tuple) else (entry,)
    split = lambda entry: tuple(n for n in names(entry) if n is not None and mesh.shape.get(n) != 1)
    return PartitionSpec(*(split(entry) or None for entry in spec))


def platform_and_config(operation: str, call: Mapping[str, Any]) -> tuple[Any, Any]:
    """The platform of a call, and its config: of a config of 0.0.78 the block sizes of forward and backward.

    A config without block sizes is None, which leaves them to the Executor.
    """
    platform, cfg = call.get("platform"), call.get("cfg")
    if not isinstance(cfg, BaseOperationConfig):
        return platform, cfg
    forward, backward = (getattr(cfg, name, None) for name in ("fwd_params", "bwd_params"))
    if forward is None and backward is not None:
        raise value_error(operation, "cfg has bwd_params but no fwd_params; give both, or neither")
    platform = cfg.platform if platform in (None, "auto") else platform
    return platform, forward if backward is None else (forward, backward)


def sinks_of_heads(aux: Any, heads: int, groups: int) -> Any:
    """[heads] or [heads, n] of `softmax_aux`.

    It is per head if its first axis has the number of heads, per key/value head if it has their number, and otherwise,
    with one axis, n sinks shared by all heads.
    """
    if aux is None:
        return None
    aux = jnp.asarray(aux)
    if aux.ndim == 1 and aux.shape[0] != heads:
        return jnp.broadcast_to(aux, (heads, aux.shape[0]))
    if aux.ndim == 2 and aux.shape[0] == groups != heads:
        return jnp.repeat(aux, heads // groups, axis=0)
    return aux
