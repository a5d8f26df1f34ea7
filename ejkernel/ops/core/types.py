"""The type variables of the framework, and what it requires of a config."""

from typing import TypeVar

from ejkernel.errors import a_type, type_error

Cfg = TypeVar("Cfg")
"""A kernel's config: a frozen dataclass."""

Out = TypeVar("Out")
"""What a kernel returns: an array or a tree of arrays."""


def hashable(kernel: str, config: Cfg) -> Cfg:
    """The config, which is compared with others and becomes a parameter of a primitive.

    Raises:
        TypeError: it is not hashable.
    """
    try:
        hash(config)
    except TypeError as error:
        rule = "a config has to be a frozen dataclass of hashable fields"
        raise type_error(kernel, f"config is {a_type(config)}, which is not hashable ({error}); {rule}") from error
    return config
