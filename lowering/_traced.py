"""The lowering of a user's kernel: its method for the platform, under a label."""

from jax.interpreters import mlir

from ejkernel.ops import labelled
from ejkernel.primitives._traced import TracedPrimitive


def lower_traced(primitive: TracedPrimitive, platform, ctx, *args, operands, results, spec, config, chooser):
    def of_one_example(arrays):
        chosen = spec.config_on(platform, config, arrays)
        with labelled(primitive.name, spec.implementation_on(platform), chosen):
            return primitive.function(arrays, results=results, spec=spec, config=chosen, platform=platform)

    run = primitive.over_levels(of_one_example, operands, results, spec.levels)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
