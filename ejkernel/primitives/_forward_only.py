"""Operations without derivatives: one primitive with all other rules, whose derivatives raise and name an alternative.

These are the operations of serving, which read a cache and may write into it. A result that takes the place of an
operand (`in_place`) has its shape, dtype and sharding, and its buffer if the caller donates that: XLA then copies
nothing. If the operand is still needed, XLA copies it first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.interpreters import ad

from ._axes import Table
from ._factory import KernelPrimitive
from ._sharding import Layout


class ForwardOnly:
    """An operation of one primitive, whose jvp and transpose raise `NotImplementedError`.

    Args:
        name: the name of the operation.
        operands: a NamedTuple class of the operands.
        outputs: a NamedTuple class of the results.
        table: the axes of every operand and result.
        dtypes: (dtypes of the operands, spec) → dtypes of the results that are not in place.
        instead: what to do to get a derivative, as the second half of a sentence.
        layout: how axes fold and split.
        in_place: result → the operand whose buffer it takes.
    """

    differentiable: tuple[str, ...] = ()
    residuals: tuple[str, ...] = ()
    linear: tuple[tuple[str, ...], ...] = ()

    def __init__(
        self,
        name: str,
        operands: type,
        outputs: type,
        table: Table,
        dtypes: Callable[[Mapping[str, Any], Any], Mapping[str, Any]],
        *,
        instead: str,
        layout: Layout = Layout(),
        in_place: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.operands, self.outputs, self.instead = name, operands, outputs, instead
        self.in_place = dict(in_place or {})
        of = lambda named: operands(*map(named.get, operands._fields))
        self.forward = KernelPrimitive(
            name,
            table,
            layout,
            outputs._fields,
            like=self.in_place,
            dtypes=dtypes,
            operands=of,
            arguments=lambda named, results: (tuple(of(named)), {}),
        )
        self.primitives: Sequence[KernelPrimitive] = (self.forward,)
        ad.primitive_jvps[self.forward.primitive] = self._refuse
        ad.primitive_transposes[self.forward.primitive] = self._refuse

    def _refuse(self, *_: Any, **__: Any):
        raise NotImplementedError(f"{self.name} has no derivative; {self.instead}")
