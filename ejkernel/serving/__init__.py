"""A small language model behind a server with continuous batching, on the paged operations of `ejkernel.lax`.

It is an example of what they are for, to be read in this order: `model` (the decoder), `sampling`, `pages` (the pool of
the cache), `drafts` (speculation), `scheduler` (what a step computes), `program` (how it is computed), `engine` (all of
it together); then `worker` (the engine on a thread) and `completions` (HTTP). The operations know nothing of it.
"""

from .engine import Done, Engine, Event, Limits
from .model import HEADS, LLAMA_1B, Decoder, logits_of_text, place, random_weights
from .sampling import Sampling
from .scheduler import Request

__all__ = [
    "HEADS",
    "LLAMA_1B",
    "Decoder",
    "Done",
    "Engine",
    "Event",
    "Limits",
    "Request",
    "Sampling",
    "logits_of_text",
    "place",
    "random_weights",
]
