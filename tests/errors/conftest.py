"""Arguments here have types that no annotation allows: ejkernel itself has to raise, or to accept them."""

import pytest


@pytest.fixture(autouse=True)
def no_other_refuses(types_unchecked):
    pass
