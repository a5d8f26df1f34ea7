"""Deep-learning kernels for JAX that behave like native `jax.lax` operations.

o = ejkernel.lax.flash_attention(q, k, v, causal=True)      # jit, grad, jvp, vmap, hessian, sharding, export
"""

import importlib.util
import sys
from pathlib import Path

from .xla_utils.garbage_collection import no_garbage_collection as _no_garbage_collection
from .xla_utils.garbage_collection import to_oldest_generation as _to_oldest_generation

with _no_garbage_collection():
    if "ejkernel.lowering" not in sys.modules:
        # In a clone it is still beside this package, and is taken from there whether the clone is installed or not.
        _inside, _beside = (Path(__file__).parents[n] / "lowering/__init__.py" for n in (0, 1))
        if _beside.exists() and not _inside.exists():
            _spec = importlib.util.spec_from_file_location("ejkernel.lowering", _beside)
            sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(sys.modules[_spec.name])
        elif importlib.util.find_spec("ejkernel.lowering") is None:
            raise ImportError(
                f"ejkernel: {_beside.parent} is missing; copy the whole repository and `pip install -e .` it"
            )

    from . import block_masks, checkpoint_policies, kernels, lax, lowering, modules, ops
    from ._elsewhere import name_what_is_elsewhere as _name_what_is_elsewhere
    from ._explain import explain
    from ._export import export_checks
    from .errors import ConfigMissError, EjkernelRuntimeError, UnsupportedError

    _to_oldest_generation()

__all__ = [
    "ConfigMissError",
    "EjkernelRuntimeError",
    "UnsupportedError",
    "block_masks",
    "checkpoint_policies",
    "explain",
    "export_checks",
    "kernels",
    "lax",
    "lowering",
    "modules",
    "ops",
]

_name_what_is_elsewhere()


def __getattr__(name: str) -> str:
    """`__version__`, that of the installed package; looked up when it is read."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("ejkernel")
    except metadata.PackageNotFoundError:  # on PYTHONPATH, not installed
        return "0+not.installed"
