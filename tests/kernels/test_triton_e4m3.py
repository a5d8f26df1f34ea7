"""A cache in float8_e4m3fn in Triton, on GPUs that convert it and on those that do not, by the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.paged import close, decode_step, ragged_step, wide

triton = pytest.importorskip("triton")
from ejkernel.kernels._registry import kernel_registry  # noqa: E402
from ejkernel.kernels._target import lowering_for  # noqa: E402
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton._paged.attend import E4M3_IN_PTX  # noqa: E402
from ejkernel.modules._operation import OPERATIONS  # noqa: E402
from ejkernel.types import Target  # noqa: E402

from . import interpreter, ptx  # noqa: E402

GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200")


@pytest.fixture(autouse=True, params=GPUS)
def interpreted(monkeypatch, request):
    """Launches run here, as for a GPU."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    with lowering_for(Target("cuda", request.param)):
        yield


def computed(operation, x):
    """By Triton's kernels, and by XLA's."""
    call, algorithm = OPERATIONS[operation].prepare_arguments(**x), OPERATIONS[operation].algorithm
    operands, config = algorithm.operands(**call.named), OPERATIONS[operation].config_class(keys_per_block=16)
    of = lambda platform: kernel_registry.find(operation, platform).implementation
    return of("triton")(*operands, spec=call.spec, config=config), of("xla")(*operands, spec=call.spec)


@pytest.mark.parametrize("features", (32, 24), ids=("pairs", "one by one"))
def test_every_number(features):
    """The only key of a sequence has all the weight, so that o is its value."""
    x = decode_step(dtype="float16", d=features, e=features, pages="float8_e4m3fn")
    codes = np.resize(np.arange(256, dtype=np.uint8), (len(x["q"]), 2, features))
    values = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    x |= dict(
        context_lens=jnp.ones_like(x["context_lens"]),
        block_tables=jnp.arange(6)[:, None] + jnp.zeros((6, 5), jnp.int32),
    )
    x["v_pages"] = x["v_pages"].at[x["block_tables"][:, 0], 0].set(values)
    o = wide(computed("page_attention", x)[0].o[0])
    np.testing.assert_array_equal(o, np.repeat(wide(values), 3, axis=1))
    assert np.isnan(o).any()


def test_every_pair_in_ptx():
    """Two pairs of bytes in a word, of all 65,536."""
    codes = np.arange(2**16, dtype=np.uint16)
    words = np.stack([codes, codes[::-1]], -1).reshape(-1).view(np.uint32).reshape(-1, 32)
    bytes_of = words.view(np.uint8).reshape(*words.shape, 2, 2).view("float8_e4m3fn").astype(np.float32)
    for n, given in enumerate(words):
        found = np.zeros((2, 32), np.uint32)
        ptx.execute(E4M3_IN_PTX.value, [*found, given])
        halves = found.view(np.float16).reshape(2, 32, 2).astype(np.float32)
        np.testing.assert_array_equal(halves, np.moveaxis(bytes_of[n], -1, 0))


@pytest.mark.parametrize("features", (32, 24), ids=("pairs", "one by one"))
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 1.5e-2)])
def test_steps(features, dtype, tolerance):
    found, wanted = computed("ragged_page_attention", ragged_step(d=features, dtype=dtype, pages="float8_e4m3fn"))
    jax.tree.map(lambda a, b: close(a, b, tolerance), found, wanted)
