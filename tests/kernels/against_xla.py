"""Compares the three implementations of an operation on one platform with those in plain JAX."""

import jax
import jax.numpy as jnp
from cases import assert_close

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS


def prepared(case, dtype=jnp.float32):
    """Operands, spec, and a tangent for each differentiable operand."""
    call = OPERATIONS[case.operation].prepare_arguments(**case.arrays(dtype=dtype), **case.options)
    x = case.algorithm.operands(**call.named)
    moving = {n: _like(a, 1) for n, a in call.named.items() if n in case.algorithm.differentiable and _is_float(a)}
    return x, call.spec, case.algorithm.operands(**{name: moving.get(name) for name in x._fields})


def batched(case, dtype=jnp.float32):
    """As `prepared`, with three calls along the batch axis that share the arrays that may be shared."""
    x, spec, _ = prepared(case, dtype)
    other = prepared(_Reseeded(case), dtype)[0]
    axes = case.algorithm.forward.table
    stack = lambda name, a, b: a if axes[name][0].optional and name != "group_sizes" else jnp.concatenate([a, b, b])
    x = type(x)(*(None if a is None else stack(n, a, b) for n, a, b in zip(x._fields, x, other, strict=True)))
    moving = {n: _like(a, 1) for n, a in x._asdict().items() if n in case.algorithm.differentiable and a is not None}
    return x, spec, type(x)(**{name: moving.get(name) for name in x._fields})


def poisoned(call):
    """A call of grouped_matmul with NaN in the matrices of groups without rows."""
    x, spec, tangents = call
    empty = (x.group_sizes == 0).any(0) if x.group_offset is None else jnp.zeros(x.rhs.shape[1], bool)
    poison = lambda a: None if a is None else jnp.where(empty.reshape(1, -1, *(1,) * (a.ndim - 2)), jnp.nan, a)
    of = lambda x: x._replace(rhs=poison(x.rhs), rhs_scale=poison(x.rhs_scale))
    return of(x), spec, of(tangents)


def implementation(name, platform, backend):
    """The implementation on a platform that takes calls of any length; those of a higher priority take few queries."""
    entries = kernel_registry.list_implementations(name)
    return [e.implementation for e in entries if (e.platform, e.backend) == (platform, backend)][-1]


def check(case, call, platform, backend, config, tolerance=1e-5, run=lambda f: f):
    """Compares forward, backward and tangent of a call of `prepared`; `run` executes a function on the platform."""
    (x, spec, tangents), name = call, case.operation
    wrt = tuple(n for n, t in tangents._asdict().items() if t is not None)
    implementations = [implementation(name + kind, platform, backend) for kind in ("", "_bwd", "_jvp")]
    formulas = [kernel_registry.find(name + kind, "xla").implementation for kind in ("", "_bwd", "_jvp")]

    def derivatives(of, cotangents, **how):
        forward, backward, tangent = of
        outputs = forward(*x, spec=spec, **how)
        kept = outputs._replace(**{n: None for n in outputs._fields if n not in case.algorithm.residuals})
        gradients = backward(x, kept, cotangents, wrt=wrt, spec=spec, **how)
        return outputs, dict(zip(wrt, gradients, strict=True)), tangent(x, kept, tangents, spec=spec, **how)

    cotangents = jax.tree.map(lambda a: _like(a, 2), formulas[0](*x, spec=spec))
    wanted = derivatives(formulas, cotangents)
    found = run(lambda cotangents: derivatives(implementations, cotangents, config=config))(cotangents)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, wanted)
    assert_close(found, wanted, tolerance)


class _Reseeded:
    """A case whose arrays have another seed."""

    def __init__(self, case):
        self.case = case

    def __getattr__(self, name):
        return getattr(self.case, name)

    def arrays(self, dtype):
        return self.case.arrays(seed=1, dtype=dtype)


def _is_float(a):
    return jnp.issubdtype(a.dtype, jnp.floating)


def _like(a, seed):
    return jax.random.normal(jax.random.key(seed), a.shape).astype(a.dtype)
