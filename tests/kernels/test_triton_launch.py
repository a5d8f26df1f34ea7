"""What a launch of a Triton kernel refuses before anything compiles."""

import pytest

from ejkernel.kernels._triton._launch import launch
from ejkernel.types import KernelConfig


@pytest.mark.parametrize("wrong", [dict(block_q=24), dict(block_k=8), dict(num_warps=3), dict(num_warps=64)], ids=str)
def test_sizes_that_triton_cannot_take(wrong):
    def kernel():
        raise AssertionError("it is not to be run")

    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"kernel: config.{name} is {value}; Triton needs a power of two"):
        launch(kernel, out_type=None, grid=1, config=KernelConfig(**wrong))
