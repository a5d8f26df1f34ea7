"""Names of ejkernel 0.0.78 of which this library has no operation, so that programs written for it can be imported.

Whoever calls one is told. A name that the library has comes before this table.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

ABSENT: dict[str, tuple[str, ...]] = {
    "ejkernel.modules": ("ragged_page_attention_v3_turboquant",),
    "ejkernel.modules.operations.ragged_page_attention_v2_turboquant": ("ragged_page_attention_v2_turboquant",),
    "ejkernel.quantization.turboquant.codebook": ("solve_lloyd_max",),
    "ejkernel.quantization.turboquant.matrices": ("generate_projection_matrix", "generate_rotation_matrix"),
}

# Names that 0.0.78 has in other modules than this library, and what they are here. The first is the function, which
# `from` gives in the place of the module of that name.
ELSEWHERE: dict[tuple[str, str], tuple[str, str]] = {
    ("ejkernel.modules.operations", "quantized_matmul"): ("ejkernel.modules", "quantized_matmul"),
    ("ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface", "_decode_path"): (
        "ejkernel.modules._release_recurrent",
        "gated_delta_rule_decode",
    ),
    ("ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd", "_ragged_gdr_chunked_prefill"): (
        "ejkernel.modules._release_recurrent",
        "gated_delta_rule_prefill",
    ),
}


def name_what_is_absent() -> None:
    """Makes the modules and names of the tables that there are not."""
    for module, names in ABSENT.items():
        found = _module(module)
        for name in names:
            if not hasattr(found, name):
                setattr(found, name, _absent(name))
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
    made = sys.modules[name] = ModuleType(
        name, "Names of ejkernel 0.0.78 that this library has elsewhere, or has no operation for."
    )
    made.__path__ = []
    setattr(parent, last, made)
    return made


def _absent(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise NotImplementedError(
            f"{name}: this version of ejkernel has no such operation; its name is here so that programs that were "
            "written for ejkernel 0.0.78 can be imported"
        )

    call.__name__ = call.__qualname__ = name
    return call
