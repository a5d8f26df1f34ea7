"""The calls that each operation has. `operations/<operation>.py` defines

SHARE                           how much of the search it gets, in parts
SPLIT                           the letters that may be sharded
OVER                            -> optional: the axis that splits a letter, where it is called inside `jax.shard_map`;
                                as many devices as the sizes of a call say under the name of the axis
DTYPES                          the dtypes of float operands that are not that of the call
programs(draw, sizes)           -> operands, sizes, options and dtypes of a call, by hypothesis
values(call, name, rng, shape)  -> an operand that is more than numbers of the family, or None; floats in float64
ON                              -> optional: by platform, the fields of `Sizes` that are other ones for this operation
REFUSED                         -> optional: by platform, the operands and options that its kernels refuse, and "jvp"
                                where they have no tangent, "vjp" where they have no derivative; they are drawn seldom
FORWARD_ONLY                    -> optional: True where there is no derivative
facts(call, x)                  -> what the formula has to know of the integers and booleans of x
hidden(call, x)                 -> by operand, where its numbers are read by nobody
results(call)                   -> axes and dtype of each result
unheard(call, x)                -> optional: for each result, where its cotangent is read by nobody
sensitivity(call, x)            -> optional: the relative error of what the operation raises e to the power of
magnitude(call, x, u, t)        -> optional: how large the terms of each derivative are, which may cancel
"""

import importlib
import pkgutil

BY_NAME = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
}
