"""A program that was exported with kernels runs in a process without this library."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

from .device import ON_HOPPER

pytestmark = ON_HOPPER

READER = """
    import sys
    import jax.experimental.mosaic.gpu  # by which XLA finds the runtime library of Mosaic GPU
    import jax.numpy as jnp
    import numpy as np
    from jax import export

    program, x, o = sys.argv[1:]
    call = export.deserialize(bytearray(open(program, "rb").read())).call
    np.save(o, call(jnp.load(x)))
    assert "ejkernel" not in sys.modules
"""


@pytest.mark.parametrize("platform, kernel", [("pallas", "mosaic_gpu_v2"), ("triton", "triton_kernel_call_ffi")])
def test_in_a_new_process(platform, kernel, tmp_path):
    x = jax.random.normal(jax.random.key(0), (2, 512, 4, 64), jnp.float16)
    attention = jax.jit(lambda x: ejkernel.lax.flash_attention(x, x, x, causal=True, config={"platform": platform}))
    exported = jax.export.export(attention, platforms=("cuda",), disabled_checks=ejkernel.export_checks())(x)
    assert kernel in exported.mlir_module()

    files = tmp_path / "program", tmp_path / "x.npy", tmp_path / "o.npy"
    files[0].write_bytes(exported.serialize())
    np.save(files[1], x)
    subprocess.run([sys.executable, "-c", textwrap.dedent(READER), *map(str, files)], check=True, timeout=200)
    np.testing.assert_array_equal(np.load(files[2]), attention(x))
