"""One call of an operation under transforms, as plain data whose repr is a Python expression for it."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import operations
from .values import numbers

LIKE_CALL = "call"  # stands for the dtype of the call


@dataclass(frozen=True)
class Call:
    """A call of `ejkernel.lax.<operation>` or of the modules API.

    Attributes:
        operation: the name of the operation.
        sizes: the size of every letter.
        operands: the axes of each array by name, letters and numbers as in "b s 4".
        options: the static arguments under the names of the lax API.
        dtype: the dtype of float operands, with exceptions in `dtypes`.
        derivative: one of `transforms.DERIVATIVES`.
        wrt: the operands with respect to which it is taken.
        maps: for each `jax.vmap`, the inner one first, which operands are mapped and along which axis (0, 1 or −1);
            "cotangents" and "tangents" may be among them, along 0.
        outside: whether the derivative is taken of the mapped function, rather than mapped itself.
        within: one of `transforms.WITHIN`.
        jit: whether all of it is under `jax.jit`.
        mesh: ("auto", "explicit" or "shard_map", letter → axis of the mesh).
        api: "lax" or "modules".
        platform: the platform forced by the modules API.
        x64: whether JAX is in its 64-bit mode.
        values: the family of numbers, of `values.FAMILIES`.
        infinite: whether biases, sinks and decays have some −∞.
        poison: whether unread entries are NaN.
        seed: the seed of all values.
    """

    operation: str
    sizes: Mapping[str, int]
    operands: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    derivative: str = "none"
    wrt: tuple[str, ...] = ()
    maps: tuple[Mapping[str, int], ...] = ()
    outside: bool = False
    within: str = ""
    jit: bool = False
    mesh: tuple | None = None
    api: str = "lax"
    platform: str | None = None
    x64: bool = False
    values: str = "normal"
    infinite: bool = False
    poison: bool = False
    seed: int = 0

    @property
    def module(self) -> ModuleType:
        return operations.BY_NAME[self.operation]

    @property
    def program(self) -> "Call":
        """A key of the compiled program: the call without its values."""
        return replace(self, values="normal", infinite=False, poison=False, seed=0)

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != _default(f)
        ]
        return f"Call({', '.join([repr(self.operation), *given])})"

    @property
    def snippet(self) -> str:
        """Python code that runs it again, at the root of the repository."""
        return (
            "import tests.conftest  # eight CPU devices\n"
            "from tests.fuzz.calls import Call\n"
            "from tests.fuzz.checks import check\n"
            f"check({self!r})"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand, in one example."""
        return tuple(int(a) if a.isdigit() else self.sizes[a] for a in self.operands[name].split())

    def type(self, name: str) -> np.dtype:
        """The dtype of a float operand."""
        given = self.dtypes.get(name, self.module.DTYPES.get(name, LIKE_CALL))
        return jnp.dtype(self.dtype if given == LIKE_CALL else given)

    def examples(self) -> np.ndarray:
        """The indices of the examples of all maps, outer ones first: an array of that shape of tuples, inner first."""
        sizes = [COUNTS[i] for i in range(len(self.maps))]
        found = np.empty(sizes[::-1], object)
        for index in np.ndindex(*found.shape):
            found[index] = index[::-1]
        return found

    def arrays(self, example: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
        """The operands of one example as NumPy arrays in their dtypes, without poison."""
        return {name: self._made(name, self._index(name, example)) for name in self.operands}

    def unread(self, what: str) -> dict[Any, dict[tuple[int, ...], np.ndarray]]:
        """Where the "operands", "cotangents" or "tangents" are not read: by name, and by the index of examples that
        share an array.
        """
        where: dict[Any, dict[tuple, np.ndarray]] = {}
        for example in self.examples().ravel():
            x = self.arrays(example)
            if what == "cotangents":
                found = dict(enumerate(getattr(self.module, "unheard", lambda call, x: ())(self, x)))
            else:
                found = self.module.hidden(self, x)
            for name, unread in found.items():
                index = self._index(name if what == "operands" else what, example, name)
                of = where.setdefault(name, {})
                of[index] = of.get(index, True) & unread
        return where

    def batch(self) -> dict[str, np.ndarray]:
        """The operands with the axes of all maps, with NaN in unread entries if the call says so."""
        unread = self.unread("operands") if self.poison else {}
        value = lambda name, index: _poisoned(self._made(name, index), unread.get(name, {}).get(index))
        return {name: self._stacked(name, partial(value, name)) for name in self.operands}

    def directions(
        self, what: str, like: Mapping[str, Any], example: tuple[int, ...] | None = None, poison: bool = False
    ) -> Any:
        """Normal values of these shapes and dtypes: the "cotangents" or "tangents" of an example, or of all."""
        if example is not None:
            return {n: self._normal(what, n, like[n], self._index(what, example, n)) for n in like}
        unread = self.unread(what) if poison else {}
        value = lambda n, index: _poisoned(self._normal(what, n, like[n], index), unread.get(n, {}).get(index))
        return {n: self._stacked(what, partial(value, n), n) for n in like}

    def is_mapped(self, name: str, level: int, operand: str | None = None) -> bool:
        """Whether an operand or direction has an axis of this map. With a derivative outside, all results have one."""
        if self.outside and name == "cotangents":
            return True
        if self.outside and name == "tangents":
            name = operand
        return name in self.maps[level]

    def _index(self, name: str, example: tuple[int, ...], operand: str | None = None) -> tuple[int, ...]:
        return tuple(i if self.is_mapped(name, level, operand) else 0 for level, i in enumerate(example))

    def _stacked(self, name: str, value, operand: str | None = None) -> np.ndarray:
        def of(level, index):
            if level < 0:
                return value(index)
            if not self.is_mapped(name, level, operand):
                return of(level - 1, (0, *index))
            parts = [of(level - 1, (i, *index)) for i in range(COUNTS[level])]
            return np.stack(parts, 0 if self.outside and name == "cotangents" else self.axis(name, level, operand))

        return of(len(self.maps) - 1, ())

    def axis(self, name: str, level: int, operand: str | None = None) -> int:
        """The axis along which an operand or direction is mapped."""
        key = operand if self.outside and name == "tangents" else name
        return self.maps[level].get(key, 0)

    def _rng(self, *words: Any) -> np.random.Generator:
        return np.random.default_rng([self.seed, *(zlib.crc32(w.encode()) if isinstance(w, str) else w for w in words)])

    def _made(self, name: str, index: tuple[int, ...]) -> np.ndarray:
        rng, shape = self._rng(name, *index), self.shape(name)
        x = self.module.values(self, name, rng, shape)
        x = numbers(self.values, rng, shape, self.type(name)) if x is None else np.asarray(x)
        is_float = x.dtype == np.float64
        return x.astype(self.type(name)) if is_float else x.astype(self.dtypes[name]) if name in self.dtypes else x

    def _normal(self, what: str, name: str, like: Any, index: tuple[int, ...]) -> np.ndarray:
        return self._rng(what, name, *index).standard_normal(like.shape).astype(like.dtype)


COUNTS = (2, 3)
"""How many examples each map has, the inner one first."""


def _poisoned(x: np.ndarray, unread: np.ndarray | None) -> np.ndarray:
    """x with NaN where it is not read."""
    is_float = unread is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return np.where(unread, np.asarray(np.nan, x.dtype), x) if is_float else x


def _default(f: Any) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default
