"""A conditional in which devices of a mesh take different branches, for programs of one platform.

It is a primitive, and not `jax.lax.switch` before it is lowered, for two reasons.

Reverse mode splits a `jax.lax.switch` into one of what does not depend on tangents, with the residuals of all branches
as its results, and one of the rest. A GPU would wait for the host twice, and copy the residuals, even where these are
operands themselves. A primitive is not split: its residuals are its operands, and its transpose is one conditional.

A program that is lowered for several platforms has a conditional on the platform around each kernel. XLA removes the
branches of other platforms, except inside another conditional, where the platform index is an operand: there it
compiles the kernels of all platforms, and fails when the program is loaded (seen on jax 0.11.2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla

from ..errors import UnsupportedError


def device_switch(operation: str, index: Array, branches: Sequence[Callable], *operands: Any) -> Any:
    """`jax.lax.switch` of an index that differs between devices, refused in a program for several platforms.

    What a derivative needs of a branch, it computes again from the operands.
    """
    flat, structure = jax.tree.flatten(operands)
    of_results = []

    def on_flat(branch, *flat):
        results, of_branch = jax.tree.flatten(branch(*structure.unflatten(flat)))
        of_results.append(of_branch)
        return results

    traced = _traced([partial(on_flat, branch) for branch in branches], flat)
    return of_results[0].unflatten(switch_p.bind(index, *flat, branches=traced, operation=operation))


def _traced(branches: Sequence[Callable], operands: Sequence[Any]) -> tuple[ClosedJaxpr, ...]:
    return tuple(jax.make_jaxpr(branch)(*map(jax.typeof, operands)) for branch in branches)


def _again(branches: Sequence[Callable], index: Array, operands: Sequence[Any], operation: str) -> list[Any]:
    return switch_p.bind(index, *operands, branches=_traced(branches, operands), operation=operation)


# --- Rules -----------------------------------------------------------------------------------------------------------


def _jvp(primals, tangents, *, branches, operation):
    index, *operands = primals
    differentiated = [i for i, t in enumerate(tangents[1:]) if type(t) is not ad.Zero]

    def tangent(branch, *arrays):
        along, count = [arrays[i] for i in differentiated], len(operands)
        of_differentiated = lambda *inputs: jaxpr_as_fun(branch)(*_with(arrays[:count], differentiated, inputs))
        return jax.jvp(of_differentiated, along, list(arrays[count:]))[1]

    out = switch_p.bind(*primals, branches=branches, operation=operation)
    nonzero_tangents = [tangents[1 + i] for i in differentiated]
    return out, _again(
        [partial(tangent, branch) for branch in branches], index, [*operands, *nonzero_tangents], operation
    )


def _transpose(cotangents, index, *operands, branches, operation):
    wanted = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    known = [x for i, x in enumerate(operands) if i not in wanted]
    if not given:
        return [None, *(ad.Zero(x.aval) if i in wanted else None for i, x in enumerate(operands))]

    def transposed(branch, *arrays):
        rest = iter(arrays[: len(known)])
        others = [None if i in wanted else next(rest) for i in range(len(operands))]

        def of_wanted(*inputs):
            results = jaxpr_as_fun(branch)(*_with(others, wanted, inputs))
            return [results[i] for i in given]

        return jax.linear_transpose(of_wanted, *(operands[i].aval for i in wanted))(list(arrays[len(known) :]))

    given_cotangents = [cotangents[i] for i in given]
    found = _again([partial(transposed, branch) for branch in branches], index, [*known, *given_cotangents], operation)
    found = dict(zip(wanted, found, strict=True))
    return [None, *(found.get(i) for i in range(len(operands)))]


def _batch(args, dims, *, branches, operation):
    (index, *operands), (of_index, *axes) = args, dims
    if of_index is not None:
        raise NotImplementedError(
            f"{operation}: its devices take different branches, and the axis is one of jax.vmap, which would take all; "
            "call it inside jax.shard_map over an axis of a mesh"
        )
    mapped = [jax.vmap(jaxpr_as_fun(branch), axes) for branch in branches]
    out = _again(mapped, index, operands, operation)
    return out, [0] * len(out)


def _with(arrays: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, x) for i, x in enumerate(arrays)]


def _switch(index: Array, *operands: Any, branches: Sequence[ClosedJaxpr], operation: str) -> list[Any]:
    del operation
    return lax.switch(index, [jaxpr_as_fun(branch) for branch in branches], *operands)


def _lower(ctx, *args, branches, operation):
    platforms = ctx.platforms or ctx.module_context.platforms
    if len(platforms) > 1:
        raise UnsupportedError(
            f"{operation}: its devices take different branches, and XLA would compile the kernels of all platforms "
            f"({', '.join(platforms)}) for each of them; export it for one platform at a time"
        )
    return mlir.lower_fun(_switch, multiple_results=True)(ctx, *args, branches=branches, operation=operation)


switch_p = Primitive("device_switch")
switch_p.multiple_results = True
switch_p.def_impl(partial(xla.apply_primitive, switch_p))
switch_p.def_abstract_eval(lambda index, *operands, branches, operation: branches[0].out_avals)
ad.primitive_jvps[switch_p] = _jvp
ad.primitive_transposes[switch_p] = _transpose
batching.primitive_batchers[switch_p] = _batch
mlir.register_lowering(switch_p, _lower)
