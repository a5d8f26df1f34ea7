"""Calls of lightning_attention. A part of the heads does not know of the others, by whose number they decay."""

from ._recurrence import TINY, case, family

CASES = (case("lightning_attention", "layer", local=False, tiny=TINY, layer_idx=1, num_layers=4, return_state=True),)

FAMILIES = (
    family("lightning_attention", "long", dict(s=300), layer_idx=0, num_layers=4),
    family("lightning_attention", "last_layer", layer_idx=31, num_layers=32),
)
