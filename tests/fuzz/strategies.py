"""Random calls: the arguments of an operation by its own file, and a dtype, transforms and values."""

from dataclasses import replace

import hypothesis.strategies as st

from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS

from .calls import Call
from .operations import BY_NAME
from .operations._draws import CPU, Sizes, chance, pick, seldom
from .transforms import DERIVATIVES, SAME, WITHIN
from .values import FAMILIES

SOFTMAX = ("flash_attention", "ring_attention", "blocksparse_attention", "flash_mla", "native_sparse_attention")
OFTEN = ("none", "none", "none", "vjp", "vjp", "vjp", "jvp", "jvp", "jvp_of_vjp")
NUMBERS_OF = {"int8", "float8_e4m3fn", "float8_e5m2", "uint8", "uint32"}  # of operands that have no derivative
PLACES = {"b": "x"}  # on the mesh; other letters that may be split stand along y
WHOLE = {"b": (2, 4), "h": (4,), "g": (2,), "n": (8, 16), "d": (8, 16)}  # sizes that a mesh divides


@st.composite
def calls(draw, operation: str, sizes: Sizes = CPU) -> list[Call]:
    """Calls of one program: they differ only in values."""
    module, platform = BY_NAME[operation], sizes.platform
    sizes = replace(sizes, **getattr(module, "ON", {}).get(platform, {}))
    operands, size, options, dtypes = module.programs(draw, sizes)
    refused = getattr(module, "REFUSED", {}).get(platform, ())
    refused = () if refused and seldom(draw) else refused
    operands, options, dtypes = (
        {n: x for n, x in of.items() if n not in refused} for of in (operands, options, dtypes)
    )
    dtype, x64 = pick(draw, *sizes.dtypes), False
    if platform is None and chance(draw, 10):
        dtype, x64 = pick(draw, dtype, "float64"), True
    call = Call(operation, size, operands, options, dtype, dtypes, x64=x64, platform=platform)
    if "vjp" not in refused:
        call = _derived(draw, call, with_jvp="jvp" not in refused)
    is_composed = operation in COMPOSED
    if platform is None and chance(draw, 10):
        call = _over_mesh(draw, call)
    elif chance(draw, 40):
        call = _mapped(draw, call)
    if platform is not None or (call.mesh is None and not is_composed and chance(draw, 20)):
        call = replace(call, api="modules")
    if call.mesh is None and not is_composed and chance(draw, 12):
        call = replace(call, within=pick(draw, *WITHIN))
    second = SAME.get(call.derivative, call.derivative) == "jvp_of_vjp"
    eager = not second and platform is None and chance(draw, 60 if call.derivative == "none" else 10)
    call = replace(call, jit=not eager)
    return [_with_values(draw, call) for _ in range(sizes.draws)]


def _derived(draw, call: Call, with_jvp: bool) -> Call:
    if call.operation not in COMPOSED and not OPERATIONS[call.operation].algorithm.differentiable:
        return call
    derivative = "none" if getattr(call.module, "FORWARD_ONLY", False) else pick(draw, *OFTEN, *DERIVATIVES)
    movable = [name for name in call.operands if _is_differentiable(call, name)]
    if derivative == "none" or not movable:
        return call
    if call.operation in SOFTMAX and call.dtype in ("bfloat16", "float16"):
        derivative = IN_HALF.get(derivative, derivative)
    if not with_jvp and SAME.get(derivative, derivative) != "vjp":
        derivative = "vjp"
    wrt = movable if chance(draw, 50) else draw(st.lists(st.sampled_from(movable), min_size=1, unique=True))
    return replace(call, derivative=derivative, wrt=tuple(sorted(wrt)))


# Not searched: a derivative of a derivative that is transposed last rounds, in half precision, what it then subtracts,
# and is off by up to some percent. Forward over reverse is not.
IN_HALF = {"vjp_of_vjp": "jvp_of_vjp", "vjp_of_jvp": "jvp_of_vjp"}
INTEGERS = ("mask", "block_indices", "cu_seqlens", "segment_ids", "group_sizes", "group_offset", "dropout_key")


def _is_differentiable(call: Call, name: str) -> bool:
    return not any(part in name for part in INTEGERS) and call.dtypes.get(name) not in NUMBERS_OF


def _mapped(draw, call: Call) -> Call:
    maps = []
    for _ in range(1 + chance(draw, 35)):
        names = draw(st.lists(st.sampled_from(list(call.operands)), min_size=1, unique=True))
        mapped = {name: pick(draw, 0, -1, *([1] if call.operands[name] else [])) for name in names}
        mapped |= {of: 0 for of in ("cotangents", "tangents") if call.derivative != "none" and chance(draw, 50)}
        maps.append(mapped)
    outside = call.derivative != "none" and chance(draw, 30)
    if outside:
        maps = [{name: axis for name, axis in of.items() if name in call.operands} for of in maps]
    return replace(call, maps=tuple(maps), outside=outside)


def _over_mesh(draw, call: Call) -> Call:
    letters = [letter for letter in call.module.SPLIT if letter in call.sizes]
    if not letters:
        return call
    sizes = {**call.sizes, **{letter: pick(draw, *WHOLE[letter]) for letter in letters}}
    split = {letter: PLACES.get(letter, "y") for letter in letters}
    if len(set(split.values())) > 1 and chance(draw, 50):
        kept = pick(draw, "x", "y")
        split = {letter: axis for letter, axis in split.items() if axis == kept}
    kind = pick(draw, "explicit", "auto", "shard_map")
    return replace(call, sizes=sizes, mesh=(kind, split), api="modules" if kind == "shard_map" else "lax")


def _with_values(draw, call: Call) -> Call:
    # The kernels of Mosaic GPU are for logits below 10⁹.
    families = [name for name in FAMILIES if name != "huge" or call.platform != "pallas"]
    return replace(
        call,
        values=pick(draw, "normal", "normal", *families),
        infinite=chance(draw, 15),
        poison=chance(draw, 50),
        seed=draw(st.sampled_from(range(2**16))),
    )
