"""Labels: which operation, implementation and config an instruction of a program comes from.

A label is a named scope, so it is in the `op_name` of every instruction that is traced within it: in the lowered module
(printed with its locations), in the optimised HLO, and in a profile.

    ejkernel[op=flash_attention_bwd;impl=triton;config=3f0c81d2a4b7e695]

`EJKERNEL_OPS_STAMP` says how much of the config is in it: "none" (the default), its "hash", or its "json". Characters
other than letters, digits and `_.-~` are percent-encoded, as XLA cuts names off at an "@", and quotes and brackets have
meanings. The configs of hashes are stored in `labels.json`, beside the files of stored configs.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote, unquote

import jax

from ...callib._cache_directory import cache_directory
from .serialization import is_packable, pack, unpack
from .shared_file import SharedFile, path_in

_LABEL = re.compile(r"ejkernel\[[^\]]*\]")
_STAMPS = ("none", "hash", "json")


@contextlib.contextmanager
def labelled(operation: str, implementation: str, config: Any) -> Iterator[None]:
    """Labels what is traced in this context with operation, implementation and, by EJKERNEL_OPS_STAMP, the config."""
    with jax.named_scope(_label(op=operation, impl=implementation, **_stamp(config))):
        yield


def label(name: str, call_hash: str | None = None) -> Any:
    """`@label("my_attention")` labels all that a function traces; `label(op_id, call_hash)` is the text of a label."""
    if call_hash is not None:
        return _label(op=name, call=call_hash)

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def labelled_function(*args, **kwargs):
            with jax.named_scope(_label(op=name)):
                return function(*args, **kwargs)

        return labelled_function

    return decorate


def find_labels_in_lowered(lowered: jax.stages.Lowered) -> list[str]:
    """The labels in a lowered program, each once, in the order of their first appearance."""
    return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))


def extract_labels_from_hlo_text(hlo_text: str) -> list[str]:
    """The labels in the text of a program (HLO, or StableHLO with locations), each once, in order."""
    return list(dict.fromkeys(_LABEL.findall(hlo_text)))


def labels_to_configs(labels: Iterable[str]) -> dict[str, Any]:
    """The configs of the labels whose stamps are known in this process."""
    configs = {text: _config_of(label_fields(text).get("config")) for text in labels}
    return {text: config for text, config in configs.items() if config is not None}


def label_fields(text: str) -> dict[str, str]:
    """The fields of a label: `op` and, if it has them, `impl`, `config` (a hash or JSON) or `call`."""
    pairs = (field.partition("=") for field in text.removeprefix("ejkernel[").removesuffix("]").split(";"))
    return {name: unquote(value) for name, _, value in pairs}


# --- Text


def _label(**fields: str) -> str:
    return "ejkernel[" + ";".join(f"{name}={quote(value, safe='')}" for name, value in fields.items()) + "]"


# --- Configs


def _stamp(config: Any) -> dict[str, str]:
    how = os.environ.get("EJKERNEL_OPS_STAMP") or "none"
    if how not in _STAMPS:
        raise ValueError(f"EJKERNEL_OPS_STAMP is {how!r}; it has to be one of {', '.join(_STAMPS)}")
    if how == "none" or not is_packable(config):
        return {}
    packed = json.dumps(pack(config), sort_keys=True, separators=(",", ":"))
    if how == "json":
        return {"config": packed}
    digest = hashlib.sha256(packed.encode()).hexdigest()[:16]
    if digest not in _stamped().read():
        _stamped().write({digest: pack(config)})
    return {"config": digest}


def _config_of(stamp: str | None) -> Any | None:
    if stamp is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):  # of a text that was cut off, or a file that was edited
        packed = json.loads(stamp) if stamp.startswith("{") else _stamped().read().get(stamp)
        return None if packed is None else unpack(packed)
    return None


def _stamped() -> SharedFile:
    """The configs behind the hashes, in a file beside those of the devices."""
    return _file_in(cache_directory())


@functools.cache
def _file_in(directory: str) -> SharedFile:
    return SharedFile(path_in(directory, "labels"))
