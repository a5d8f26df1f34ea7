"""ConfigCache, and the contexts that change which config is chosen: `overlay_cache` and `policy_override`.

A config that is chosen while `jax.jit` traces becomes part of the program, so everything that the choice depends on has
to be part of the key of JAX's cache of programs. The three values below are contexts of JAX, which are: after a change
the next call is traced again. Like every context of JAX, they belong to one thread and are not inherited by threads
that it starts.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from ...errors import a_type

_overlays = jax.make_user_context(())
_autotune_override = jax.make_user_context(None)
_generation = jax.make_user_context(0)
_generation_lock = threading.Lock()


class ConfigCache:
    """Configs in memory by key; safe to share between threads.

    Attributes:
        generation: the number of times that a config was put.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._configs: dict[str, Any] = {}
        self._answered_by_others: set[str] = set()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any | None:
        """The config of `key`, None if there is none."""
        return self._configs.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._configs

    def __len__(self) -> int:
        return len(self._configs)

    def put(self, key: str, config: Any) -> None:
        """Stores the config of `key`. Programs that were traced with another one for that key are traced anew."""
        with self._lock:
            stale = key in self._answered_by_others or self._configs.get(key, config) != config
            self._configs[key] = config
            self._answered_by_others.discard(key)
            self.generation += 1
        if stale:
            _retrace_what_is_jitted()

    def answered_by_another(self, key: str) -> None:
        """Notes that this cache had no config for `key`, and that a program was traced with one chosen elsewhere.

        Without this note `put` would have to discard every jitted program whenever a config is first measured.
        """
        with self._lock:
            too_late = key in self._configs
            self._answered_by_others.add(key)
        if too_late:
            _retrace_what_is_jitted()


def _retrace_what_is_jitted() -> None:
    with _generation_lock:
        _generation.set_global(_generation.get_global() + 1)


@contextlib.contextmanager
def overlay_cache(cache: ConfigCache) -> Iterator[ConfigCache]:
    """Within this context the configs in `cache` come before all others except those that a call gives itself.

    Overlays nest: configs that the inner one lacks are looked up in the outer one.

    Raises:
        TypeError: `cache` is not a ConfigCache.
    """
    if not isinstance(cache, ConfigCache):
        raise TypeError(
            f"overlay_cache: cache is {a_type(cache)}; it must be a ConfigCache, filled by put(key, config)"
        )
    with _overlays((cache, *_overlays.value)):
        yield cache


@contextlib.contextmanager
def policy_override(*, autotune: bool) -> Iterator[None]:
    """Within this context `autotune` decides whether missing configs are measured, whatever the policy."""
    with _autotune_override(autotune):
        yield


def overlays() -> tuple[ConfigCache, ...]:
    """The overlays in force, the innermost first."""
    return _overlays.value


def autotune_override() -> bool | None:
    """The value of the innermost `policy_override`, None outside of one."""
    return _autotune_override.value
