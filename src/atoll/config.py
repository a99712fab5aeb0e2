"""Builds frozen dataclasses from untrusted dictionaries: unknown and missing keys are errors."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from atoll.errors import InputError, shown, unknown

T = TypeVar("T")


def build(cls: type[T], values: object, what: str) -> T:
    """Returns an instance of the dataclass `cls` from a mapping; `what` names it in error messages."""
    if not isinstance(values, Mapping):
        raise InputError(f"{what} must be a table of keys and values, but is {shown(values)}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise unknown(f"key of {what}", key, known)
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{what} lacks the key {name!r}: add it")
    hints = get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            kind = getattr(hints[key], "__name__", hints[key])
            raise InputError(f"{key} of {what} must be of type {kind}, but is {shown(value)}")
    return cls(**values)


def _fits(value: object, hint: Any) -> bool:
    """Returns whether a value from JSON or TOML fits a plain type or a union; other types check themselves."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = all(option in (int, float, str, bool, type(None)) for option in options)
    return not plain or type(value) in options or (type(value) is int and float in options)


def check_counts(config: object, **limits: int) -> None:
    """Raises InputError unless each of these fields is an integer from 1 to its limit, or None."""
    for name, most in limits.items():
        value = getattr(config, name)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise InputError(f"{name} must be a whole number from 1 to {most}, but is {shown(value)}")


def check_choices(config: object, **choices: tuple[str | int, ...]) -> None:
    """Raises InputError unless each of these fields is one of its choices, or None where that is the default."""
    for name, accepted in choices.items():
        value = getattr(config, name)
        if value not in accepted and not (value is None and getattr(type(config), name, ...) is None):
            raise unknown(name, value, [str(choice) for choice in accepted])
