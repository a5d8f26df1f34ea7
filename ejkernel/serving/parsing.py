"""Parsing of the requests of OpenAI's completions API. No option is ignored: unsupported ones are refused by name."""

import json
import math
import secrets
from dataclasses import dataclass
from typing import Any

from ..errors import shown
from .sampling import Sampling
from .text import encode

# Options of the protocol that are not supported, and the values that are accepted as they change nothing.
_NEUTRAL = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
MOST_STOPS = 4


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(frozen=True)
class Wanted:
    """A parsed and valid request; `usage` asks for the number of tokens at the end of a stream."""

    prompt: list[int]
    sampling: Sampling
    stop: list[str]
    stream: bool
    usage: bool

    def used(self, generated: int) -> dict[str, int]:
        """The number of tokens of the prompt, of those generated, and of both."""
        prompt = len(self.prompt)
        return dict(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)


def wanted_by(sent: dict[str, Any], model: str) -> Wanted:
    """The request in a JSON object, for a model of this name.

    Raises:
        Refused: an option is missing, wrong or not supported.
    """
    sent = {name: value for name, value in sent.items() if value is not None}
    if "prompt" not in sent:
        raise Refused(400, "there is no prompt", "prompt")
    if (other := _get(sent, "model", str, model)) != model:
        raise Refused(404, f"there is no model {shown(other)} here, but {model!r}", "model")
    _get(sent, "user", str, "")  # an id of the end user, which has no effect
    end = _get(sent, "stop_token_ids", list, [])
    if not all(type(token) is int for token in end):
        raise Refused(400, "stop_token_ids must be integers", "stop_token_ids")
    options = dict(
        max_tokens=_get(sent, "max_tokens", int, 16),
        temperature=_number(sent, "temperature", 1.0),
        top_k=_get(sent, "top_k", int, 0),
        top_p=_number(sent, "top_p", 1.0),
        seed=_get(sent, "seed", int, secrets.randbits(32)),
        end=tuple(set(end)),
    )
    wanted = dict(prompt=_prompt(sent.pop("prompt")), stop=_stop(sent), stream=_get(sent, "stream", bool, False))
    wanted["usage"] = _usage(sent, wanted["stream"])
    for name, value in sent.items():
        if name not in _NEUTRAL:
            raise Refused(400, f"there is no option {shown(name)}", name)
        if not any((value, type(value) is bool) == (x, type(x) is bool) for x in _NEUTRAL[name]):
            raise Refused(400, f"{name} is not supported", name)
    try:
        return Wanted(sampling=Sampling(**options), **wanted)
    except ValueError as error:
        raise Refused(400, str(error)) from None


def _get(sent: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    """Removes an option from the sent object and returns it; raises if its type is wrong (a bool is no number)."""
    value = sent.pop(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(400, f"{name} is {json.dumps(value)[:40]}, which is of the wrong type", name)
    return value


def _number(sent: dict[str, Any], name: str, default: float) -> float:
    value = _get(sent, name, (int, float), default)
    return float(value) if abs(value) < 1e30 else math.inf  # an integer may exceed the range of floats


def _prompt(sent: Any) -> list[int]:
    """One prompt, as text or as tokens; it may be the only one of a list."""
    if isinstance(sent, list) and len(sent) == 1 and isinstance(sent[0], (str, list)):
        (sent,) = sent
    if isinstance(sent, str):
        try:
            return encode(sent)
        except ValueError as error:
            raise Refused(400, str(error), "prompt") from None
    if isinstance(sent, list) and all(type(token) is int for token in sent):
        return sent
    raise Refused(400, "prompt must be one text, or a list of tokens", "prompt")


def _stop(sent: dict[str, Any]) -> list[str]:
    """The stop sequences: one text, or a list of some."""
    stop = _get(sent, "stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MOST_STOPS or not all(isinstance(text, str) and text for text in stop):
        raise Refused(400, f"stop must be one text, or a list of at most {MOST_STOPS}, none of them empty", "stop")
    return stop


def _usage(sent: dict[str, Any], stream: bool) -> bool:
    """Whether stream_options, which only a stream may have, include the usage."""
    if "stream_options" not in sent:
        return False
    options = _get(sent, "stream_options", dict, {})
    if not stream or not options.keys() <= {"include_usage"}:
        raise Refused(400, "stream_options are for a stream, and may have include_usage alone", "stream_options")
    return _get(options, "include_usage", bool, False)
