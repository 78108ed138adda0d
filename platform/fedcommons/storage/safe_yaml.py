"""Safe reading of YAML that another user may have written: values are counted before any value is created."""

from typing import Any

import yaml

LARGEST_FILE = 1_000_000
"""Maximum bytes of a YAML file; the config.yaml of a run has some thousand bytes."""

DEEPEST = 100
"""Maximum nesting depth of the values of a YAML file."""

MOST_VALUES = 100_000
"""Maximum number of values of a YAML file."""

_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader of libyaml if it is installed, because it is ten times as fast."""


def yaml_of(text: str) -> Any:
    """Return the plain value of a YAML text. Aliases are rejected, as nine lines with aliases can mean 10^9 values.

    Raises:
        ValueError, yaml.YAMLError: see ``require_small``.
    """
    require_small(text)
    return yaml.load(text, _SAFE_LOADER)


def require_small(text: str, aliases: int = 0) -> None:
    """Check that a YAML text can be loaded in little time and memory. No value is created.

    The check includes the nesting depth, because libyaml's loader overflows the stack at very deep nesting. aliases:
    maximum number of aliases.

    Raises:
        ValueError: the text is nested too deeply, or has too many values or aliases.
        yaml.YAMLError: the text is not YAML.
    """
    depth = values = alias_count = 0
    for event in yaml.parse(text, _SAFE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        alias_count += isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if alias_count > aliases:
            raise ValueError(f"it has more than {aliases} aliases (*); write their values out")
        if values > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
