"""ring_attention beyond what is generated from its cases: sizes of rings, programs, and the places it is called at."""
