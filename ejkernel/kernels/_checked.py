"""The checks around every registered implementation: of its keywords, of its config, and of failures below it."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from ejkernel.errors import EjkernelRuntimeError
from ejkernel.types import KernelConfig, OperationConfig, Platform, checked_config

F = TypeVar("F", bound=Callable)


def checked(implementation: F, algorithm: str, platform: Platform) -> F:
    """The implementation behind the checks that `KernelRegistry.register` documents."""

    @functools.cache  # read at the first call: of all implementations that is a good part of an import's time
    def parameters() -> Mapping[str, inspect.Parameter]:
        return inspect.signature(implementation).parameters

    @functools.cache
    def accepted() -> frozenset[str]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return frozenset(name for name, p in parameters().items() if p.kind in kinds)

    @functools.cache
    def default() -> OperationConfig:
        found = getattr(parameters().get("config"), "default", None)
        return found if isinstance(found, OperationConfig) else KernelConfig()

    @functools.wraps(implementation)
    def behind_checks(*args, **kwargs):
        if not kwargs.keys() <= accepted() and not any(p.kind is p.VAR_KEYWORD for p in parameters().values()):
            unknown, known = ", ".join(sorted(kwargs.keys() - accepted())), ", ".join(sorted(accepted()))
            raise TypeError(f"{algorithm} ({platform}): unsupported argument {unknown}; accepted are {known}")
        if isinstance(config := kwargs.get("config"), OperationConfig):
            of = type(default() if isinstance(config, KernelConfig) else config)
            kwargs["config"] = config = checked_config(f"{algorithm} ({platform})", config, of)
            if wrong := config_refusal(implementation, config):
                raise ValueError(f"{algorithm} ({platform}): {wrong}")
        try:
            if _promotes():
                return implementation(*args, **kwargs)
            # A user may forbid implicit promotion in his own code; an implementation is not part of it.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return implementation(*args, **kwargs)
        except Exception as error:
            if not _failed_below(error):
                raise
            raise EjkernelRuntimeError(f"{algorithm} ({platform}): {type(error).__name__}: {error}") from error

    if not hasattr(behind_checks, "supports"):
        behind_checks.supports = _supports_everything
    if not hasattr(behind_checks, "custom_calls"):
        behind_checks.custom_calls = ()
    if not hasattr(behind_checks, "heuristic"):
        behind_checks.heuristic, behind_checks.space = (lambda *_: default()), (lambda *_: [default()])
    return behind_checks


def _promotes() -> bool:
    """Whether JAX promotes dtypes and ranks here as it does by default."""
    config = jax.config
    return config.jax_numpy_dtype_promotion == "standard" and config.jax_numpy_rank_promotion == "allow"


def config_refusal(implementation: Callable, config: OperationConfig, operands: Any = None) -> str | None:
    """Why an implementation cannot be run with a config whose fields make sense (on the operands), or None."""
    algorithm = getattr(config, "algorithm", None)
    variants = (None, *implementation.variants) if hasattr(implementation, "variants") else (algorithm,)
    if algorithm not in variants:
        known = ", ".join(map(repr, variants))
        return f"config.algorithm is {algorithm!r}; it must be one of {known}"
    wrong = implementation.refuses(config) if hasattr(implementation, "refuses") else None
    if wrong is None and operands is not None and hasattr(implementation, "excess"):
        return implementation.excess(operands, config)
    return wrong


def _supports_everything(spec, operands, target) -> None:
    return None


def _failed_below(error: Exception) -> bool:
    """Is this a failure of XLA, Triton or MLIR? The latter two are looked up where loaded, never imported for this."""
    below = [jax.errors.JaxRuntimeError]
    for module, name in (("triton.errors", "TritonError"), ("jaxlib.mlir._mlir_libs._mlir.ir", "MLIRError")):
        below.append(getattr(sys.modules.get(module), name, jax.errors.JaxRuntimeError))
    return isinstance(error, tuple(below))
