"""The cluster of cluster/aws.yaml from ``ray up`` to ``ray down``, on an emulated EC2.

Real: Ray's launcher, its AWS node provider, and every request to EC2. Emulated: EC2 and IAM (moto, on the loopback
interface), whose machines run nothing. ``ssh`` and ``rsync`` are scripts that write down what they were to do, so no
test here shows that a machine of EC2 comes up with Ray on it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

SSH = """#!/bin/sh
for last; do :; done
printf '%s\\0' "$last" >> "$LOGS/ssh"
case $last in
  *"command -v docker"*) echo /usr/bin/docker ;;
  *"printenv HOME"*) echo /home/ray ;;
  *".Config.Env"*) echo '["HOME=/home/ray"]' ;;
esac
"""
"""Answers what Ray asks of a machine that has Docker."""

RSYNC = """#!/bin/sh
for last; do before=$source source=$last; done
echo "$before ${last#*:}" >> "$LOGS/rsync"
"""


@dataclass(frozen=True)
class Cloud:
    """The emulated EC2 of one user, with what the header of cluster/aws.yaml asks to make."""

    ec2: Any
    group: str
    subnet: str
    profile: str
    folder: Path

    def ray(self, *words: str) -> None:
        command = [Path(sys.executable).parent / "ray", *words, "cluster.yaml"]
        where, closed = self.folder / "code", subprocess.DEVNULL
        done = subprocess.run(command, cwd=where, stdin=closed, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def nodes(self, state: str = "running") -> list[dict[str, Any]]:
        wanted = [{"Name": "instance-state-name", "Values": [state]}]
        reservations = self.ec2.describe_instances(Filters=wanted)["Reservations"]
        return [node for reservation in reservations for node in reservation["Instances"]]

    def log(self, name: str, end: str) -> list[str]:
        return (self.folder / "logs" / name).read_text().split(end)[:-1]


def tags(node: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in node["Tags"]}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """After ``ray up`` of cluster/aws.yaml; what belongs to it lies in ``Cloud.folder``."""
    import boto3
    from moto.server import ThreadedMotoServer

    folder = tmp_path_factory.mktemp("aws")
    for name in ("bin", "logs", "tmp", "home"):
        (folder / name).mkdir()
    for name, text in (("ssh", SSH), ("rsync", RSYNC)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o700)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()), "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_EC2_METADATA_DISABLED": "true", "LOGS": str(folder / "logs"),
            "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        account = _account(boto3, folder)
        shutil.copytree(ROOT / "cluster", folder / "code" / "cluster")
        (folder / "code" / "cluster.yaml").write_text(_filled(account))
        secrets = ["sh", "cluster/secrets.sh", "10.0.1.0/24"]
        subprocess.run(secrets, cwd=folder / "code", check=True, capture_output=True)
        account.ray("up", "-y", "--no-config-cache")
        yield account
    server.stop()


def _account(boto3: Any, folder: Path) -> Cloud:
    ec2, iam = (boto3.client(name, region_name="us-west-2") for name in ("ec2", "iam"))
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
    group = ec2.create_security_group(GroupName="fedcommons", Description="fedcommons", VpcId=vpc)["GroupId"]
    profile = iam.create_instance_profile(InstanceProfileName="fedcommons-head")["InstanceProfile"]["Arn"]
    return Cloud(ec2, group, subnet, profile, folder)


def _filled(cloud: Cloud) -> str:
    """The file of the repository with its placeholders replaced."""
    text = (ROOT / "cluster" / "aws.yaml").read_text().partition("cluster_name:")
    body = text[1] + text[2]
    image = cloud.ec2.describe_images()["Images"][0]["ImageId"]
    for old, new in (
        ("ami-REPLACE", image), ("subnet-REPLACE", cloud.subnet), ("sg-REPLACE", cloud.group),
        ("fs-REPLACE", "fs-12345678"), ("arn:aws:iam::REPLACE:instance-profile/fedcommons-head", cloud.profile),
    ):  # fmt: skip
        assert old in body
        body = body.replace(old, new)
    assert "REPLACE" not in body
    return body


def test_ray_up_launches_one_head_as_the_file_says_and_makes_no_group_role_or_profile(cloud: Cloud) -> None:
    """Ray's own group is open to SSH from everywhere, and its role has all rights on EC2."""
    import boto3

    (head,) = cloud.nodes()
    assert (head["InstanceType"], head["SubnetId"]) == ("m7i.2xlarge", cloud.subnet)
    assert head["IamInstanceProfile"]["Arn"] == cloud.profile
    assert [group["GroupId"] for group in head["SecurityGroups"]] == [cloud.group]
    assert head["MetadataOptions"]["HttpTokens"] == "required"
    assert "InstanceLifecycle" not in head  # no spot
    assert (tags(head)["ray-cluster-name"], tags(head)["ray-node-status"]) == ("fedcommons", "up-to-date")
    groups = {group["GroupName"]: group for group in cloud.ec2.describe_security_groups()["SecurityGroups"]}
    assert groups.keys() == {"default", "fedcommons"}
    assert groups["fedcommons"]["IpPermissions"] == []  # it adds nothing to ours
    iam = boto3.client("iam", region_name="us-west-2")
    assert iam.list_roles()["Roles"] == []
    assert [profile["Arn"] for profile in iam.list_instance_profiles()["InstanceProfiles"]] == [cloud.profile]
    secrets = cloud.folder / "home" / ".fedcommons"
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o600}
    certificate = secrets / "node.crt"
    for address, fits in ((head["PrivateIpAddress"], True), ("10.0.1.254", True), ("10.0.2.1", False)):
        asked = ["openssl", "x509", "-in", certificate, "-noout", "-checkip", address]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert ("does match" in answer) == fits, answer


def test_the_code_and_the_secrets_go_up_and_the_container_has_the_variables_of_environment_sh(cloud: Cloud) -> None:
    """And of Ray its config and key. Drivers of ``ray exec`` start in there by no command of ours."""
    home = cloud.folder / "home"
    code, secret, config, key = (line.split()[0] for line in cloud.log("rsync", "\n"))
    assert (code, secret) == ("./", f"{home / '.fedcommons'}/")
    assert Path(config).name.startswith("ray-bootstrap-")
    assert key == str(home / ".ssh" / "ray-autoscaler_us-west-2.pem")
    (run,) = (line for line in cloud.log("ssh", "\0") if "docker run" in line)
    words = run.split()
    set_there = {words[at + 1] for at, word in enumerate(words) if word == "--env"}
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    source = ["sh", "-c", ". cluster/environment.sh && env"]
    listed = subprocess.run(source, cwd=ROOT, capture_output=True, text=True, env=environment, check=True).stdout
    lines = [line for line in listed.splitlines() if line.startswith(("RAY_", "AUTOSCALER_", "DASHBOARD_"))]
    assert set_there == {line.replace(str(home), "/home/ray") for line in lines}


def test_after_ray_down_nothing_runs(cloud: Cloud) -> None:
    """The last test of this cluster."""
    assert cloud.nodes()
    assert cloud.ec2.describe_volumes()["Volumes"]
    cloud.ray("down", "-y")
    assert cloud.nodes() == cloud.nodes("pending") == cloud.nodes("stopped") == []
    assert cloud.ec2.describe_volumes()["Volumes"] == []
