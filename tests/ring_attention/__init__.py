"""ring_attention beyond the tests generated from its cases: sizes of rings, programs, and where it can be called."""
