"""Attention over pages on TPU reads every number of the dtypes whose bits it takes apart, in the interpreter."""

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._registry import kernel_registry
from ejkernel.types.page_attention import PageAttentionConfig

from .paged import DTYPES
from .tpu_interpreter import interpreted
from .tpu_paged import PAGE, prepared, slow


@slow
def test_every_number_of_float16():
    """Infinities and NaN among them."""
    heads = 4
    numbers = np.resize(np.arange(2**16, dtype=np.uint16), (-(-(2**16) // (256 * heads)), 1, heads, 256))
    pool = jnp.asarray(np.broadcast_to(numbers.view(np.float16), (len(numbers), PAGE, heads, 256)))
    x = dict(q=jnp.zeros((len(numbers), heads, 256), jnp.float16), k_pages=jnp.zeros_like(pool), v_pages=pool)
    x |= dict(context_lens=jnp.ones(len(numbers), jnp.int32), block_tables=jnp.arange(len(numbers))[:, None])
    operands, spec = prepared("page_attention", x)
    implementation = kernel_registry.find("page_attention", "pallas", "tpu").implementation
    run = interpreted(lambda *a: implementation(*a, spec=spec, config=PageAttentionConfig(8)))
    np.testing.assert_array_equal(run(*operands).o[0], numbers.view(np.float16)[:, 0])


@slow
def test_every_number_of_8_bits():
    """All numbers of float8_e4m3fn, NaN among them, and of int8."""
    for pages, count in (("float8_e4m3fn", 256), ("int8", 256)):
        numbers = jnp.arange(count, dtype=jnp.uint8).view(DTYPES[pages])
        x = dict(
            q=jnp.zeros((count // 8, 4, 8)),
            k_pages=jnp.zeros((count // 8, PAGE, 4, 8), DTYPES[pages]),
            v_pages=jnp.broadcast_to(numbers.reshape(count // 8, 1, 1, 8), (count // 8, PAGE, 4, 8)),
            context_lens=jnp.ones(count // 8, jnp.int32),
            block_tables=jnp.arange(count // 8, dtype=jnp.int32)[:, None],
        )
        operands, spec = prepared("page_attention", x)
        implementation = kernel_registry.find("page_attention", "pallas", "tpu").implementation
        found = interpreted(lambda *a, f=implementation, s=spec: f(*a, spec=s, config=PageAttentionConfig(8)))(
            *operands
        )
        np.testing.assert_array_equal(found.o[0, :, 0].reshape(-1), numbers.astype(jnp.float32))
