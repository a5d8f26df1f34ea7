"""Here nothing may be promoted silently, neither dtypes nor ranks: the library must hold where its users forbid it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
