"""The functions of the modules API: operations under its option names, with `platform=` and `mesh=`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..kernels._registry import kernel_registry
from ..ops import default_executor
from ..types import ConfigLike, Platform
from ._argument_names import modules_parameters
from ._operation import Operation
from ._signatures import annotations_of, result_type
from .operations._configs import asked

_SPECS = Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec]
OWN_PARAMETERS = {
    "platform": Platform | str | None,
    "cfg": ConfigLike | None,
    "mesh": Mesh | AbstractMesh | None,
    "in_specs": _SPECS | None,
    "out_specs": PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None,
}


def public_function(operation: type[Operation]) -> Callable[..., Any]:
    """The function of an operation in `ejkernel.modules`."""
    name = operation.algorithm.name
    parameters = modules_parameters(operation)
    own = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=x)
        for n, x in OWN_PARAMETERS.items()
    ]
    signature = inspect.Signature([*parameters, *own], return_annotation=result_type(operation))

    kernel = operation()

    def call(*args, cfg=None, **kwargs):
        platform, cfg = asked(name, kwargs.pop("platform", None), cfg, operation.config_class)
        return default_executor()(kernel, *args, cfg=cfg, platform=platform, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__signature__ = "ejkernel.modules", signature
    call.__annotations__ = annotations_of(signature)
    call.__doc__ = _doc(operation)
    kernel_registry.register_operation(name, call)
    return call


def _doc(operation: type[Operation]) -> str:
    renamed = ", ".join(f"{new} ({old})" for old, new in operation.renamed.items())
    name = operation.algorithm.name
    return (
        f"`ejkernel.lax.{name}`, which documents its mathematics and shapes, with a choice of platform and mesh.\n\n"
        f"Options that are renamed here: {renamed or 'none'}.\n\n"
        "Args:\n"
        '    platform: "triton", "pallas", "cuda", "cute" or "xla": only that platform; None or "auto" for the best.\n'
        f"    cfg: a {operation.config_class.__name__} or a mapping of its fields, in place of the chosen one;\n"
        "        one with a platform alone is as `platform=`.\n"
        "        `ejkernel.explain` shows the values of `algorithm`. A pair configures the forward and the backward\n"
        "        of a gradient.\n"
        "    mesh: runs under `jax.shard_map` on this mesh.\n"
        "    in_specs: PartitionSpecs by array name, or a tuple in the order of the arrays; others are replicated.\n"
        "    out_specs: the PartitionSpec of the result, or a tuple of them.\n"
    )
