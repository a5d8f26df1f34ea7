"""Errors of implementations during lowering, reported with the implementation, versions, and how to use another one.

An implementation may fail when it is traced, or later: Triton and Mosaic compile kernels when the program is lowered.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ejkernel.errors import EjkernelRuntimeError, UnsupportedError
from ejkernel.kernels._dispatch import Candidate
from ejkernel.kernels._registry import KernelSpec
from ejkernel.types import Target

# While an implementation is traced, these may be errors of the call, e.g. of a size in a given config.
_OF_THE_CALL = (ValueError, TypeError, NotImplementedError)


@dataclass(eq=False)  # each is itself: it is a parameter of a primitive below
class Progress:
    """The progress of the lowering of an operation.

    Attributes:
        operation: the name of the primitive.
        target: what it is lowered for.
        entry: the implementation, once it is chosen.
        list_candidates: asks each implementation whether it supports the call, which may import further packages.
        is_traced: whether the implementation has been traced, and its program is being lowered.
    """

    operation: str
    target: Target
    entry: KernelSpec | None = None
    list_candidates: Callable[[], Sequence[Candidate]] = tuple
    is_traced: bool = False

    @contextlib.contextmanager
    def tracing(self, entry: KernelSpec, list_candidates: Callable[[], Sequence[Candidate]]) -> Iterator[None]:
        """A context in which `entry` is traced, which was chosen among those of `list_candidates`."""
        self.entry, self.list_candidates, self.is_traced = entry, list_candidates, False
        yield
        self.is_traced = True

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        """Raises an error of the implementation as an `EjkernelRuntimeError`, with the error as its cause."""
        try:
            yield
        except UnsupportedError:
            raise
        except Exception as error:
            by_registry = isinstance(error, EjkernelRuntimeError)
            is_named = by_registry and self.is_traced
            if self.entry is None or is_named or (not self.is_traced and isinstance(error, _OF_THE_CALL)):
                raise
            cause = (by_registry and error.__cause__) or error
            raise EjkernelRuntimeError(self._message(cause)) from cause

    def _message(self, error: BaseException) -> str:
        name, public = f"{self.entry.platform}/{self.entry.backend}", self.operation.removesuffix("_bwd")
        lines = [
            f"{self.operation}: {name} failed while it was lowered for {self.target}: {type(error).__name__}: {error}",
            f"versions: {_versions()}",
        ]
        public = public.removesuffix("_jvp")
        others = [
            other.platform for other, reason in self.list_candidates() if other is not self.entry and reason is None
        ]
        for other in others:
            lines.append(
                f"{other} takes this call too: ejkernel.lax.{public}(…, config={{'platform': '{other}'}}) "
                f"or ejkernel.modules.{public}(…, platform='{other}')"
            )
        return "\n".join(lines)


def _versions() -> str:
    """The versions of jax and jaxlib, and of Triton and jax-triton if they are loaded."""
    modules = {"jax": jax, "jaxlib": jaxlib}
    modules |= {"triton": sys.modules.get("triton"), "jax-triton": sys.modules.get("jax_triton")}
    found = {name: getattr(module, "__version__", None) for name, module in modules.items()}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


# --- Within a program that XLA partitions, which is lowered when XLA compiles it: there XLA raises its own error
# instead, with the same text.


def named_when_compiled(body: Callable[..., list[Any]], progress: Progress) -> Callable[..., list[Any]]:
    """`body` with failures of its lowering reported as above, even when XLA lowers it later."""

    def run(*arrays):
        program = jax.make_jaxpr(body)(*arrays)
        # As a function: JAX gives a primitive with a jaxpr among its parameters the properties of that jaxpr.
        traced = jaxpr_as_fun(program)
        return _named_p.bind(*arrays, traced=traced, results=tuple(program.out_avals), progress=progress)

    return run


def _lower_named(ctx, *args, traced, results, progress):
    with progress.failures_named():
        return mlir.lower_fun(traced, multiple_results=True)(ctx, *args)


_named_p = Primitive("ejkernel_named")
_named_p.multiple_results = True
_named_p.def_abstract_eval(lambda *avals, traced, results, progress: results)
mlir.register_lowering(_named_p, _lower_named)
