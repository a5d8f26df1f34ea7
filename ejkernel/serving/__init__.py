"""A small language model behind a server with continuous batching, on the paged operations of `ejkernel.lax`.

It shows how to use these operations; no operation depends on it. Read in this order: `model` (the decoder), `sampling`,
`pages` (the pool of the cache), `drafts` (speculation), `scheduler` (the tokens of a step), `program` (the computation
of a step), `engine` (all of them together), `worker` (the engine on a thread), `parsing` and `completions` (HTTP).
"""

from .engine import Done, Engine, Event, Limits
from .model import HEADS, LLAMA_1B, Decoder, joined, logits_of_text, place, random_weights
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
    "joined",
    "logits_of_text",
    "place",
    "random_weights",
]
