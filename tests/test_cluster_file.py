"""``ray_cluster.yaml`` is what ``ray up`` accepts; a real cluster is another test's."""

import copy
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
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


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "cluster/onprem.yaml"])
def test_nodes_start_with_token_tls_and_the_label_of_their_kind(name: str) -> None:
    found = yaml.safe_load((ROOT / name).read_text())
    for command in (found["head_start_ray_commands"][-1], found["worker_start_ray_commands"][-1]):
        assert command.startswith(". ~/fedcommons/cluster/environment.sh && {")
        assert '--labels="$(python -m fedcommons.federation.kinds)"' in command


def test_only_the_code_and_the_secrets_of_the_cluster_go_up(content: dict[str, Any]) -> None:
    assert content["file_mounts"] == {"/home/ray/fedcommons": ".", "/home/ray/.fedcommons": "~/.fedcommons"}
    # as rsync reads them: with a leading slash from the top, else a name at any depth
    patterns = content["rsync_exclude"]
    stays = {path for path in tracked() for pattern in patterns if excluded(path, pattern)}
    assert stays == set()  # nothing of ours is left behind, as platform/fedcommons/data would be by `data`
    for path in (*PRIVATE, ".env.local", ".git/config", ".venv/bin/python"):
        assert any(excluded(path, pattern) for pattern in patterns), path


def excluded(path: str, pattern: str) -> bool:
    """Whether rsync leaves a path out, for patterns of one name."""
    parts = path.split("/")
    return fnmatch(parts[0], pattern[1:]) if pattern.startswith("/") else any(fnmatch(part, pattern) for part in parts)


def test_nobody_but_one_network_reaches_the_nodes_and_workers_hold_no_rights(content: dict[str, Any]) -> None:
    """Ray adds SSH from everywhere to every group that it makes itself, whatever `provider: security_group` says."""
    assert "security_group" not in content["provider"]
    for name, kind in content["available_node_types"].items():
        assert kind["node_config"]["SecurityGroupIds"] == ["sg-REPLACE"]
        assert ("IamInstanceProfile" in kind["node_config"]) == (name == "head")
        assert kind["node_config"]["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"] is True


def test_each_kind_of_worker_comes_as_spot_and_on_demand_and_all_fit_into_the_cluster(content: dict[str, Any]) -> None:
    workers = {name: kind for name, kind in content["available_node_types"].items() if name != "head"}
    assert set(workers) == {"gpu_on_demand", "gpu_spot", "cpu_on_demand", "cpu_spot"}
    for name, kind in workers.items():
        is_spot = name.endswith("spot")
        assert kind["node_config"].get("InstanceMarketOptions") == ({"MarketType": "spot"} if is_spot else None)
        assert kind.get("priority", 0) == int(is_spot)
    assert sum(kind["max_workers"] for kind in workers.values()) == content["max_workers"]


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
@pytest.mark.parametrize(("name", "placeholders"), [("ray_cluster.yaml", 5), ("cluster/onprem.yaml", 3)])
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


@pytest.fixture
def filled(content: dict[str, Any]) -> dict[str, Any]:
    """The AWS file without placeholders."""
    return yaml.safe_load(yaml.safe_dump(content, sort_keys=False).replace("REPLACE", "123"))


def node(content: dict[str, Any], name: str) -> dict[str, Any]:
    return content["available_node_types"][name]


STARTS = "head_start_ray_commands"
WORLD = {"FromPort": 22, "ToPort": 22, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("head_node_type"), "head_node_type must be one of gpu_on_demand, gpu_spot,"),
        (lambda c: c.update(head_node_type="hed"), "got 'hed'."),
        (lambda c: c.pop("available_node_types"), "available_node_types must name the nodes: Ray's own are open"),
        (lambda c: node(c, "gpu_spot").update(min_workers=5), "min_workers is 5, more than max_workers, 4."),
        (lambda c: node(c, "cpu_spot").pop("max_workers"), "available_node_types.cpu_spot.max_workers is missing"),
        (
            lambda c: node(c, "head")["node_config"].pop("IamInstanceProfile"),
            "IamInstanceProfile is missing: Ray would",
        ),
        (lambda c: node(c, "cpu_spot")["node_config"].pop("SecurityGroupIds"), "Ray would open SSH to the whole"),
        (lambda c: c["provider"].update(regoin="x"), "provider.regoin is no field; did you mean region?"),
        (lambda c: c["provider"].update(aws_credentials={}), "provider.aws_credentials would go up to the head"),
        (lambda c: c["provider"].update(security_group={"IpPermissions": [WORLD]}), "open to the whole Internet, by"),
        (lambda c: c["file_mounts"].update({"/home/ray/.ray": "~/.ray"}), "would take ~/.ray up"),
        (lambda c: c["file_mounts"].update({"/home/ray/me": "~"}), "would take ~ up, and secrets in ~/.ssh"),
        (lambda c: c["file_mounts"].update({"/home/ray/key": "~/.aws/credentials"}), "secrets in ~/.aws"),
        (lambda c: c["file_mounts"].update({"/home/ray/x": "./.env"}), "such files hold passwords"),
        (lambda c: c.pop("rsync_exclude"), "rsync_exclude must name .env"),
    ],
)
def test_what_opens_a_cluster_on_aws_is_said_in_a_sentence(change: Any, said: str, filled: Any, flaws: Any) -> None:
    assert flaws(copy.deepcopy(filled)) == []
    change(filled)
    assert any(said in sentence for sentence in flaws(filled)), flaws(filled)


OPTIONS = ["--env RAY_AUTH_MODE=token", "--env RAY_USE_TLS=1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.parametrize(
    ("start", "options", "open_"),
    [
        (". ~/f/cluster/environment.sh && ray start --head", [], ""),
        (". ~/f/cluster/environment.sh && { ulimit -n 9; ray start --head; }", [], ""),
        ("ray start --head", OPTIONS, ""),
        ("export RAY_AUTH_MODE=token RAY_USE_TLS=1; ray start --head", [], ""),
        ("ray start --head", [], "both"),
        ("ray start --head", OPTIONS[:1], "TLS"),
        ("ray start --head", OPTIONS[1:], "token"),
        (". ~/f/cluster/environment.sh; ray start --head", [], "both"),  # goes on where the files are missing
        (". ~/f/cluster/environment.sh && ray stop; ray start --head", [], "both"),
        ("echo . ~/f/cluster/environment.sh && ray start --head", [], "both"),
        (". ~/f/cluster/environment.sh && export RAY_USE_TLS=0 && ray start --head", [], "TLS"),
        (". ~/f/cluster/environment.sh && ray start --head || ray start --head", [], "both"),
        ("RAY_AUTH_MODE=disabled ray start --head", OPTIONS, "token"),
        ("ray start --head # . cluster/environment.sh && RAY_AUTH_MODE=token RAY_USE_TLS=1", [], "both"),
    ],
)
def test_a_start_that_leaves_the_cluster_open_is_said(
    start: str, options: list[str], open_: str, filled: Any, flaws: Any
) -> None:
    found = flaws({**filled, STARTS: [start], "docker": {**filled["docker"], "run_options": options}})
    lacking = {name for name in ("token", "TLS") if any(f"starts Ray without {a(name)}" in each for each in found)}
    assert lacking == ({"token", "TLS"} if open_ == "both" else {open_} - {""})


def a(name: str) -> str:
    return "a token" if name == "token" else name


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_without_docker_an_image_must_be_named(filled: dict[str, Any], flaws: Any) -> None:
    del node(filled, "cpu_spot")["node_config"]["ImageId"]
    assert flaws(copy.deepcopy(filled)) == []
    del filled["docker"]
    assert any("cpu_spot.node_config.ImageId is missing" in sentence for sentence in flaws(filled))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.parametrize("content", [None, 3, [], {}, {"provider": None}, {"provider": {"type": ["aws"]}},
                                     {"provider": {"type": "aws"}, "available_node_types": [1], "docker": 3},
                                     {"provider": {"type": "local", "worker_ips": 7}, "file_mounts": [2]}])  # fmt: skip
def test_a_file_of_anything_gets_sentences_and_no_traceback(content: Any, flaws: Any) -> None:
    assert flaws(content)


def test_a_file_that_holds_itself_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("provider: &a [*a]\n")
    words = [sys.executable, "-W", "ignore", str(ROOT / "cluster" / "check.py"), str(tmp_path / "own.yaml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'own.yaml'}: it cannot be read")


def test_secrets_are_for_their_owner_alone_also_where_older_ones_were_not(tmp_path: Path) -> None:
    folder, names = tmp_path / ".fedcommons", ("auth_token", "node.key", "node.crt")
    folder.mkdir(mode=0o755)
    for name in names:
        (folder / name).write_text("old")
        (folder / name).chmod(0o644)
    words = ["sh", str(ROOT / "cluster" / "secrets.sh"), "10.0.0.1"]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "HOME": str(tmp_path)})
    assert [(folder / name).stat().st_mode & 0o777 for name in names] == [0o600] * 3
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all((folder / name).read_text() != "old" for name in names)
