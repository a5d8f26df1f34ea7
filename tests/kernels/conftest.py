"""What tests of kernels may ask for: numbers of 64 bits."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
