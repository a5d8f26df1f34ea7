"""The names of arguments: those of the modules API, those of the lax API, and those that error messages use."""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UnsupportedError, type_error
from ..ops import Kernel


def lax_arguments(operation: type[Kernel], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their names in the modules API replaced by those in the lax API."""
    try:
        bound = _signature(operation).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise type_error(operation.algorithm.name, str(error)) from None
    back = {new: old for old, new in operation.renamed.items()}
    return operation.convert({back.get(name, name): x for name, x in bound.items()})


def modules_names(operation: type[Kernel]) -> contextlib.AbstractContextManager[None]:
    """A context in which error messages name arguments as the modules API does."""
    return renaming(operation.renamed)


@contextlib.contextmanager
def renaming(renamed: Mapping[str, str]) -> Iterator[None]:
    """A context in which error messages name an argument by its value in the mapping."""
    try:
        yield
    except (TypeError, ValueError, UnsupportedError) as error:
        names = _stems(renamed) | dict(renamed)
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error)) if names else str(error)
        if text == str(error) or type(error) not in (TypeError, ValueError, UnsupportedError):
            raise
        raise type(error)(text) from error.__cause__


def _stems(renamed: Mapping[str, str]) -> dict[str, str]:
    """What messages call two arguments together: cu_seqlens for cu_seqlens_q and cu_seqlens_k."""
    return {old[:-2]: new[:-2] for old, new in renamed.items() if old[-2:] == new[-2:] and old[-2:] in ("_q", "_k")}


@functools.cache
def _signature(operation: type[Kernel]) -> inspect.Signature:
    return inspect.Signature(modules_parameters(operation))


@functools.cache
def modules_parameters(operation: type[Kernel]) -> tuple[inspect.Parameter, ...]:
    """The parameters of the lax API under their names in the modules API."""
    of = inspect.signature(operation.prepare_arguments).parameters.items()
    return tuple(
        parameter.replace(
            name=operation.renamed.get(name, name), annotation=operation.retyped.get(name, parameter.annotation)
        )
        for name, parameter in of
    )
