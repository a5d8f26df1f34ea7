"""Wrong calls raise while they are traced, with the operation, the operand, the numbers and the rule."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape

import ejkernel
from ejkernel import UnsupportedError

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, bf16, i32, u32, bits, e8m0 = (
    partial(array_of, dtype)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.bool_, jnp.float8_e8m0fnu)
)
GOOD = dict(q=f32(2, 8, 4, 16), k=f32(2, 12, 2, 16), v=f32(2, 12, 2, 16))
PACKED = dict(q=f32(8, 4, 16), k=f32(12, 2, 16), v=f32(12, 2, 16), cu_seqlens_q=i32(3), cu_seqlens_k=i32(3))

SHAPES = {
    "rank of q": (dict(q=f32(8, 4, 16)), ValueError, "q has 3 axes; it must have 4", "q: f32[8,4,16]"),
    "rank of v": (dict(v=f32(2, 12, 16)), ValueError, "v has 3 axes; it must have 4", "v: f32[2,12,16]"),
    "head counts": (
        dict(k=f32(2, 12, 3, 16), v=f32(2, 12, 3, 16)),
        ValueError,
        "k has 3 heads but q has 4; query heads must be a multiple of key/value heads",
        "(q: f32[2,8,4,16], k: f32[2,12,3,16])",
    ),
    "more key heads": (dict(q=f32(2, 8, 1, 16)), ValueError, "k has 2 heads but q has 1", "q: f32[2,8,1,16]"),
    "no heads": (
        dict(q=f32(2, 8, 0, 16), k=f32(2, 12, 0, 16), v=f32(2, 12, 0, 16)),
        ValueError,
        "q has 0 heads",
        "may be 0",
    ),
    "batch": (
        dict(k=f32(3, 12, 2, 16), v=f32(3, 12, 2, 16)),
        ValueError,
        "k has batch 3 but q has 2; they must be equal",
        "k: f32[3,12,2,16]",
    ),
    "features": (dict(k=f32(2, 12, 2, 8)), ValueError, "k has 8 features but q has 16; they must be equal"),
    "length of v": (dict(v=f32(2, 11, 2, 16)), ValueError, "v has length 11 and 2 heads but k has 12 and 2"),
    "heads of v": (dict(v=f32(2, 12, 1, 16)), ValueError, "v has length 12 and 1 heads but k has 12 and 2"),
    "bias": (dict(bias=f32(3, 8, 12)), ValueError, "bias of shape (3, 8, 12) does not broadcast to (2, 4, 8, 12)"),
    "rank of bias": (
        dict(bias=f32(1, 1, 1, 8, 12)),
        ValueError,
        "(1, 1, 1, 8, 12) does not broadcast to (2, 4, 8, 12)",
    ),
    "mask": (dict(mask=bits(8, 11)), ValueError, "mask of shape (8, 11) does not broadcast to (2, 4, 8, 12)"),
    "sinks": (dict(sinks=f32(3)), ValueError, "sinks must be [4] or [4, n], one row a head", "sinks: f32[3]"),
    "no sinks": (dict(sinks=f32(4, 0)), ValueError, "sinks has 0 of them for a head; leave it out", "sinks: f32[4,0]"),
    "segment ids": (
        dict(q_segment_ids=i32(2, 8), kv_segment_ids=i32(2, 8)),
        ValueError,
        "kv_segment_ids must be (2, 12), batch and length of k",
    ),
    "scale": (dict(softmax_scale=f32(4)), ValueError, "softmax_scale must be a scalar", "softmax_scale: f32[4]"),
    "dropout key": (
        dict(dropout_rate=0.1, dropout_key=u32(3, 2)),
        ValueError,
        "dropout_key must be one jax.random.key",
        "dropout_key: u32[3,2]",
    ),
}

DTYPES = {
    "k unlike q": (dict(k=bf16(2, 12, 2, 16)), TypeError, "k is bfloat16 but q is float32; they must be equal"),
    "integers": (dict(q=i32(2, 8, 4, 16)), TypeError, "q has dtype int32; it must be a float type", "q: i32[2,8,4,16]"),
    "no array": (dict(q=[1.0, 2.0]), TypeError, "q must be an array, not list"),
    "nothing": (dict(k=None), TypeError, "k must be an array, not NoneType"),
    "mask": (dict(mask=i32(8, 12)), TypeError, "mask has dtype int32; it must be bool", "mask: i32[8,12]"),
    "bias": (dict(bias=i32(8, 12)), TypeError, "bias has dtype int32; it must be a float type"),
    "sinks": (dict(sinks=i32(4)), TypeError, "sinks has dtype int32; it must be a float type"),
    "segment ids": (
        dict(q_segment_ids=f32(2, 8), kv_segment_ids=f32(2, 12)),
        TypeError,
        "q_segment_ids has dtype float32; it must be an integer type",
    ),
    "scale": (dict(softmax_scale=i32()), TypeError, "softmax_scale has dtype int32; it must be a float type"),
    "narrow": (dict(q=e8m0(2, 8, 4, 16)), TypeError, "it must be a float type: float16, bfloat16, float32, float64"),
    "lists of ids": (
        dict(q_segment_ids=[[1] * 8] * 2, kv_segment_ids=[[1] * 12] * 2),
        TypeError,
        "q_segment_ids must be an array, not list",
    ),
    "list of lengths": (dict(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 12]), TypeError, "cu_seqlens_q must be an array"),
    "rows of floats": (
        dict(dropout_rate=0.1, dropout_key=f32(2, 4, 4)),
        ValueError,
        "dropout_key must be one jax.random.key",
    ),
    "unused key": (dict(dropout_key=7), TypeError, "dropout_key must be one jax.random.key, not int"),
    "dropout key": (dict(dropout_rate=0.1, dropout_key=7), TypeError, "must be one jax.random.key, not int"),
}

OPTIONS = {
    "negative window": (dict(window=(-1, 0)), ValueError, "window's left bound is -1; it must not be negative"),
    "no window": (dict(window=0), ValueError, "window is 0; a number of keys must be at least 1"),
    "float window": (dict(window=4.0), TypeError, "window is 4.0; it must be an int, a pair (left, right) or None"),
    "long window": (dict(window=(1, 2, 3)), TypeError, "window is (1, 2, 3); it must be"),
    "window bound": (dict(window=(1.5, 0)), TypeError, "window's left bound is 1.5; it must be an int or None"),
    "return_lse": (dict(return_lse="yes"), TypeError, "return_lse must be True or False, not str"),
    "huge scale": (dict(softmax_scale=10**400), ValueError, "softmax_scale is inf; it must be finite"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap is -1.0; it must be positive and finite"),
    "softcap as text": (dict(softcap="30"), TypeError, "softcap must be a static number, not str"),
    "traced softcap": (dict(softcap=f32()), TypeError, "softcap must be a static number, not "),
    "scale": (dict(softmax_scale=float("inf")), ValueError, "softmax_scale is inf; it must be finite"),
    "scale as text": (dict(softmax_scale="1"), TypeError, "softmax_scale must be a static number, not str"),
    "dropout without key": (dict(dropout_rate=0.1), ValueError, "dropout_rate is 0.1 but dropout_key is not given"),
    "dropout of all": (dict(dropout_rate=1.0), ValueError, "dropout_rate is 1.0; it must be at least 0 and below 1"),
    "negative dropout": (dict(dropout_rate=-0.5), ValueError, "dropout_rate is -0.5; it must be at least 0"),
    "dropout as text": (dict(dropout_rate="0.1"), TypeError, "dropout_rate must be a static number, not str"),
    "traced dropout": (dict(dropout_rate=f32()), TypeError, "dropout_rate must be a static number, not "),
    "causal as text": (dict(causal="no"), TypeError, "causal must be True or False, not str"),
    "traced causal": (dict(causal=bits()), TypeError, "causal must be True or False, not "),
    "deterministic": (dict(deterministic=1), TypeError, "deterministic must be True or False, not int"),
    "unknown option": (dict(windows=3), TypeError, "unexpected keyword argument 'windows'"),
    "unknown field": (
        dict(config={"block_x": 3}),
        ValueError,
        "config has no field block_x; the fields are",
        "block_q",
    ),
    "block": (dict(config={"block_q": 0}), ValueError, "config.block_q is 0; it must be a positive int"),
    "config": (dict(config=[64, 64]), TypeError, "config is a list; it must be a KernelConfig or a mapping"),
    "precision": (dict(precision="e5m2"), ValueError, "precision is 'e5m2'; it must be None or 'e4m3'"),
    "config's platform": (
        dict(config={"platform": "tritn"}),
        ValueError,
        "platform 'tritn' is unknown; known are auto,",
    ),
}

PARTNERS = {
    "q's segments": (dict(q_segment_ids=i32(2, 8)), ValueError, "q_segment_ids is given without kv_segment_ids"),
    "k's segments": (dict(kv_segment_ids=i32(2, 12)), ValueError, "kv_segment_ids is given without q_segment_ids"),
    "bounds of lengths": (dict(max_seqlen_q=8), ValueError, "max_seqlen_q and max_seqlen_k are for packed sequences"),
    "lengths, rank 4": (
        dict(cu_seqlens_q=i32(3), cu_seqlens_k=i32(3)),
        ValueError,
        "q has 4 axes; it must have 3: tokens, heads, features, since cu_seqlens are given",
    ),
}

PACKINGS = {
    "one alone": (dict(cu_seqlens_k=None), ValueError, "cu_seqlens_q and cu_seqlens_k must be given together"),
    "unlike": (
        dict(cu_seqlens_k=i32(4)),
        ValueError,
        "must both have sequences + 1 ≥ 2 entries",
        "(cu_seqlens_q: i32[3], cu_seqlens_k: i32[4])",
    ),
    "too short": (dict(cu_seqlens_q=i32(1), cu_seqlens_k=i32(1)), ValueError, "sequences + 1 ≥ 2 entries", "i32[1]"),
    "rank": (dict(cu_seqlens_q=i32(1, 3)), ValueError, "cu_seqlens_q has 2 axes; it must have 1: sequences + 1"),
    "floats": (dict(cu_seqlens_q=f32(3)), TypeError, "cu_seqlens_q has dtype float32; it must be an integer type"),
    "segments too": (
        dict(q_segment_ids=i32(8), kv_segment_ids=i32(12)),
        ValueError,
        "segment ids and cu_seqlens both divide the tokens into sequences; give one of them",
    ),
    "bound": (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1; it must be at least 0"),
    "bound as text": (dict(max_seqlen_k="8"), TypeError, "max_seqlen_k must be an int or None, not str"),
}

MODULES = {
    "seed": (dict(dropout_prob=0.1, dropout_seed="7"), TypeError, "dropout_seed is '7'; it must be an integer"),
    "huge seed": (dict(dropout_prob=0.1, dropout_seed=2**70), ValueError, "dropout_seed is", "an integer of 32 bits"),
    "platform": (dict(platform="tritn"), ValueError, "platform 'tritn' is unknown; known are auto, triton, pallas"),
    "specs without mesh": (dict(in_specs=()), ValueError, "in_specs and out_specs are given without a mesh"),
    "a lax name": (dict(softcap=30.0), TypeError, "unexpected keyword argument 'softcap'"),
}

lax, modules = ejkernel.lax.flash_attention, ejkernel.modules.flash_attention
TABLES = (
    (lax, GOOD, SHAPES),
    (lax, GOOD, DTYPES),
    (lax, GOOD, OPTIONS),
    (lax, GOOD, PARTNERS),
    (lax, PACKED, PACKINGS),
    (modules, GOOD, MODULES),
)


@pytest.mark.parametrize(
    "function, arguments, error, says",
    [
        pytest.param(function, {**good, **changed}, error, says, id=name.replace(" ", "_"))
        for function, good, table in TABLES
        for name, (changed, error, *says) in table.items()
    ],
)
def test_errors_name_the_argument(function, arguments, error, says, caplog):
    arrays, options = split(arguments)
    with pytest.raises(error) as traced:
        jax.make_jaxpr(lambda arrays: function(**arrays, **options))(arrays)
    check(traced.value, error, says)
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)
    with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises(error) as called:
        function(**arrays, **options)
    check(called.value, error, says)
    assert not compiled(caplog)


def test_the_number_of_sequences_must_be_static():
    arrays, options = split(PACKED | dict(cu_seqlens_k=i32(*symbolic_shape("n"))))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda arrays: lax(**arrays, **options), arrays)
    check(error.value, ValueError, ["cu_seqlens_k is symbolic; the number of sequences has to be known"])


def test_the_number_of_features_must_be_static():
    (d,) = symbolic_shape("d")
    arrays = dict(q=f32(2, 8, 4, d), k=f32(2, 12, 2, d), v=f32(2, 12, 2, 16))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda arrays: lax(**arrays), arrays)
    check(error.value, ValueError, ["the number of features, of which softmax_scale is a power, is symbolic, d"])


def test_a_window_or_a_bound_beyond_every_length_is_none():
    q = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))
    same = lambda a, b: (lax(q, q, q, **a) == lax(q, q, q, **b)).all()
    assert same(dict(window=2**40), dict(causal=True)) and same(dict(window=(2**70, 1)), dict(window=(None, 1)))
    cu = jnp.array([0, 3, 8])
    pack = lambda **more: lax(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **more)
    assert (pack(max_seqlen_q=2**40, max_seqlen_k=10**30) == pack()).all()


def split(arguments):
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    arrays = {name: x for name, x in arguments.items() if is_array(x)}
    return arrays, {name: x for name, x in arguments.items() if not is_array(x)}


def compiled(caplog):
    return [message for message in caplog.messages if "XLA compilation of jit(flash_attention" in message]


def check(error, kind, says):
    message = str(error)
    assert type(error) is kind
    assert message.startswith("flash_attention"), message
    assert all(part in message for part in says), message
    assert len(message) < 400 and "\n" not in message, message


@pytest.mark.parametrize("call", [partial(modules, platform="pallas"), partial(lax, config={"platform": "pallas"})])
def test_a_platform_that_is_not_here(call, caplog):
    """The message lists every implementation with the reason against it, before anything is compiled."""
    arrays, _ = split(GOOD)
    with pytest.raises(UnsupportedError) as lowered:
        jax.jit(lambda arrays: call(**arrays)).lower(arrays)
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}
    with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises(UnsupportedError) as called:
        call(**arrays)
    assert not compiled(caplog)
    for error in (lowered.value, called.value):
        first, *table = str(error).splitlines()
        assert first == "flash_attention: no implementation on cpu (cpu) with platform 'pallas'"
        assert len(table) == len(ejkernel.explain("flash_attention", **GOOD).candidates)
        assert any("xla/any" in line and "platform 'pallas' was asked for" in line for line in table)
