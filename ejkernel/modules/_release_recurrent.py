"""Linear recurrences in the form of ejkernel 0.0.78: the gated delta rule."""

from typing import Any

from ._release import Present, run, translates


@translates
def gated_delta_rule(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """query, key, value, beta, decay and initial_state, by position. A sequence is computed in chunks and a token at
    once, whatever use_chunked says: both are the same function. The state is float32."""
    names = ("q", "k", "v", "beta", "g", "initial_state", "use_qk_l2norm", "return_state")
    return run(present, call, {name: call[name] for name in names}, specs)
