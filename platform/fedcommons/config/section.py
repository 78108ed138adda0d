"""The base class of the configuration's sections, and the constants of components, which are attributes of sections."""

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcommons.config import registry


class Constants(Mapping[str, Any]):
    """An immutable, hashable mapping from the names of a component's constants to their values."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def items(self) -> ItemsView[str, Any]:
        """Return the pairs of name and value; a dict's own view is several times faster than that of ``Mapping``."""
        return self._values.items()

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Constants({self._values})"


NONE, UNSET = Constants(), Constants()
"""``NONE``: no constants. ``UNSET``: a placeholder that is replaced with the defaults of the named component."""


def default_constants(kind: str, name: str | None) -> Constants:
    """Return the default constants of a component; no constants if ``name`` is empty or None."""
    return Constants({n: f.default for n, f in registry.constants(kind, name).items()}) if name else NONE


@dataclass(frozen=True)
class Section:
    """A section of the configuration. If a field names a component, the component's constants are attributes too."""

    constants: Constants = field(default=UNSET, kw_only=True)

    def __post_init__(self) -> None:
        if self.constants is UNSET:
            kinds = registry.KINDS.items()
            kind = next((kind for kind, k in kinds if k.section == type(self).__name__.lower()), "")
            name = getattr(self, registry.KINDS[kind].field.rpartition(".")[2]) if kind else None
            object.__setattr__(self, "constants", default_constants(kind, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "constants" or name not in self.constants:
            raise AttributeError(f"{type(self).__name__} has no field {name}; its component has {[*self.constants]}")
        return self.constants[name]
