"""Names that ejkernel 0.0.78 defines in other modules than this library, provided there for programs written for it."""

import importlib
import importlib.util
import sys
from types import ModuleType

# Those names, and what they are here. A function with the name of its module replaces the module for `from … import`.
ELSEWHERE: dict[tuple[str, str], tuple[str, str]] = {
    ("ejkernel.modules.operations", "quantized_matmul"): ("ejkernel.modules", "quantized_matmul"),
    ("ejkernel.modules.operations.ragged_page_attention_v2_turboquant", "ragged_page_attention_v2_turboquant"): (
        "ejkernel.modules",
        "ragged_page_attention_v2_turboquant",
    ),
    ("ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface", "_decode_path"): (
        "ejkernel.modules._release_recurrent",
        "gated_delta_rule_decode",
    ),
    ("ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd", "_single_step_gdr_fwd"): (
        "ejkernel.modules._release_recurrent",
        "gated_delta_rule_step",
    ),
    ("ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd", "_ragged_gdr_chunked_prefill"): (
        "ejkernel.modules._release_recurrent",
        "gated_delta_rule_prefill",
    ),
}


def name_what_is_elsewhere() -> None:
    """Defines the names of the table, and creates the modules that do not exist."""
    for (module, name), (place, here) in ELSEWHERE.items():
        setattr(_module(module), name, getattr(importlib.import_module(place), here))


def _module(name: str) -> ModuleType:
    """The module of a name, or a new one, in its package."""
    if name in sys.modules:
        return sys.modules[name]
    package, _, last = name.rpartition(".")
    parent = _module(package)
    if hasattr(parent, "__path__") and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    made = sys.modules[name] = ModuleType(name, "Names of ejkernel 0.0.78 that this library has elsewhere.")
    made.__path__ = []
    setattr(parent, last, made)
    return made
