"""The GPU that the tests of this folder run on, and the marks of those that need a Hopper GPU."""

import jax
import pytest

from ejkernel.types import Target

TARGET = Target("cuda", jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None)

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(TARGET.compute_capability != 90, reason="there is no Hopper GPU"),
]
