"""The config and the platform that a user asks for, checked: what is left to choose is None, or "auto"."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...errors import a_type, shown, type_error, value_error
from ...types import BwdParams, FwdParams, OperationConfig, Platform, checked_config


def platform_of(operation: str, platform: Platform | str | None) -> Platform | str:
    """The platform that a user asks for, or "auto" if any will do."""
    if platform is not None and (not isinstance(platform, str) or platform not in ("auto", *Platform)):
        raise value_error(operation, f"platform {shown(platform)} is unknown; known are auto, {', '.join(Platform)}")
    return platform or "auto"


def config_of(
    operation: str, config: Any, of: type[OperationConfig]
) -> OperationConfig | tuple[OperationConfig, OperationConfig] | None:
    """The config that a user gives, or the pair of configs for forward and backward; None if none is given."""
    if config is None:
        return None
    if isinstance(config, tuple):
        if len(config) != 2:
            raise value_error(operation, f"config is a tuple of {len(config)}; a pair is (forward, backward)")
        forward, backward = config
        return _one_config(operation, forward, of), _one_config(operation, backward, of, BwdParams)
    return _one_config(operation, config, of)


def platform_alone(config: Any) -> Any:
    """The platform of a config that is a mapping with nothing else, whose other fields are chosen; else None."""
    return config["platform"] if isinstance(config, Mapping) and set(config) == {"platform"} else None


def agreed_platform(operation: str, platform: Platform | str | None, config: Any) -> Platform | str:
    """The platform that a user asks for, or "auto"; raises if the config, or the first of a pair, names another one."""
    platform, forward = platform_of(operation, platform), config[0] if isinstance(config, tuple) and config else config
    named = getattr(forward, "platform", "auto")
    if "auto" not in (platform, named) and platform != named:
        both = f"platform {shown(platform)} is asked for with a config of {shown(named)}"
        raise value_error(operation, f"{both}; they must be the same")
    return platform


def asked(
    operation: str, platform: Platform | str | None, config: Any, of: type[OperationConfig]
) -> tuple[Platform | str, OperationConfig | tuple[OperationConfig, OperationConfig] | None]:
    """The platform and the config that a user asks for; a config that is a platform alone is as `platform`."""
    if (alone := platform_alone(config)) is None:
        config = config_of(operation, config, of)
        return agreed_platform(operation, platform, config), config
    alone = platform_of(operation, alone)
    platform = agreed_platform(operation, platform, of(platform=alone))
    return alone if platform == "auto" else platform, None


def config_of_parts(operation: str, config: Any, of: type[OperationConfig]) -> Any:
    """The config that a user gives for the calls that an operation consists of, checked; a platform alone stays so."""
    if platform_alone(config) is None:
        return config_of(operation, config, of)
    return {"platform": platform_of(operation, config["platform"])}


def _one_config(
    operation: str, config: Any, of: type[OperationConfig], short: type[FwdParams | BwdParams] = FwdParams
) -> OperationConfig:
    """A config from a config, from a mapping of its fields, or from a short form of `KernelConfig`."""
    known = {field.name for field in fields(of)}
    if isinstance(config, Mapping):
        if unknown := sorted(map(str, config.keys() - known)):
            raise value_error(operation, f"config has no field {', '.join(unknown)}; the fields are {sorted(known)}")
        config = of(**config)
    elif not isinstance(config, OperationConfig | FwdParams | BwdParams):
        which, where = "", ""
        if type(config).__name__ == of.__name__:  # of another module, as ejkernel.modules.operations.configs
            which, where = f" of {type(config).__module__}", f" of {of.__module__}"
        raise type_error(
            operation, f"config is {a_type(config)}{which}; it must be a {of.__name__}{where} or a mapping"
        )
    return checked_config(operation, config, of, short)
