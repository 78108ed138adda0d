"""Whether ``ray up`` can use a cluster file, before it starts anything: Ray's own schema, and what that misses.

python cluster/check.py ray_cluster.yaml cluster/onprem.yaml            # a sentence for each flaw, exit code 2
python cluster/check.py --template ray_cluster.yaml cluster/onprem.yaml # as they are in the repository, to be filled in
"""

import ipaddress
import logging
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

PROVIDERS = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips", "security_group",
            "key_pair", "aws_credentials", "disable_node_updaters", "cloudwatch"},
    "local": {"type", "head_ip", "worker_ips", "external_head_ip"},
}  # fmt: skip
"""Keys of ``provider`` by its type: Ray passes over a misspelt one."""

TOKEN = r"RAY_AUTH_MODE=token|cluster/environment\.sh"
"""What a command has that starts Ray with a token."""


def flaws(content: Any, template: bool = False) -> list[str]:
    """What is wrong with the content of a cluster file, a sentence each; template: placeholders may stand in it."""
    if not isinstance(content, dict):
        return ["it is no mapping of fields to values."]
    found = [] if template else list(_placeholders(content, ""))
    return [*found, *_provider(content), *_commands(content), *_schema(content)]


def _placeholders(value: Any, name: str) -> Iterator[str]:
    """Values that were to be replaced."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from _placeholders(inner, f"{name}.{key}" if name else str(key))
    if isinstance(value, str) and "REPLACE" in value:
        yield f"{name} is still the placeholder {value!r}."


def _provider(content: dict[str, Any]) -> Iterator[str]:
    provider = content.get("provider")
    kind = provider.get("type") if isinstance(provider, dict) else None
    if not isinstance(provider, dict) or kind not in PROVIDERS:
        yield f"provider.type must be {' or '.join(PROVIDERS)}, got {kind!r}."
        return
    for key in provider.keys() - PROVIDERS[kind]:
        near = get_close_matches(str(key), PROVIDERS[kind], 1)
        yield f"provider.{key} is no field{f'; did you mean {near[0]}?' if near else '.'}"
    if kind == "local":
        workers = provider.get("worker_ips") or []
        every = [provider.get("head_ip"), *workers]
        for address in every:
            if not _is_address(address):
                yield f"provider: {address!r} is no address of a host."
        if len({*every}) < len(every) and "REPLACE" not in every:
            yield "provider: head_ip and worker_ips must be different hosts."
        return
    types = content.get("available_node_types", {})
    if content.get("head_node_type") not in types:
        yield f"head_node_type must be one of {', '.join(types)}, got {content.get('head_node_type')!r}."


def _is_address(value: object) -> bool:
    try:
        ipaddress.ip_address(str(value))
    except ValueError:
        return isinstance(value, str) and re.fullmatch(r"(?!-)[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", value) is not None
    return True


def _commands(content: dict[str, Any]) -> Iterator[str]:
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        starting = [line for line in content.get(name, []) if "ray start" in str(line)]
        if not starting:
            yield f"{name} must have a command with `ray start`."
        for line in starting:
            if not re.search(TOKEN, line):
                yield f"{name}: {line!r} starts Ray without a token: anybody on the network could run code on it."


def _schema(content: dict[str, Any]) -> Iterator[str]:
    """What Ray itself says; it has no public name for this."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(content))
    except Exception as error:  # ValueError, jsonschema's ValidationError, KeyError
        said = str(error).strip().partition("\n")[0]
        yield f"Ray refuses it: {said or type(error).__name__}."


def main(argv: list[str]) -> int:
    files, template = [word for word in argv if word != "--template"], "--template" in argv
    if not files or any(word.startswith("-") for word in files):
        print("usage: python cluster/check.py [--template] FILE.yaml [FILE.yaml ...]", file=sys.stderr)
        return 2
    logging.disable(logging.INFO)  # Ray tells what it fills in
    wrong = 0
    for name in files:
        try:
            said = flaws(yaml.safe_load(Path(name).read_text()), template)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            said = [f"it cannot be read ({' '.join(str(error).split())})."]
        for sentence in said:
            print(f"error: {name}: {sentence}", file=sys.stderr)
        wrong += bool(said)
        if not said:
            print(f"{name}: ray up can use it{' once its placeholders are replaced' if template else ''}.")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
