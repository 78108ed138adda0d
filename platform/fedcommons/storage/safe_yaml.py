"""YAML that somebody else may have written: of a stated size, and looked through before any of its values is made."""

from typing import Any

import yaml

LARGEST_FILE = 1_000_000
"""The most bytes of a YAML file; a run's has some thousand."""

DEEPEST = 100
"""How deeply the values of a YAML file may be nested."""

MOST_VALUES = 100_000
"""The most values of a YAML file."""

_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where it is installed: it takes a tenth of the time."""


def yaml_of(text: str) -> Any:
    """The plain value of this YAML, without aliases: nine lines of them can stand for 10^9 values.

    Raises:
        ValueError, yaml.YAMLError: it is no such YAML.
    """
    require_small(text)
    return yaml.load(text, _SAFE_LOADER)


def require_small(text: str, aliases: int = 0) -> None:
    """Refuse YAML whose values would take long, or much memory, before any of them is made.

    libyaml's loader overflows the stack where brackets are nested very deeply. aliases: how many it may have.

    Raises:
        ValueError: it is nested too deeply, or has too many values or aliases.
        yaml.YAMLError: it is not YAML.
    """
    depth = values = found = 0
    for event in yaml.parse(text, _SAFE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values, found = values + isinstance(event, yaml.NodeEvent), found + isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if found > aliases:
            raise ValueError(f"it has more than {aliases} aliases (*); write their values out")
        if values > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
