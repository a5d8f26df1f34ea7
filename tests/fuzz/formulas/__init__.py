"""The definition of every operation, written from its documentation: dense formulas that JAX differentiates.

`formulas/<operation>.py` shares nothing with the package. It defines

    formula(x, facts, options, rounded) -> list of results

where x are the float arrays of a call by name, all in the dtype of the computation (float64 for the exact result);
facts are computed by NumPy from the integers and booleans of the call (visibility, the sequence of each token); options
are the static arguments; and rounded(a) rounds a product to the dtype of the call, or not at all.
"""
