"""The three primitives of a differentiable operation, and their rules of differentiation.

* `x`      operands → outputs, residuals among them;
* `x_jvp`  operands, residuals, tangents → tangents of the outputs, linear in the tangents;
* `x_bwd`  operands, residuals, cotangents → cotangents of the operands: the transpose of `x_jvp`.

The jvp of `x` binds `x` and `x_jvp`; the transpose of `x_jvp` binds `x_bwd`, as does that of `x` in operands in which
it is linear. So `grad` runs one forward and one backward kernel. `x_bwd` is linear in its cotangents, and its transpose
binds `x_jvp` again: the three are closed under transposition. The jvps of `x_jvp` and `x_bwd`, for Hessians and higher
derivatives, are those of their XLA implementations, which `lowering.register` adds, or of the functions that they stand
for.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from ._factory import COTANGENT, TANGENT, KernelPrimitive, NamedPrimitive
from ._sharding import Layout


class WiredTrio:
    """The rules of jvp and transposition of a forward, a tangent and a backward.

    The names of tangents and cotangents are those of the arrays with the suffixes `TANGENT` and `COTANGENT`.

    Args:
        name: the name of the operation.
        forward, tangent, backward: its primitives.
        residuals: the outputs that tangent and backward take; others are not stored for them.
        linear: groups of operands in which the forward is jointly linear, up to outputs that do not depend on them, as
            lse of attention on v. The forward has a transpose in each group: the backward, which needs neither the
            values of the group for their cotangents, nor the outputs that depend on these.
    """

    def __init__(
        self,
        name: str,
        forward: NamedPrimitive,
        tangent: NamedPrimitive,
        backward: NamedPrimitive,
        residuals: tuple[str, ...] = (),
        linear: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.name, self.residuals, self.linear = name, residuals, linear
        self.forward, self.tangent, self.backward = forward, tangent, backward
        self.primitives = (forward, tangent, backward)
        ad.primitive_jvps[forward.primitive] = self._jvp
        ad.primitive_transposes[forward.primitive] = self._transpose_forward
        ad.primitive_transposes[tangent.primitive] = self._transpose_tangent
        ad.primitive_transposes[backward.primitive] = self._transpose_backward

    def _has_tangent(self, operand: str) -> bool:
        """Whether the operation is differentiable by an operand."""
        return True

    def _jvp(self, primals, tangents, *, operands, results, spec, config, chooser):
        arrays = dict(zip(operands, primals, strict=True))
        out = self.forward.bind(arrays, spec=spec, config=config, chooser=chooser, results=results)
        out = {n: checkpoint_name(x, f"{self.name}_{n}") for n, x in out.items()}
        tangent_operands = {
            name + TANGENT: t
            for name, t in zip(operands, tangents, strict=True)
            if self._has_tangent(name) and type(t) is not ad.Zero
        }
        asked = [name + TANGENT for name, x in out.items() if jnp.issubdtype(x.dtype, jnp.inexact)]
        out_tangents = {}
        if tangent_operands and asked:
            kept = {name: out[name] for name in self.residuals}
            out_tangents = self._derived(self.tangent, {**arrays, **kept, **tangent_operands}, spec, chooser, asked)
        zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
        return list(out.values()), [out_tangents.get(name + TANGENT, zero(x)) for name, x in out.items()]

    def _transpose_tangent(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not all(n.endswith(TANGENT) for n in wanted):
            raise NotImplementedError(f"{self.tangent.name} is linear in its tangents alone, not in {wanted}")
        known = {n: x for n, x in named.items() if not n.endswith(TANGENT)}
        return self._pullback(cotangents, named, known, wanted, TANGENT, results, spec, chooser)

    def _transpose_backward(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not all(n.endswith(COTANGENT) for n in wanted):
            raise NotImplementedError(f"{self.backward.name} is linear in its cotangents alone, not in {wanted}")
        cotangent_tangents = {
            r.removesuffix(COTANGENT) + TANGENT: ct
            for r, ct in zip(results, cotangents, strict=True)
            if type(ct) is not ad.Zero
        }
        if not cotangent_tangents:
            return [ad.Zero(x.aval) if n in wanted else None for n, x in named.items()]
        named_tangent = {n: x for n, x in named.items() if not n.endswith(COTANGENT)} | cotangent_tangents
        asked = self.tangent.results or [n.removesuffix(COTANGENT) + TANGENT for n in wanted]
        out = self._derived(self.tangent, named_tangent, spec, chooser, asked)
        return [out[n.removesuffix(COTANGENT) + TANGENT] if n in wanted else None for n in named]

    def _transpose_forward(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not any(set(wanted) <= set(group) for group in self.linear):
            raise NotImplementedError(f"{self.name} is not linear in {' and '.join(wanted)}")
        known = {n: ad.instantiate_zeros(ad.Zero(x.aval)) if n in wanted else x for n, x in named.items()}
        if self.residuals:
            out = self.forward.bind(known, spec=spec, config=config, chooser=chooser, results=results)
            known |= {n: out[n] for n in self.residuals}
        return self._pullback(cotangents, named, known, wanted, "", results, spec, chooser)

    def _pullback(self, cotangents, named, known, wanted, suffix, results, spec, chooser):
        """The cotangents of the operands `wanted`, by the backward primitive; `suffix` ends the names of both."""
        cotangent_operands = {
            r.removesuffix(suffix) + COTANGENT: ct
            for r, ct in zip(results, cotangents, strict=True)
            if type(ct) is not ad.Zero
        }
        if not cotangent_operands:
            return [ad.Zero(x.aval) if n in wanted else None for n, x in named.items()]
        asked = [n.removesuffix(suffix) + COTANGENT for n in wanted]
        out = self._derived(self.backward, {**known, **cotangent_operands}, spec, chooser, asked)
        return [out[n.removesuffix(suffix) + COTANGENT] if n in wanted else None for n in named]

    @staticmethod
    def _derived(primitive, arrays, spec, chooser, results) -> dict[str, Any]:
        """Binds a tangent or backward with the config that `chooser` has for it, and returns its results by name."""
        config = chooser.config(primitive, arrays, spec, results)
        return primitive.bind(arrays, spec=spec, config=config, chooser=chooser, results=results)


class Trio(WiredTrio):
    """A differentiable operation with a table of axes.

    Args:
        name: the name of the operation.
        operands: a NamedTuple class of the operands.
        outputs: a NamedTuple class of the results of the forward.
        table: the axes of every operand and result.
        differentiable: the operands that have tangents.
        dtypes: (dtypes of the operands, spec) → dtypes of the outputs.
        layout: how axes fold and split.
        residuals: the outputs that tangent and backward take; all by default.
        linear: as in `WiredTrio`.
    """

    def __init__(
        self, name, operands, outputs, table, differentiable, dtypes, layout=Layout(), residuals=None, linear=()
    ) -> None:
        self.operands, self.outputs, self.differentiable = operands, outputs, tuple(differentiable)
        residuals = outputs._fields if residuals is None else tuple(residuals)
        dotted = {n + TANGENT: table[n] for n in (*self.differentiable, *outputs._fields)}
        barred = {n + COTANGENT: table[n] for n in (*self.differentiable, *outputs._fields)}
        of = lambda named: operands(*map(named.get, operands._fields))
        forward = KernelPrimitive(
            name, table, layout, outputs._fields, dtypes=dtypes, operands=of, arguments=self._forward_arguments
        )
        tangent = KernelPrimitive(
            name + "_jvp",
            {**table, **dotted},
            layout,
            [n + TANGENT for n in outputs._fields],
            like={n + TANGENT: n for n in residuals},
            dtypes=lambda of, spec: {n + TANGENT: dtype for n, dtype in dtypes(of, spec).items()},
            linear=TANGENT,
            operands=of,
            arguments=self._tangent_arguments,
        )
        backward = KernelPrimitive(
            name + "_bwd",
            {**table, **barred},
            layout,
            [n + COTANGENT for n in self.differentiable],
            like={n + COTANGENT: n for n in self.differentiable},
            linear=COTANGENT,
            operands=of,
            arguments=self._backward_arguments,
        )
        super().__init__(name, forward, tangent, backward, residuals, tuple(map(tuple, linear)))

    def _has_tangent(self, operand: str) -> bool:
        return operand in self.differentiable

    def _group(self, of: type, named: Mapping[str, Any], suffix: str = "") -> Any:
        return of(*(named.get(name + suffix) for name in of._fields))

    def _forward_arguments(self, named, results):
        return tuple(self._group(self.operands, named)), {}

    def _tangent_arguments(self, named, results):
        primals, outputs = self._group(self.operands, named), self._group(self.outputs, named)
        return (primals, outputs, self._group(self.operands, named, TANGENT)), {}

    def _backward_arguments(self, named, results):
        primals, outputs = self._group(self.operands, named), self._group(self.outputs, named)
        wrt = tuple(name.removesuffix(COTANGENT) for name in results)
        return (primals, outputs, self._group(self.outputs, named, COTANGENT)), {"wrt": wrt}
