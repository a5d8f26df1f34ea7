"""Here nothing may be promoted silently."""

import pytest


@pytest.fixture(autouse=True)
def always_strict(strict):
    pass
