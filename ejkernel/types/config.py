"""Configs: frozen, hashable choices of how an operation is computed, which never change what it computes."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import a_type, shown, type_error, value_error
from ._repr import ShortRepr
from .enums import Backend, Platform

LARGEST_SIZE = 2**31 - 1
# Metadata of an int field that is not a size, and may be 0 or negative.
_ANY_INT = {"any int": True}


@dataclass(frozen=True, repr=False, kw_only=True)
class OperationConfig(ShortRepr):
    """The fields that all configs have.

    An operation whose kernels have other parameters defines its own class:

        @dataclass(frozen=True, repr=False)
        class PageConfig(OperationConfig):
            pages_per_block: int = 8

    Its integers are sizes, and must be positive; its strings may be None.

    A config that was chosen for a target names the implementation platform and the backend it was chosen for. A config
    given by a user may leave both open ("auto", "any"): the dispatcher then picks the implementation by priority.

    Attributes:
        platform: "triton", "pallas", "cuda", "cute", "xla" or "auto".
        backend: "gpu", "tpu", "cpu" or "any".
        from_kernel_config: for each field of the class the one of a `KernelConfig` that it is taken from, where the
            operation takes a `KernelConfig` too; empty where it does not.
    """

    from_kernel_config: ClassVar[Mapping[str, str]] = {}
    platform: Platform | str = "auto"
    backend: Backend | str = Backend.ANY


@dataclass(frozen=True, repr=False)
class KernelConfig(OperationConfig):
    """Block sizes and launch parameters of one call, for operations whose kernels compute tiles.

    Attributes:
        block_q: query block size (rows of a tile).
        block_k: key/value block size (columns of a tile).
        block_d: block size along the feature dimension, where an operation tiles it.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
        algorithm: a variant of the algorithm, where several exist.
        priority: configs of a higher priority are measured first.
    """

    block_q: int = 128
    block_k: int = 128
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 2
    algorithm: str | None = None
    priority: int = field(default=0, metadata=_ANY_INT)


@dataclass(frozen=True)
class FwdParams:
    """Launch parameters of a forward attention kernel: a short form of its `KernelConfig`."""

    q_blocksize: int = 128
    kv_blocksize: int = 128
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class BwdParams:
    """Launch parameters of a backward attention kernel, given beside those of its forward: `(forward, backward)`."""

    q_blocksize: int = 64
    kv_blocksize: int = 64
    num_warps: int = 4
    num_stages: int = 2


def checked_config(
    operation: str,
    config: Any,
    of: type[OperationConfig] = KernelConfig,
    short: type[FwdParams | BwdParams] = FwdParams,
) -> OperationConfig:
    """The config, checked to be of the class `of`, with its fields as plain Python values.

    Of a `KernelConfig` there is a short form for a forward, and one for a backward; `short` is the one that is taken. A
    class that has `from_kernel_config` is made of a `KernelConfig`, too.

    Raises:
        TypeError, ValueError: a field has an invalid value; the message names the operation, the field and the rule.
    """
    if of is KernelConfig and isinstance(config, FwdParams | BwdParams):
        if not isinstance(config, short):
            where = "the backward of a pair (forward, backward)" if short is FwdParams else "the forward"
            raise type_error(operation, f"config is {a_type(config)}, which configures {where} alone")
        config = KernelConfig(config.q_blocksize, config.kv_blocksize, 64, config.num_warps, config.num_stages)
    if isinstance(config, KernelConfig) and of.from_kernel_config:
        config = _from_kernel_config(operation, config, of)
    if not isinstance(config, of):
        raise type_error(operation, f"config is {a_type(config)}; it must be a {of.__name__}")
    plain = {field.name: _checked_field(operation, field, getattr(config, field.name)) for field in fields(config)}
    unlike = {name: x for name, x in plain.items() if type(getattr(config, name)) is not type(x)}
    return replace(config, **unlike) if unlike else config


def _from_kernel_config(operation: str, config: KernelConfig, of: type[OperationConfig]) -> OperationConfig:
    """The config of the operation's own class that says what a `KernelConfig` says, whose fields are checked first."""
    config = checked_config(operation, config)
    if config.algorithm is not None and "algorithm" not in of.from_kernel_config:
        raise value_error(operation, f"config.algorithm is {shown(config.algorithm)}; it must be None")
    same = {field.name: getattr(config, field.name) for field in fields(OperationConfig)}
    return of(**same, **{own: getattr(config, name) for own, name in of.from_kernel_config.items()})


def _checked_field(operation: str, field: Field, value: Any) -> Any:
    if field.name == "platform":
        return _one_of(operation, "platform", value, ("auto", *Platform))
    if field.name == "backend":
        return _one_of(operation, "backend", value, tuple(Backend))
    if field.type is int and field.metadata != _ANY_INT:
        return _checked_size(operation, field.name, value)
    if field.type is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise type_error(operation, f"config.{field.name} is {shown(value)}; it must be an int")
    if field.type == (str | None) and not isinstance(value, str | None):
        raise type_error(operation, f"config.{field.name} is {shown(value)}; it must be a str or None")
    return value


def _checked_size(operation: str, name: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise type_error(operation, f"config.{name} is {shown(size)}; it must be a positive int")
    if not 1 <= size <= LARGEST_SIZE:
        raise value_error(operation, f"config.{name} is {shown(size)}; it must be a positive int of 32 bits")
    return int(size)


def _one_of(operation: str, name: str, found: Any, known: tuple[str, ...]) -> str:
    """Raises unless a value is one of the known ones; None leaves the choice open, as the defaults do."""
    if found is None:
        return {"platform": "auto", "backend": Backend.ANY}[name]
    if not isinstance(found, str) or found not in known:
        raise value_error(operation, f"{name} {shown(found)} is unknown; known are {', '.join(known)}")
    return found
