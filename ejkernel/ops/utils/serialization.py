"""Configs as JSON and back.

They are frozen dataclasses of numbers, strings, enums, dtypes, tuples, and further such dataclasses.

`to_json` and `from_json` are for readers that know the class. `pack` and `unpack` include the name of the class, for
files and labels with configs of many classes. A name is looked up only among classes that this process has packed or
imported: reading imports nothing, and runs only the constructor of a frozen dataclass.
"""

import dataclasses
import json
import sys
import types
import typing
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

T = TypeVar("T")


def to_json(value: Any) -> str:
    """JSON of a config, its fields in the order of their declaration.

    Raises:
        TypeError: it holds something that has no JSON.
    """
    return json.dumps(value, default=_plain)


def from_json(text: str, cls: type[T]) -> T:
    """The config of class `cls` that `to_json` wrote.

    Raises:
        ValueError: the text is not JSON, or has fields or values that `cls` does not take.
    """
    return _decode(json.loads(text), cls)


def stable_json(value: Any) -> str:
    """JSON for cache keys: the same text for the same value in every process, keys sorted, functions by their name.

    Raises:
        TypeError: it holds something that has no JSON.
    """
    return json.dumps(value, default=_plain_or_name, sort_keys=True, separators=(",", ":"))


# --- With the name of the class

_packed_classes: WeakValueDictionary[str, type] = WeakValueDictionary()


def class_name(cls: type) -> str:
    """`module:qualified name`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_packable(config: Any) -> bool:
    """Whether this is a frozen dataclass."""
    return dataclasses.is_dataclass(type(config)) and type(config).__dataclass_params__.frozen


def pack(config: Any) -> dict[str, Any]:
    """`{"class": "module:name", "config": {…}}`, ready for JSON.

    Raises:
        TypeError: it is not a frozen dataclass, or holds something that has no JSON.
    """
    cls = type(config)
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a config has to be a dataclass to be stored, and {config!r} is not")
    if not is_packable(config):
        raise TypeError(f"a config has to be a frozen dataclass to be stored, and {cls.__name__} is not frozen")
    _packed_classes[class_name(cls)] = cls
    return {"class": class_name(cls), "config": json.loads(to_json(config))}


def unpack(packed: Any, cls: type | None = None) -> Any:
    """The config that was packed; None if its class is not known to this process, or is not `cls`.

    Raises:
        ValueError: it is not a packed config, or has fields or values that the class does not accept.
    """
    if not isinstance(packed, dict) or not isinstance(packed.get("class"), str) or "config" not in packed:
        raise ValueError(f"not a stored config: {packed!r:.80}")
    if cls is not None:
        return _decode(packed["config"], cls) if packed["class"] == class_name(cls) else None
    known = _known_class(packed["class"])
    return None if known is None else _decode(packed["config"], known)


def _known_class(name: str) -> type | None:
    """The frozen dataclass of that name, or None: constructors of other classes could do anything."""
    found = _packed_classes.get(name) or class_named(name)
    frozen = found is not None and dataclasses.is_dataclass(found) and found.__dataclass_params__.frozen
    return found if frozen else None


def class_named(name: str) -> type | None:
    """The class of that `class_name`, if this process has imported it."""
    module, _, qualified = name.partition(":")
    found = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    return found if isinstance(found, type) else None


# --- To JSON


def _plain(value: Any) -> Any:
    """The JSON representation of a value of another type."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return {"$dtype": np.dtype(value).name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value, key=stable_json)
    raise TypeError(f"{value!r} of {type(value).__name__} has no JSON")


def _plain_or_name(value: Any) -> Any:
    named = callable(value) and hasattr(value, "__qualname__") and not hasattr(value, "dtype")
    return f"{value.__module__}.{value.__qualname__}" if named else _plain(value)


# --- From JSON


def _decode(value: Any, annotation: Any) -> Any:
    """A JSON value converted to the annotation of its field."""
    origin, parameters = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(value, dict) and value.keys() == {"$dtype"}:
        return _dtype(value["$dtype"])
    if dataclasses.is_dataclass(annotation):
        return _decode_dataclass(value, annotation)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(value, parameters)
    expected = origin or annotation
    if isinstance(value, list) and (not isinstance(expected, type) or _is_made_of_items(expected)):
        # Configs are hashable, so a sequence is a tuple unless its annotation says otherwise.
        collection = expected if expected in (list, set, frozenset) else tuple
        fixed = origin is tuple and ... not in parameters
        items = parameters if fixed else (*parameters[:1], Any)[:1] * len(value)
        return collection(_decode(item, of) for item, of in zip(value, items, strict=True))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(value)
    if annotation is float and isinstance(value, int):
        return float(value)
    if isinstance(expected, type) and expected is not Any and not isinstance(value, expected):
        raise ValueError(f"{value!r} is no {expected.__name__}")
    return value


def _is_made_of_items(annotation: type) -> bool:
    """Whether a field of this type may have a collection that is an array in JSON."""
    return annotation is Any or any(issubclass(of, annotation) for of in (tuple, list, set, frozenset))


def _dtype(name: Any) -> np.dtype:
    try:
        return np.dtype(str(name))
    except Exception as error:  # of many kinds, if NumPy takes it for the description of a structured dtype
        raise ValueError(f"{name!r:.40} is no dtype") from error


def _decode_dataclass(value: Any, cls: type[T]) -> T:
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(value, dict) or not value.keys() <= names:
        raise ValueError(f"not the fields of {cls.__name__}: {value!r:.80}")
    try:
        annotations = typing.get_type_hints(cls)
    except NameError:  # annotations written as strings, with names local to a function
        annotations = dict.fromkeys(names, Any)
    try:
        return cls(**{name: _decode(item, annotations[name]) for name, item in value.items()})
    except TypeError as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


def _decode_union(value: Any, members: tuple) -> Any:
    if type(value) in members and isinstance(value, int):  # 1 is no float where it may be an int
        return value
    for member in members:
        try:
            return _decode(value, member)
        except ValueError:
            pass
    raise ValueError(f"{value!r} is none of {members}")
