"""The short text of a frozen dataclass in a jaxpr: only the fields that differ from their defaults."""

from dataclasses import fields


class ShortRepr:
    """`KernelConfig(block_q=64, platform=xla)`: the fields without their default values, in the constructor's order."""

    def __repr__(self) -> str:
        in_order = sorted(fields(self), key=lambda field: field.kw_only)
        shown = ((field, getattr(self, field.name)) for field in in_order)
        changed = (f"{field.name}={_plain(value)}" for field, value in shown if value != field.default)
        return f"{type(self).__name__}({', '.join(changed)})"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
