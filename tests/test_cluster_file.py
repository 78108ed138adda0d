"""``ray_cluster.yaml`` is what ``ray up`` accepts; a real cluster is another test's."""

import copy
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture
def content() -> dict[str, Any]:
    """What is in the file."""
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def validate(content: dict) -> None:
    from ray.autoscaler._private.util import (
        prepare_config,
        validate_config,
    )  # what `ray up` calls; it has no public name

    validate_config(prepare_config(content))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray warns of its own old modules
def test_the_cluster_file_is_valid_and_a_broken_one_is_not(content: dict[str, Any]) -> None:
    validate(dict(content))
    with pytest.raises(Exception, match="shm_size"):
        validate(content | {"docker": content["docker"] | {"shm_size": "1g"}})


def test_the_cluster_keeps_token_authentication_on(content: dict[str, Any]) -> None:
    for command in (content["head_start_ray_commands"][-1], content["worker_start_ray_commands"][-1]):
        assert command.startswith("export RAY_AUTH_MODE=token;")
    assert "--env RAY_AUTH_MODE=token" in content["docker"]["run_options"]


def test_only_the_code_and_the_token_go_up(content: dict[str, Any]) -> None:
    assert set(content["file_mounts"].values()) == {".", "~/.ray/auth_token"}
    assert content["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    # as rsync reads them: with a leading slash from the top, else a name at any depth
    patterns = content["rsync_exclude"]
    stays = {path for path in tracked() for pattern in patterns if excluded(path, pattern)}
    assert stays == set()  # nothing of ours is left behind, as platform/fedcommons/data would be by `data`
    for path in (*PRIVATE, ".git/config", ".venv/bin/python"):
        assert any(excluded(path, pattern) for pattern in patterns), path


def excluded(path: str, pattern: str) -> bool:
    """Whether rsync leaves a path out, for patterns without wildcards."""
    assert not set(pattern) & set("*?[")
    parts = path.split("/")
    return parts[0] == pattern[1:] if pattern.startswith("/") else pattern in parts


def test_nobody_but_one_network_reaches_the_nodes_and_workers_hold_no_rights(content: dict[str, Any]) -> None:
    """Ray adds SSH from everywhere to every group that it makes itself, whatever `provider: security_group` says."""
    head, worker = (content["available_node_types"][name]["node_config"] for name in ("head", "gpu_worker"))
    assert set(content["available_node_types"]) == {"head", "gpu_worker"}
    assert head["SecurityGroupIds"] == worker["SecurityGroupIds"] == ["sg-REPLACE"]
    assert "security_group" not in content["provider"]
    assert head["IamInstanceProfile"]["Arn"].endswith("instance-profile/fedcommons-head")
    assert "IamInstanceProfile" not in worker


PRIVATE = ("data/mnist/train", "wandb/run/x", "sweeps/wandb/x", ".env", "runs/table1/config.yaml")
"""What may lie in a checkout and is nobody else's business."""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def tracked() -> list[str]:
    """The files that git has, and new ones that it would take."""
    return git("ls-files", "--cached", "--others", "--exclude-standard")


def test_git_keeps_what_is_private_out_and_all_code_in() -> None:
    assert git("check-ignore", *PRIVATE) == list(PRIVATE)
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []
    assert git("check-ignore", "platform/fedcommons/data/new.py", "tests/data.py") == []


@pytest.fixture
def flaws() -> Callable[..., list[str]]:
    """What ``make cluster-check`` says of a file's content."""
    return runpy.run_path(str(ROOT / "cluster" / "check.py"))["flaws"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.parametrize(("name", "placeholders"), [("ray_cluster.yaml", 3), ("cluster/onprem.yaml", 3)])
def test_the_files_of_the_repository_have_no_flaw_but_their_placeholders(
    name: str, placeholders: int, flaws: Any
) -> None:
    found = yaml.safe_load((ROOT / name).read_text())
    assert flaws(copy.deepcopy(found), template=True) == []
    said = flaws(found)
    assert len(said) == placeholders
    assert all(" is still the placeholder " in sentence for sentence in said)


GOOD = {"head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "lab-3.example.org"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"provider": {"type": "locl"}}, "provider.type must be aws or local, got 'locl'."),
        (
            {"provider": {**GOOD, "type": "local", "worker_ip": []}},
            "provider.worker_ip is no field; did you mean worker_ips?",
        ),
        ({"provider": {**GOOD, "type": "local", "head_ip": "a b"}}, "provider: 'a b' is no address of a host."),
        (
            {"provider": {**GOOD, "type": "local", "head_ip": "10.0.0.2"}},
            "head_ip and worker_ips must be different hosts",
        ),
        ({"worker_start_ray_commands": ["ray start --address=x"]}, "starts Ray without a token"),
        ({"head_start_ray_commands": ["ray stop"]}, "head_start_ray_commands must have a command with `ray start`."),
        ({"auth": {"ssh_usr": "me"}}, "Ray refuses it: Additional properties are not allowed"),
    ],
)
def test_what_rays_schema_misses_is_said_in_a_sentence(change: dict[str, Any], said: str | None, flaws: Any) -> None:
    content = yaml.safe_load((ROOT / "cluster" / "onprem.yaml").read_text())
    content |= {"provider": {**GOOD, "type": "local"}, "auth": {"ssh_user": "me"}, **copy.deepcopy(change)}
    found = flaws(content)
    assert not found if said is None else any(said in sentence for sentence in found), found


def test_a_head_node_type_that_is_none_is_said(content: dict[str, Any], flaws: Any) -> None:
    assert any(
        "head_node_type must be one of head, gpu_worker" in s for s in flaws({**content, "head_node_type": "hed"}, True)
    )
