"""The cluster files: `ray up` accepts them, and they start no cluster that is open to others."""

import copy
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray warns of its own old modules


@pytest.fixture
def content() -> dict[str, Any]:
    """The AWS file."""
    return yaml.safe_load((ROOT / "cluster" / "aws.yaml").read_text())


@pytest.fixture
def filled(content: dict[str, Any]) -> dict[str, Any]:
    """The same without placeholders."""
    return yaml.safe_load(yaml.safe_dump(content, sort_keys=False).replace("REPLACE", "123"))


@pytest.fixture
def check() -> dict[str, Any]:
    """The names of the script of ``make cluster-check``."""
    return runpy.run_path(str(ROOT / "cluster" / "check.py"))


@pytest.fixture
def flaws(check: dict[str, Any]) -> Callable[..., list[str]]:
    """What ``make cluster-check`` says of a file's content."""
    return check["flaws"]


@pytest.fixture
def up() -> SimpleNamespace:
    """The script of ``make cluster``."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "cluster" / "up.py")))


def test_ray_accepts_the_cluster_file_and_refuses_a_broken_one(content: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config  # of `ray up`; it has no public name

    validate_config(prepare_config(dict(content)))
    with pytest.raises(Exception, match="shm_size"):
        validate_config(prepare_config(content | {"docker": content["docker"] | {"shm_size": "1g"}}))


@pytest.mark.parametrize(("name", "placeholders"), [("cluster/aws.yaml", 5), ("ray_cluster.yaml", 0)])
def test_our_files_have_placeholders_only_and_nodes_token_and_tls(name: str, placeholders: int, flaws: Any) -> None:
    file = yaml.safe_load((ROOT / name).read_text())
    for command in (file["head_start_ray_commands"][-1], file["worker_start_ray_commands"][-1]):
        assert command.startswith(". ~/fedcommons/cluster/environment.sh && {")
        assert '--labels="$(python -m fedcommons.runtime.cpu_kind)"' in command
    assert flaws(copy.deepcopy(file), template=True) == []
    messages = flaws(file)
    assert len(messages) == placeholders
    assert all("placeholder" in message for message in messages)


PRIVATE = ("data/mnist/train", "wandb/run/x", "sweeps/wandb/x", ".env", "runs/table1/config.yaml")
"""What may lie in a checkout and must stay there."""


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.splitlines()


def excluded(path: str, pattern: str) -> bool:
    """Whether rsync leaves a path out: with a leading slash from the top, else a name at any depth."""
    parts = path.split("/")
    return fnmatch(parts[0], pattern[1:]) if pattern.startswith("/") else any(fnmatch(part, pattern) for part in parts)


def test_all_code_and_nothing_private_goes_up_or_into_git(content: dict[str, Any]) -> None:
    assert content["file_mounts"] == {"/home/ray/fedcommons": ".", "/home/ray/.fedcommons": "~/.fedcommons"}
    tracked, patterns = git("ls-files", "--cached", "--others", "--exclude-standard"), content["rsync_exclude"]
    assert "README.md" in tracked
    assert not [path for path in tracked for pattern in patterns if excluded(path, pattern)]
    for path in (*PRIVATE, ".env.local", ".git/config", ".venv/bin/python"):
        assert any(excluded(path, pattern) for pattern in patterns), path
    assert git("check-ignore", *PRIVATE) == list(PRIVATE)


GOOD = {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "lab-3.example.org"]}


def test_flaws_of_a_lab_that_rays_schema_misses(flaws: Any, up: Any) -> None:
    lab = up.Lab({"a": "10.0.0.1", "b": "10.0.0.2", "c": "lab-3.example.org"}, "me", "", "/shared", 6380, "8265")
    good = up.content(lab, installs=True)
    assert "=true --dashboard-host=127.0.0.1 --dashboard-port=8265" in str(good["head_start_ray_commands"])
    assert "'ray[default]'" in good["setup_commands"][0]
    assert good["provider"] == GOOD
    assert all(":6380" in line or "port=6380" in line for line in str(good).split("ulimit")[1:])
    assert not flaws(copy.deepcopy(good))
    for change, message in (
        ({"provider": {"type": "locl"}}, "provider.type must be aws, local or external"),
        ({"provider": {**GOOD, "worker_ip": []}}, "did you mean worker_ips"),
        ({"provider": {**GOOD, "head_ip": "10.0.0.2"}}, "different hosts"),
        ({"worker_start_ray_commands": ["ray start --address=x"]}, "without a token"),
        ({"auth": {"ssh_usr": "me"}}, "Additional properties are not allowed"),
    ):
        assert any(message in sentence for sentence in flaws(copy.deepcopy(good | change))), message


def test_ray_reads_no_file_of_the_folder_to_start_ray_on_this_machine() -> None:
    """It would fail at a link to no file, such as W&B leaves in a run folder."""
    provider = runpy.run_path(str(ROOT / "cluster" / "this_machine.py"))["ThisMachine"]
    cluster = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    assert cluster["file_mounts"]  # `make cluster` needs them
    assert provider.bootstrap_config(cluster)["file_mounts"] == {}


FINE = {
    "name": "x", "python": "3.11", "packages": {"torch": "2.15.0"}, "cpu": ["x86_64", ""], "out": "", "tools": [],
    "free": {"/home/me": 2e12, "/shared": 2e12}, "venv": True, "taken": {}, "unreachable": [], "rays": [],
    "works": False,
}  # fmt: skip


def test_a_lack_of_a_host_is_a_sentence_that_names_the_host(up: Any) -> None:
    lab = up.Lab({"a": "10.0.0.1", "b": "10.0.0.2"}, "me", "", "/shared", 6379)
    assert [*up.lacks(lab, {"a": FINE, "b": FINE})] == []
    old = {"packages": {"torch": "2.14.0"}}
    for change, n, words in (
        ({"python": "3.12"}, 1, "b has Python 3.12, and a 3.11"),
        ({"python": "3.10"}, 1, "needs 3.11"),
        ({"tools": ["rsync"]}, 1, "b has no rsync"),
        ({"free": {"/home/me": 1e8}}, 1, "0.1 GB free in /home/me, and needs 1 GB"),
        (old, 0, ""),  # the start installs the packages
        (old | {"free": {"/home/me": 5e9, "/shared": 5e9}}, 1, "needs 10 GB"),
        (old | {"venv": False}, 1, "python3.11-venv"),
        ({"taken": {"DASHBOARD": 8265}}, 1, "port 8265; end it, or choose another DASHBOARD"),
        ({"rays": [6390]}, 1, "me's Ray at port 6390"),
        ({"works": True}, 1, "would end the sweep"),
        ({"out": "is another folder"}, 1, "b: OUT=/shared is another folder"),
    ):
        sentences = [*up.lacks(lab, {"a": FINE, "b": {**FINE, **change}})]
        assert len(sentences) == n, change
        assert all(each.startswith("host b") and words in each for each in sentences), sentences
    (sentence,) = up.lacks(lab, {"a": {**FINE, "unreachable": ["b"]}, "b": FINE})
    assert sentence.startswith("host b cannot be reached")


def test_a_host_reports_rays_that_work_and_workers_behind_other_ports_of_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of a shell stand for a raylet and a task."""
    probe = SimpleNamespace(**runpy.run_path(str(ROOT / "cluster" / "probe.py")))
    for port, title in ((6391, "ray::f"), (6392, "ray::IDLE")):
        words = ["bash", "-c", f"(exec -a {title} sleep 60) & echo; wait", f"--gcs-address=10.0.0.1:{port}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as raylet:
            assert raylet.stdout is not None
            raylet.stdout.readline()
            time.sleep(0.2)  # until the task has its title
            assert probe.rays().get(port) == (title == "ray::f")
            assert port not in probe.rays(probe.LOCAL_HEAD)  # the head is another host
            os.killpg(raylet.pid, signal.SIGKILL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\necho port {server.getsockname()[1]}\n")
        (tmp_path / "ssh").chmod(0o700)
        ports = {"PORT": 1, "DASHBOARD": server.getsockname()[1]}
        at = [], "", "", ports, True, "127.0.0.1", {"b": "127.0.0.1"}, []
        facts = [probe.describe(*at)]
        words = ["bash", "-c", "sleep 60; true", "/x/dashboard.py", "--host=127.0.0.1", f"--port={ports['DASHBOARD']}"]
        with subprocess.Popen(words, start_new_session=True) as dashboard:  # of this user's Ray, which the start ends
            facts.append(probe.describe(*at))
            os.killpg(dashboard.pid, signal.SIGKILL)
    facts.append(probe.describe(*at))
    assert [each["unreachable"] for each in facts] == [[], [], ["b"]]
    assert [each["taken"] for each in facts] == [{"DASHBOARD": ports["DASHBOARD"]}, {}, {}]


def test_values_of_make_cluster_that_cannot_be_meant_are_refused(
    up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, message in (
        (["HOST=a"], "did you mean HOSTS"), ([], "HOSTS is missing"), (["HOSTS=a a"], "different hosts"),
        (["HOSTS=a", "10.0.0.2"], "no variable 10.0.0.2; it takes HOSTS"), (["HOSTS=a,b"], "separated by spaces"),
        (["HOSTS=me@a"], "without the user"), (["HOSTS=a", "KEY=/none"], "KEY must be .*it cannot be read"),
        (["HOSTS=a", "OUT=runs"], "OUT must be an absolute"), (["HOSTS=", "OUT=/x"], "OUT changes nothing"),
        (["HOSTS=a", "PORT=0"], "PORT must be"), (["HOSTS=a", "DASHBOARD=6379"], "must be another port"),
        (["HOSTS=127.0.0.1 10.0.0.1"], "resolves to 127.0.0.1"),
        (["HOSTS=a", "USER=x;y"], "USER must be"), (["HOSTS=no.such.invalid"], "host no.such.invalid has no address"),
        (["HOSTS=a..b"], "host a..b has no address"), (["HOSTS=2"], "2 resolves to 0.0.0.2"),
        (["HOSTS=10.0.0.1 10.1"], "HOSTS must be different hosts, got 10.0.0.1"),
    ):  # fmt: skip
        with pytest.raises(up.LackError, match=message):
            up.lab(words)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(up.LackError, match="this machine has no ssh, "):
        up.lab(["HOSTS=10.0.0.1", f"KEY={__file__}"])


def test_an_answer_is_read_after_any_text_of_the_login_and_an_error_names_the_host(
    up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, ssh = up.Lab({"a": "10.0.0.1"}, "me", "", "", 6379), tmp_path / "ssh"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for line, message in (
        (r"printf '\374 no end of line'; exec python3 -", ""),
        ("echo me@a: Permission denied. >&2; exit 255", "a refuses user me with the default key files"),
        ("echo python3: Permission denied >&2; exit 126", "a cannot run Python"),
        ("exit 255", "a does not answer by SSH"),
    ):
        ssh.write_text(f"#!/bin/sh\n{line}\n")
        ssh.chmod(0o700)
        with pytest.raises(up.LackError, match=message) if message else nullcontext():
            assert lab.answer("a", "print(values['mark'] + values['x'])", x="[1]") == [1]


@pytest.mark.parametrize("text", ["", "{a: [", "provider: {head_ip: 10.0.0.1}"])
def test_a_damaged_file_of_an_earlier_cluster_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    shutil.copy(ROOT / "cluster" / "up.py", tmp_path / "cluster")
    (tmp_path / "my_cluster.yaml").write_text(text)
    up = SimpleNamespace(**runpy.run_path(str(tmp_path / "cluster" / "up.py")))
    for work in (up.sync, up.stop, lambda: up.start(up.Lab({"a": "10.0.0.1"}, "me", "", "", 6379))):
        with pytest.raises(up.LackError, match=r"my_cluster.yaml is damaged"):
            work()


def test_secrets_are_kept_while_they_fit_all_hosts(up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    single, two = (up.Lab({a: a for a in hosts}, "me", "", "", 1) for hosts in (["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]))
    assert not up.has_secrets(single)
    subprocess.run(["sh", ROOT / "cluster" / "secrets.sh", "10.0.0.1"], check=True, capture_output=True)
    assert up.has_secrets(single)
    assert not up.has_secrets(two)
    read = ["sh", "-c", f". {ROOT}/cluster/environment.sh && echo $RAY_AUTH_MODE $AUTOSCALER_METRIC_PORT"]
    assert subprocess.run(read, capture_output=True, text=True).stdout == "token -1\n"
    (tmp_path / "openssl").write_text("#!/bin/sh\nexit 1\n")  # as for a certificate that has expired
    (tmp_path / "openssl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not up.has_secrets(single)
    done = subprocess.run(read, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"error: host {socket.gethostname()}: .*node.crt has expired", done.stderr)


def node(content: dict[str, Any], name: str) -> dict[str, Any]:
    return content["available_node_types"][name]


WORLD = {"FromPort": 22, "ToPort": 22, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda c: c.pop("head_node_type"), "head_node_type must be one of gpu_on_demand"),
    (lambda c: node(c, "gpu_spot").update(min_workers=5), "min_workers is 5, more than max_workers, 4"),
    (lambda c: node(c, "head")["node_config"].pop("IamInstanceProfile"), "IamInstanceProfile is missing"),
    (lambda c: node(c, "cpu_spot")["node_config"].pop("SecurityGroupIds"), "open SSH to the whole"),
    (lambda c: c["provider"].update(regoin="x"), "did you mean region"),
    (lambda c: c["provider"].update(aws_credentials={}), "provider.aws_credentials would go up"),
    (lambda c: c["provider"].update(security_group={"IpPermissions": [WORLD]}), "open to the whole Internet"),
    (lambda c: c["file_mounts"].update({"/home/ray/me": "~"}), "secrets in ~/.ssh"),
    (lambda c: c["file_mounts"].update({"/home/ray/x": "./.env"}), "such files hold passwords"),
    (lambda c: c.pop("rsync_exclude"), "rsync_exclude must name .env"),
    (lambda c: (c.pop("docker"), node(c, "cpu_spot")["node_config"].pop("ImageId")), "node_config.ImageId is missing"),
]


def test_flaws_that_open_a_cluster_on_aws(filled: dict[str, Any], flaws: Any) -> None:
    assert flaws(copy.deepcopy(filled)) == []
    for change, message in CHANGES:
        change(changed := copy.deepcopy(filled))
        assert any(message in sentence for sentence in flaws(changed)), message


OPTIONS = ["--env RAY_AUTH_MODE=token", "--env RAY_USE_TLS=1"]
SOURCED = ". ~/f/cluster/environment.sh"


def test_a_start_that_leaves_the_cluster_open_is_reported(filled: dict[str, Any], flaws: Any) -> None:
    for start, options, lacking in (
        (f"{SOURCED} && ray start --head", [], []),
        ("ray start --head", OPTIONS, []),
        ("ray start --head", OPTIONS[:1], ["TLS"]),
        (f"{SOURCED}; ray start --head", [], ["a token", "TLS"]),  # goes on where the files are missing
        (f"{SOURCED} && export RAY_USE_TLS=0 && ray start --head", [], ["TLS"]),
        ("RAY_AUTH_MODE=disabled ray start --head", OPTIONS, ["a token"]),
        (f"ray start --head # {SOURCED} && RAY_AUTH_MODE=token RAY_USE_TLS=1", [], ["a token", "TLS"]),
    ):
        docker = {**filled["docker"], "run_options": options}
        texts = flaws(copy.deepcopy({**filled, "head_start_ray_commands": [start], "docker": docker}))
        assert [gap for gap in ("a token", "TLS") if any(f"without {gap}" in each for each in texts)] == lacking, start


def test_pods_use_token_and_tls_share_a_volume_and_have_one_gpu(content: dict[str, Any], check: dict[str, Any]) -> None:
    """No Kubernetes is started."""
    volume, cluster = yaml.safe_load_all((ROOT / "cluster" / "kuberay.yaml").read_text())
    spec, options = cluster["spec"], content["docker"]["run_options"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["tlsOptions"] == {"enabled": True}
    assert spec["enableInTreeAutoscaling"] is True
    assert {group["groupName"]: group["minReplicas"] for group in spec["workerGroupSpecs"]} == {"gpu": 1, "cpu": 0}
    assert all(group["minReplicas"] <= group["maxReplicas"] for group in spec["workerGroupSpecs"])
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": volume["metadata"]["name"]}} in pod["volumes"]
        assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
        (limit,) = (each["value"] for each in container["env"] if each["name"] == "RAY_max_direct_call_object_size")
        assert f"--env RAY_max_direct_call_object_size={limit}" in options
        assert container["resources"]["requests"] == container["resources"]["limits"]
    image = content["docker"]["image"]
    text, base_flaws = (ROOT / "cluster" / "Dockerfile").read_text(), check["base_flaws"]
    assert f"ARG BASE={image}@sha256:REPLACE" in text.splitlines()
    assert base_flaws(text, template=True) == base_flaws(text.replace("sha256:REPLACE", "sha256:" + 64 * "a")) == []
    for wrong in (text, text.replace("@sha256:REPLACE", ""), text.replace("REPLACE", "abc"), "FROM python:3.11"):
        assert len(base_flaws(wrong)) == 1
    assert image.startswith(f"rayproject/ray:{spec['rayVersion']}-")
