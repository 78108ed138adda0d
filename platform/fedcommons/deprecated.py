"""Names of version 0.2 that users' code may use: each works for one version, with a ``DeprecationWarning``."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from warnings import warn

C = TypeVar("C", bound=type)


def accepts_old_names(**new_names: str) -> Callable[[C], C]:
    """Return a class decorator that accepts old names of fields and functions: ``old="new"``.

    An old name is an attribute of the class and of its instances, and a keyword of its constructor.
    """

    def decorate(cls: C) -> C:
        create: Callable[..., None] = cls.__init__

        @functools.wraps(create)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            if not new_names.keys().isdisjoint(values):
                for old in new_names.keys() & values:
                    values[_warned(cls, old, new_names[old])] = values.pop(old)
            create(self, *args, **values)

        cls.__init__ = __init__
        for old, new in new_names.items():
            setattr(cls, old, _OldName(cls, old, new))
        return cls

    return decorate


OLD_METHODS = {"sharing": {"needs": "requests", "check_dealt": "check_data"}}
"""Kind of component -> old name -> new name, of methods that users define."""


def adopt_old_methods(kind: str, component: Any) -> None:
    """Give a user-defined class the new names of the methods that it defines under old names."""
    for old, new in OLD_METHODS.get(kind, {}).items():
        owner = next((c for c in getattr(component, "__mro__", ()) if old in vars(c) or new in vars(c)), None)
        if owner is not None and new not in vars(owner):
            setattr(component, _warned(component, old, new), getattr(component, old))


class _OldName:
    """A descriptor that returns the value of the new name, from an instance or from the class."""

    def __init__(self, cls: type, old: str, new: str) -> None:
        self.names = cls, old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(owner if instance is None else instance, _warned(*self.names))


def _warned(cls: Any, old: str, new: str) -> str:
    warn(f"{cls.__name__}.{old} is now {new}", DeprecationWarning, stacklevel=3)
    return new
