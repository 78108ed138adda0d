"""Check a cluster file before ``ray up``: Ray's own schema, and errors that the schema misses.

For a Dockerfile, check that a digest fixes the base image.

python cluster/check.py cluster/aws.yaml my_cluster.yaml                # one sentence per error, exit code 2
python cluster/check.py --template cluster/aws.yaml ray_cluster.yaml # as they are in the repository, to be filled in
"""

import ipaddress
import logging
import os
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
    "external": {"type", "module", "head_ip", "worker_ips"},
}  # fmt: skip
"""Keys of ``provider`` by its type: Ray passes over a misspelt one."""

GUARDS = {
    "RAY_AUTH_MODE": ("token", "without a token: anybody on the network could run code on it"),
    "RAY_USE_TLS": ("1", "without TLS: anybody on the way could read the token"),
}
"""Variables of Ray that close a cluster: their value, and what a start without it means."""

SOURCED = re.compile(r"(^|[;&{(]\s*)(\.|source)\s+\S*cluster/environment\.sh\s*&&(\s*\{[^}]*|[^;|\n]*)$")
"""What comes next is done only if environment.sh has set GUARDS; after a ``;`` it would be done without, too."""

PRIVATE = ("~/.ssh", "~/.aws", "~/.ray", "~/.config", "~/.docker", "~/.kube", "~/.gnupg", "~/.netrc")
"""What of a home must not go up."""


def flaws(content: Any, template: bool = False) -> list[str]:
    """What is wrong with the content of a cluster file, a sentence each; template: placeholders may stand in it."""
    if not isinstance(content, dict):
        return ["it is no mapping of fields to values."]
    problems = dict[str, str]()
    for field, sentence in () if template else _placeholders(content):
        problems.setdefault(field, sentence)
    checks = (_provider, _node_types, _commands, _mounts, _schema)
    return [*problems.values(), *(sentence for check in checks for sentence in check(content))]


def base_flaws(text: str, template: bool = False) -> list[str]:
    """What is wrong with the bases that a Dockerfile names, a sentence each; template: REPLACE may be a digest."""
    digest = "([0-9a-f]{64}|REPLACE)" if template else "[0-9a-f]{64}"
    bases = [base for base in re.findall(r"^(?:ARG BASE=|FROM )(\S+)", text, re.MULTILINE) if base != "${BASE}"]
    wrong = [base for base in bases if not re.fullmatch(rf"\S+@sha256:{digest}", base)]
    return [f"base {base!r} must end with @sha256: and the 64 hexadecimal digits of its digest." for base in wrong]


def _mapping(value: Any) -> dict[Any, Any]:
    """The value, or an empty mapping in place of what is none: Ray's schema says that it is none."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _placeholders(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Values that were to be replaced: the field, of which node types share one, and a sentence."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from _placeholders(inner, f"{name}.{key}" if name else str(key))
    if isinstance(value, str) and "REPLACE" in value:
        shared = re.sub(r"^available_node_types\.[^.]+", value, name)
        yield shared, f"{name} is still the placeholder {value!r}."


def _provider(content: dict[Any, Any]) -> Iterator[str]:
    provider = _mapping(content.get("provider"))
    kind = provider.get("type")
    if not isinstance(kind, str) or kind not in PROVIDERS:
        yield f"provider.type must be aws, local or external, got {kind!r}."
        return
    for key in provider.keys() - PROVIDERS[kind]:
        near = get_close_matches(str(key), PROVIDERS[kind], 1)
        yield f"provider.{key} is no field{f'; did you mean {near[0]}?' if near else '.'}"
    if kind != "aws":
        every = [provider.get("head_ip"), *_list(provider.get("worker_ips"))]
        for address in every:
            if not _is_address(address):
                yield f"provider: {address!r} is no address of a host."
        if len({*map(str, every)}) < len(every) and "REPLACE" not in every:
            yield "provider: head_ip and worker_ips must be different hosts."
        return
    if "aws_credentials" in provider:
        yield "provider.aws_credentials would go up to the head: leave them in the environment or in ~/.aws."
    for rule in _list(_mapping(provider.get("security_group")).get("IpPermissions")):
        if re.search(r"'(0\.0\.0\.0|::)/0'", str(rule)):
            yield f"provider.security_group is open to the whole Internet, by the rule {rule}: name your own network."


def _is_address(value: object) -> bool:
    if isinstance(value, str) and re.fullmatch(r"(?!-)[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", value):
        return True
    try:
        return bool(ipaddress.ip_address(str(value)))
    except ValueError:
        return False


def _node_types(content: dict[Any, Any]) -> Iterator[str]:
    """AWS only: nodes of Ray's local provider are the hosts that it names."""
    if _mapping(content.get("provider")).get("type") != "aws":
        return
    types, head = _mapping(content.get("available_node_types")), content.get("head_node_type")
    if not types:
        yield "available_node_types must name the nodes: Ray's own are open to SSH from the whole Internet."
        return
    if head not in types:
        yield f"head_node_type must be one of {', '.join(map(str, types))}, got {head!r}."
    for name, node in types.items():
        node, field = _mapping(node), f"available_node_types.{name}"
        config = _mapping(node.get("node_config"))
        least, most = node.get("min_workers", 0), node.get("max_workers")
        if name != head and most is None:
            yield f"{field}.max_workers is missing: Ray would start as many as max_workers of all kinds."
        if isinstance(least, int) and isinstance(most, int) and least > most:
            yield f"{field}: min_workers is {least}, more than max_workers, {most}."
        if config.keys() & {"LaunchTemplate", "NetworkInterfaces"}:
            continue  # these may hold what is looked for below
        if not config.get("SecurityGroupIds"):
            yield f"{field}.node_config.SecurityGroupIds is missing: Ray would open SSH to the whole Internet."
        if name == head and not config.get("IamInstanceProfile"):
            yield f"{field}.node_config.IamInstanceProfile is missing: Ray would give the head all rights on EC2."
        if not config.get("ImageId") and not content.get("docker"):
            yield f"{field}.node_config.ImageId is missing: without docker nothing says which Python the nodes have."


def _commands(content: dict[Any, Any]) -> Iterator[str]:
    options = " ".join(map(str, _list(_mapping(content.get("docker")).get("run_options"))))
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        starting = [str(line) for line in _list(content.get(name)) if "ray start" in str(line)]
        if not starting:
            yield f"{name} must have a command with `ray start`."
        for line in starting:
            befores = [line[: match.start()] for match in re.finditer("ray start", line)]
            for variable, (value, meaning) in GUARDS.items():
                if not all(_is_set(variable, value, before, options) for before in befores):
                    yield f"{name}: {line!r} starts Ray {meaning}."


def _is_set(variable: str, value: str, before: str, options: str) -> bool:
    """Whether Ray starts with the variable at that value, from what stands before it and from the container."""
    values = re.findall(rf"\b{variable}=(\S*?)(?=[\s;&]|$)", before)
    if values:
        return values[-1].strip("'\"") == value
    inside = re.findall(rf"(?:--env|-e)[ =]{variable}=(\S*)", options)
    return SOURCED.search(before) is not None or (bool(inside) and inside[-1].strip("'\"") == value)


def _mounts(content: dict[Any, Any]) -> Iterator[str]:
    """Yield a sentence for each private file of this machine that would be copied to the hosts."""
    folder = False
    for remote, local in _mapping(content.get("file_mounts")).items():
        path = Path(os.path.abspath(Path(str(local)).expanduser()))
        homes = {name: Path(name).expanduser() for name in PRIVATE}
        if secret := [name for name, home in homes.items() if path.is_relative_to(home) or home.is_relative_to(path)]:
            yield f"file_mounts.{remote} would take {local} up, and secrets in {secret[0]}: mount ~/.fedcommons alone."
        if path.name.startswith(".env"):
            yield f"file_mounts.{remote} would take {local} up: such files hold passwords."
        folder = folder or path.name != ".fedcommons"
    if folder and ".env" not in _list(content.get("rsync_exclude")):
        yield "rsync_exclude must name .env: such files hold passwords, and would go up with the code."


def _schema(content: dict[Any, Any]) -> Iterator[str]:
    """What Ray itself says; it has no public name for this."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(content))
    except Exception as error:  # ValueError, jsonschema's ValidationError, KeyError
        message = str(error).strip().partition("\n")[0].rstrip(".")
        yield f"Ray refuses it: {message or type(error).__name__}."


def main(argv: list[str]) -> int:
    files, template = [word for word in argv if word != "--template"], "--template" in argv
    if not files or any(word.startswith("-") for word in files):
        print("usage: python cluster/check.py [--template] FILE.yaml [FILE.yaml ...]", file=sys.stderr)
        return 2
    logging.disable(logging.INFO)  # Ray tells what it fills in
    wrong = 0
    for name in files:
        docker = Path(name).name == "Dockerfile"
        user = "docker build" if docker else "ray up"
        try:
            text = Path(name).read_text(encoding="utf-8")
            problems = base_flaws(text, template) if docker else flaws(yaml.safe_load(text), template)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:  # a list may hold itself
            problems = [f"it cannot be read ({' '.join(str(error).split())})."]
        for sentence in problems:
            print(f"error: {name}: {sentence}", file=sys.stderr)
        wrong += bool(problems)
        if not problems:
            print(f"{name}: {user} can use it{' once its placeholders are replaced' if template else ''}.")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
