"""What is given here is of no type that an annotation has: ejkernel has to say so, or to take it, by itself."""

import pytest


@pytest.fixture(autouse=True)
def no_other_refuses(types_unchecked):
    pass
