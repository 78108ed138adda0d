"""An EC2 for tests, and a user who has run ``ray up`` on it.

EC2 and IAM are emulated (moto, on the loopback interface): their machines run nothing. So ``ssh`` and ``rsync`` are
scripts that write down what they were to do, and no packet leaves this machine.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

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
    """The emulated EC2 of one user, with what the header of ray_cluster.yaml asks to make."""

    ec2: Any
    group: str
    subnet: str
    profile: str
    folder: Path

    def ray(self, *words: str) -> None:
        command = [Path(sys.executable).parent / "ray", *words, "cluster.yaml"]
        done = subprocess.run(
            command, cwd=self.folder / "code", stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def nodes(self, state: str = "running") -> list[dict[str, Any]]:
        wanted = [{"Name": "instance-state-name", "Values": [state]}]
        found = self.ec2.describe_instances(Filters=wanted)["Reservations"]
        return [node for reservation in found for node in reservation["Instances"]]

    def log(self, name: str, end: str) -> list[str]:
        return (self.folder / "logs" / name).read_text().split(end)[:-1]


def tags(node: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in node["Tags"]}


@contextmanager
def launched(folder: Path) -> Iterator[Cloud]:
    """After ``ray up`` of ray_cluster.yaml; what belongs to it lies in ``folder``."""
    import boto3
    from moto.server import ThreadedMotoServer

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
        made = _account(boto3, folder)
        shutil.copytree(ROOT / "cluster", folder / "code" / "cluster")
        (folder / "code" / "cluster.yaml").write_text(_filled(made))
        subprocess.run(
            ["sh", "cluster/secrets.sh", "10.0.1.0/24"], cwd=folder / "code", check=True, capture_output=True
        )
        made.ray("up", "-y", "--no-config-cache")
        yield made
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
    text = (ROOT / "ray_cluster.yaml").read_text().partition("cluster_name:")
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
