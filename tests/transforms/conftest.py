"""No implicit promotion in this folder."""

import pytest


@pytest.fixture(autouse=True)
def always_strict(strict):
    pass
