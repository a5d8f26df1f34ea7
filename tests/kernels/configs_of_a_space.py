"""Which configs of a space a test compiles: that of the heuristic, which is the first, and at night the others too."""

import pytest

heuristic_and_others = pytest.mark.parametrize(
    "which",
    [pytest.param(slice(1), id="heuristic"), pytest.param(slice(1, None), id="others", marks=pytest.mark.slow)],
)
