"""Runs Triton kernels on a CPU, program by program, by Triton's interpreter: slow, but exact for masks and indices."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.language.core import tuple_type
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from . import interpreter_types  # noqa: F401 (replaces parts of Triton's own)

POINTED_TO = {"bool": "int1"}


def launch(kernel, *operands, out_type, grid, config, input_output_aliases=None, zeroed_outputs=(), **constants):
    """`ejkernel.kernels._triton._launch.launch`, without a GPU."""
    leaves, tree = jax.tree.flatten(out_type)
    operands = [None if x is None else np.array(x) for x in operands]
    arguments, outputs = placed(kernel, operands, leaves, input_output_aliases, zeroed_outputs, constants)
    run(kernel, arguments, grid)
    return tree.unflatten([jnp.asarray(x) for x in outputs])


def placed(kernel, operands, results, aliases, zeroed, constants, place=lambda x: x) -> tuple[dict, list[np.ndarray]]:
    """The arguments of a kernel by name, and its outputs: operands that they alias, or new arrays made by `place`."""
    arrays = [x for x in operands if x is not None]
    aliased = {result: arrays[operand] for operand, result in (aliases or {}).items()}
    filled = lambda n, dtype: 0 if n in zeroed else _poison(dtype)
    new = lambda n, of: place(np.full(of.shape, filled(n, of.dtype), of.dtype))
    outputs = [aliased[n] if n in aliased else new(n, of) for n, of in enumerate(results)]
    given = iter([*operands, *(x for n, x in enumerate(outputs) if n not in aliased)])
    return {p.name: constants[p.name] if p.name in constants else next(given) for p in kernel.params}, outputs


in_order = range
"""The programs of a grid in the order in which they run."""


def run(kernel, arguments: dict, grid: int):
    """Runs every program in turn; reads and writes beyond an array are not checked."""
    scopes, found = [], {}

    def interpreted(function):
        """The function, with the parts of Triton's language that it uses replaced by NumPy."""
        if function.fn not in found:
            scopes.append(interpreter._patch_lang(function.fn))
            found[function.fn] = interpreter.InterpretedFunction(function.fn).rewrite()
        return found[function.fn]

    call, JITFunction.__call__ = JITFunction.__call__, lambda self, *a, **k: interpreted(self)(*a, **k)
    try:
        function = interpreted(kernel)
        converted = {name: _pointer(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
        interpreter.interpreter_builder.set_grid_dim(grid, 1, 1)
        for program in in_order(grid):
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
            function(**converted)
    finally:
        JITFunction.__call__ = call
        for scope in reversed(scopes):
            scope.restore()


def _patch_lang_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """As Triton's own, whose conversion of scalars (arrays of one element) to int NumPy 2.4 no longer allows."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_lang_tensor


def _create_dot(self, x, y, total, *options, plain=interpreter.InterpreterBuilder.create_dot):
    """In float32 a product is rounded once: x·y and (yᵀ·xᵀ)ᵀ are equal, as on a GPU and unlike in NumPy."""
    if x.dtype.scalar not in (tl.float32, tl.bfloat16):
        return plain(self, x, y, total, *options)
    product = _numbers(x).astype(np.float64) @ _numbers(y).astype(np.float64)
    return interpreter.TensorHandle(product.astype(np.float32) + total.data, total.dtype.scalar)


NARROW = {tl.bfloat16: jnp.bfloat16, tl.float8e4nv: jnp.float8_e4m3fn, tl.float8e5: jnp.float8_e5m2}
"""What Triton's interpreter keeps as bits, and NumPy's dtype for it."""


def _cast(self, x, dtype, *_, plain=interpreter.InterpreterBuilder.cast_impl):
    """To and from narrow numbers, which Triton's own truncates or takes for integers: rounded to nearest."""
    if not {x.dtype.scalar, dtype.scalar} & NARROW.keys():
        return plain(self, x, dtype)
    of_bits = interpreter._get_np_dtype(dtype)
    found = _numbers(x).astype(np.float32).astype(NARROW.get(dtype.scalar, of_bits))
    return interpreter.TensorHandle(found.view(of_bits), dtype.scalar)


def _binary_op(self, x, y, op, plain=interpreter.InterpreterBuilder.binary_op):
    """Of bfloat16 an operation on numbers, which Triton's own does with their bits, rounded to nearest."""
    if x.dtype.scalar != tl.bfloat16 or op in BITWISE:
        return plain(self, x, y, op)
    found = op(*(_numbers(a).astype(np.float32) for a in (x, y)))
    return interpreter.TensorHandle(
        found if found.dtype == bool else found.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16
    )


def _fma(self, x, y, z, plain=interpreter.InterpreterBuilder.create_fma):
    """x·y + z rounded once, in float32."""
    if z.dtype.scalar != tl.float32:
        return plain(self, x, y, z)
    return interpreter.TensorHandle((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), tl.float32)


def _numbers(x) -> np.ndarray:
    """The numbers of a tensor, of which narrow ones are kept as their bits."""
    return x.data.view(NARROW[x.dtype.scalar]) if x.dtype.scalar in NARROW else x.data


BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_fp_to_fp = _cast
interpreter.InterpreterBuilder.binary_op = _binary_op
interpreter.InterpreterBuilder.create_fma = _fma
# Of a number and NaN the number, as on a GPU unless NaN is asked for.
interpreter.InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)


def _generic_reduce(self, input):
    """As Triton's own, which calls the function for each element, for all rows at once; with one axis."""
    tensors = lambda arrays: [self.to_tensor(x, a.dtype) for x, a in zip(arrays, input, strict=True)]
    first, *rest = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in input), strict=True)
    total = tensors(first)
    for of in rest:
        total = _combined(self, total, tensors(of))
    kept = lambda x: np.expand_dims(x.handle.data, self.axis) if self.keep_dims else x.handle.data
    return tensors(kept(x) for x in total)


def _generic_scan(self, input):
    """As Triton's own, for all rows at once, by joining neighbouring ranges like a GPU."""
    found, length = [np.moveaxis(x.handle.data, self.axis, 0) for x in input], 1
    tensors = lambda arrays: [self.to_tensor(x, a.dtype) for x, a in zip(arrays, input, strict=True)]
    while length < len(found[0]):
        joined = _combined(self, tensors(np.roll(x, length, 0) for x in found), tensors(found))
        found = [np.concatenate([x[:length], y.handle.data[length:]]) for x, y in zip(found, joined, strict=True)]
        length *= 2
    return tensors(np.moveaxis(x, 0, self.axis) for x in found)


def _combined(self, x, y):
    found = self.combine_fn.fn(*x, *y)
    return found if isinstance(found, tuple) else (found,)


interpreter.ReduceOps.generic_reduce = _generic_reduce
interpreter.ScanOps.generic_scan = _generic_scan


_numpy_dtypes = {}


def _get_np_dtype(dtype, plain=interpreter._get_np_dtype):
    """Triton's own, which makes a table of all dtypes at each call, called once for each dtype."""
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = plain(dtype)
    return _numpy_dtypes[name]


interpreter._get_np_dtype = _get_np_dtype

if not isinstance(getattr(tuple_type, "name", None), functools.cached_property):

    def _init(self, types, fields=None):
        """As from Triton 3.7 on: a tensor's shape has a type, whose name is not written before it is read."""
        self.types, self.fields = types, fields or [""] * len(types)

    def _name(self):
        return f"[{','.join(f'{field}:{of}' for field, of in zip(self.fields, self.types, strict=True))}]"

    tuple_type.__init__, tuple_type.name = _init, functools.cached_property(_name)
    tuple_type.name.__set_name__(tuple_type, "name")


def _pointer(x: np.ndarray):
    dtype = POINTED_TO.get(str(x.dtype), str(x.dtype))
    return interpreter._implicit_cvt(SimpleNamespace(data_ptr=lambda: x.ctypes.data, dtype=dtype))


def _poison(dtype):
    """The contents of an output before it is written."""
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max // 2
