"""Deep-learning kernels for JAX that behave like native `jax.lax` operations.

o = ejkernel.lax.flash_attention(q, k, v, causal=True)      # jit, grad, jvp, vmap, hessian, sharding, export
"""

from . import checkpoint_policies, kernels, lax, lowering, modules, ops
from ._explain import explain
from ._export import export_checks
from .errors import ConfigMissError, EjkernelRuntimeError, UnsupportedError

__all__ = [
    "ConfigMissError",
    "EjkernelRuntimeError",
    "UnsupportedError",
    "checkpoint_policies",
    "explain",
    "export_checks",
    "kernels",
    "lax",
    "lowering",
    "modules",
    "ops",
]
