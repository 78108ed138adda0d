"""Old names of version 0.2 for user code: each works for one more version and gives a ``DeprecationWarning``."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable
from warnings import warn

C = TypeVar("C", bound=type)


@runtime_checkable
class TellsWork(Protocol):
    """Empty protocol, so that a class of version 0.2 may inherit from it and from ``Algorithm``."""


def accepts_old_names(**new_names: str) -> Callable[[C], C]:
    """Return a class decorator that makes old names of fields and methods work in addition to the new names.

    An old name is then an attribute of the class and of the class's instances, and a keyword of the constructor.
    new_names: the new name of each field or method, as keyword arguments ``old="new"``.
    """

    def decorate(cls: C) -> C:
        create: Callable[..., None] = cls.__init__
        old_names = frozenset(new_names)

        @functools.wraps(create)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            if values and not old_names.isdisjoint(values):
                for old in old_names & values.keys():
                    values[_warned(cls, old, new_names[old])] = values.pop(old)
            create(self, *args, **values)

        cls.__init__ = __init__
        for old, new in new_names.items():
            setattr(cls, old, _OldName(cls, old, new))
        return cls

    return decorate


OLD_METHODS = {"sharing": {"needs": "requests", "check_dealt": "check_data"}}
"""Kind of component, such as "sharing" -> old name of a method that users define -> new name of the method."""


def adopt_old_methods(kind: str, component: Any) -> None:
    """Give a user-defined class the new names of the methods that it defines under old names.

    Its base classes get the old names too, because an old method may call ``super()``.
    """
    for old, new in OLD_METHODS.get(kind, {}).items():
        owner, *bases = [c for c in getattr(component, "__mro__", ()) if old in vars(c) or new in vars(c)] or [None]
        if owner is not None and new not in vars(owner):
            setattr(component, _warned(component, old, new), getattr(component, old))
            for base in (c for c in bases if old not in vars(c)):
                setattr(base, old, vars(base)[new])


def old_capabilities(component: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the capabilities that a component declares as separate attributes, as in version 0.2: name -> value.

    names: names of all capabilities. If a class declares ``capabilities``, its base classes are not searched.
    """
    kind = component if isinstance(component, type) else type(component)
    declaring = next((i for i, c in enumerate(kind.__mro__) if "capabilities" in vars(c)), len(kind.__mro__))
    newer = kind.__mro__[: declaring + 1]
    attributes = {name for c in newer for name in vars(c)} | getattr(component, "__dict__", {}).keys()
    values = {name: getattr(component, name) for name in names if name in attributes}
    values = {name: value for name, value in values.items() if isinstance(value, bool | str | Mapping)}
    for name in values:  # the line above drops other types, such as the old method ``needs`` of a sharing strategy
        _warned(kind, name, f"capabilities = Capabilities({name}=...)")
    return values


class _OldName:
    """Descriptor for an old attribute name: it warns and returns the attribute with the new name."""

    def __init__(self, cls: type, old: str, new: str) -> None:
        self.names = cls, old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(owner if instance is None else instance, _warned(*self.names))


def _warned(cls: Any, old: str, new: str) -> str:
    warn(f"{cls.__name__}.{old} is now {new}", DeprecationWarning, stacklevel=3)
    return new
