"""Shows what would run for a call, with which config, and why every other implementation would not.

    ejkernel explain flash_attention --q 2,4096,32,128 --kv-heads 8 --dtype bf16 --causal --target cuda

Nothing is computed; the exit status is 1 if nothing can run. --array gives any other operand by its type, --option any
other option by its value:

    ejkernel explain flash_attention --q 1,64,4,64 --array mask=bool[64,64] --option deterministic=True

--model takes a layer of a real model by its name (`ejkernel tune --help` lists them), to which options may be added:

    ejkernel explain grouped_matmul --model mixtral-8x7b-up --target tpu
"""

import argparse
import ast
import re
from typing import Any

import jax
import jax.numpy as jnp

from .._explain import explain
from ..types import Platform, Target
from ..types.shapes import shapes_of
from ._arguments import positive

_LONG = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operation, its arrays and options, and the target."""
    parser.add_argument("operation", help="e.g. flash_attention")
    parser.add_argument("--model", metavar="NAME", help="a layer of a model, with arrays of --dtype")
    arrays = parser.add_argument_group("arrays")
    arrays.add_argument("--q", type=_sizes, metavar="B,S,H,D", help="queries; k and v follow from them")
    arrays.add_argument(
        "--kv-heads", type=positive, metavar="G", help="key/value heads, by default as many as query heads"
    )
    arrays.add_argument("--kv-length", type=positive, metavar="K", help="number of keys, by default that of queries")
    arrays.add_argument("--value-dim", type=positive, metavar="V", help="features of v, by default those of q")
    arrays.add_argument("--dtype", type=_dtype, default="bf16", help="dtype of q, k and v, e.g. bf16, f16, f32")
    arrays.add_argument("--bias", type=_sizes, metavar="B,H,S,K", help="float32; any of the sizes may be 1")
    arrays.add_argument("--sinks", type=positive, metavar="N", help="sink logits of each head")
    arrays.add_argument("--segment-ids", action="store_true", help="with segment ids of queries and of keys")
    arrays.add_argument(
        "--array", type=_array, action="append", default=[], metavar="NAME=TYPE", help="any other array"
    )
    options = parser.add_argument_group("options")
    options.add_argument("--causal", action="store_const", const=True, help="query i sees keys j ≤ i + K − S")
    options.add_argument(
        "--window", type=_window, metavar="W", help="a number of keys, or left,right (none: unbounded)"
    )
    options.add_argument("--softcap", type=float, help="bound of the logits")
    options.add_argument("--dropout", type=float, metavar="RATE", help="fraction of the weights that is dropped")
    options.add_argument(
        "--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="any other option"
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--target", choices=("cpu", "cuda", "rocm", "tpu"), help="by default the platform of this process"
    )
    where.add_argument("--device-kind", metavar="KIND", help="with --target, e.g. 'NVIDIA H200'")
    where.add_argument("--platform", choices=list(map(str, Platform)), help="only implementations of this platform")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation; 1 if nothing can run."""
    if arguments.device_kind and not arguments.target:
        raise argparse.ArgumentError(None, "--device-kind needs --target")
    target = Target(arguments.target, arguments.device_kind) if arguments.target else None
    given = {**_model(arguments), **_attention(arguments), **dict(arguments.array), **dict(arguments.option)}
    try:
        found = explain(arguments.operation, target=target, platform=arguments.platform, **given)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
    print(found)
    return 0 if found.runs else 1


def _model(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the named layer."""
    if arguments.model is None:
        return {}
    if arguments.model not in (known := shapes_of(arguments.operation)):
        named = f"it has {', '.join(known)}" if known else "it has no named layers"
        raise argparse.ArgumentError(None, f"{arguments.operation} has no layer {arguments.model}; {named}")
    return known[arguments.model].arguments(arguments.dtype)


def _attention(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arrays and options of a call of attention, by the names of the lax API."""
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap")}
    given = {name: value for name, value in options.items() if value is not None}
    if arguments.q is None:
        of_q = ("kv_heads", "kv_length", "value_dim", "bias", "sinks", "segment_ids", "dropout")
        if lost := [name for name in of_q if getattr(arguments, name)]:
            raise argparse.ArgumentError(None, f"--{lost[0].replace('_', '-')} needs --q")
        return given
    if len(arguments.q) != 4:
        raise argparse.ArgumentError(None, f"--q has {len(arguments.q)} sizes; it must have 4: B,S,H,D")
    array = jax.ShapeDtypeStruct
    batch, length, heads, dim = arguments.q
    keys = (batch, arguments.kv_length or length, arguments.kv_heads or heads)
    given["q"] = array(arguments.q, arguments.dtype)
    given["k"] = array((*keys, dim), arguments.dtype)
    given["v"] = array((*keys, arguments.value_dim or dim), arguments.dtype)
    if arguments.bias:
        given["bias"] = array(arguments.bias, jnp.float32)
    if arguments.sinks:
        given["sinks"] = array((heads, arguments.sinks), jnp.float32)
    if arguments.segment_ids:
        given["q_segment_ids"] = array((batch, length), jnp.int32)
        given["kv_segment_ids"] = array(keys[:2], jnp.int32)
    if arguments.dropout is not None:
        given |= {"dropout_rate": arguments.dropout, "dropout_key": jax.eval_shape(lambda: jax.random.key(0))}
    return given


# --- Parsing of values


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive sizes such as 2,4096,32,128")
    return tuple(map(int, sizes))


def _dtype(text: str) -> Any:
    kind, bits = re.fullmatch(r"([a-z]*)(.*)", text).groups()
    try:
        return jnp.dtype(_LONG.get(kind, kind) + bits)
    except TypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype such as bf16, f32, i32 or bool") from error


def _array(text: str) -> tuple[str, jax.ShapeDtypeStruct]:
    written = re.fullmatch(r"(\w+)=(\w+)\[([\d,]*)\]", text)
    if not written:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=bf16[2,4096,32,128]")
    name, dtype, sizes = written.groups()
    return name, jax.ShapeDtypeStruct(_sizes(sizes) if sizes else (), _dtype(dtype))


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value with a literal of Python") from error


def _window(text: str) -> int | tuple[int | None, int | None]:
    bounds = [None if bound == "none" else bound for bound in text.split(",")]
    if len(bounds) > 2 or not all(bound is None or bound.strip().isdecimal() for bound in bounds) or bounds == [None]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of keys nor a pair such as 127,0 or none,0")
    left, *right = (None if bound is None else int(bound) for bound in bounds)
    return (left, *right) if right else left
