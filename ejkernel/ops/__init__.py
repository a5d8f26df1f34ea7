"""The framework of kernels: it chooses, caches, measures and records their configs."""

from ejkernel.errors import ConfigMissError
from ejkernel.types import BwdParams, FwdParams

from .config.cache import ConfigCache, overlay_cache, policy_override
from .config.persistent import PersistentCache
from .config.selection import AutotunePolicy, ConfigSelectorChain
from .config.tables import load_table, merge_tables
from .core.kernel import Invocation, Kernel
from .core.types import Cfg, Out
from .execution.batch import pmap_with_config, vmap_with_config
from .execution.executor import ConfigChooser, Executor, autotune_recorded, default_executor
from .execution.forward_only import forward_autotune_only
from .execution.tuning import Autotuner, Tuner, autotune, benchmark
from .recording import load_invocations, save_invocations
from .registry import get_invocations, record_invocation, recording
from .utils.devices import device_fingerprint, device_kind, get_device_platform
from .utils.fingerprints import default_key_builder_with_sharding, sharding_fingerprint
from .utils.labels import (
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    label_fields,
    labelled,
    labels_to_configs,
)
from .utils.serialization import from_json, stable_json, to_json

__all__ = [
    "AutotunePolicy",
    "Autotuner",
    "BwdParams",
    "Cfg",
    "ConfigCache",
    "ConfigChooser",
    "ConfigMissError",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "Invocation",
    "Kernel",
    "Out",
    "PersistentCache",
    "Tuner",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "default_executor",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "forward_autotune_only",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "label",
    "label_fields",
    "labelled",
    "labels_to_configs",
    "load_invocations",
    "load_table",
    "merge_tables",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "recording",
    "save_invocations",
    "sharding_fingerprint",
    "stable_json",
    "to_json",
    "vmap_with_config",
]
