"""The cluster of ray_cluster.yaml from ``ray up`` to ``ray down``, on an emulated EC2.

Real: Ray's launcher, its AWS node provider, and every request to EC2. Emulated: EC2 and IAM, whose machines run
nothing; what would go to them by SSH is written down instead (see ec2.py). So no test here shows that a machine of EC2
comes up with Ray on it.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ec2
import pytest
from ec2 import Cloud, tags

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """After ``ray up``."""
    with ec2.launched(tmp_path_factory.mktemp("aws")) as made:
        yield made


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
    lines = [line for line in listed.splitlines() if line.startswith("RAY_")]
    assert set_there == {line.replace(str(home), "/home/ray") for line in lines}


def test_the_start_command_arrives_whole_in_the_container(cloud: Cloud, tmp_path: Path) -> None:
    """Through ssh, a shell, docker and two more shells, each of which takes quotes away."""
    start = cloud.log("ssh", "\0")[-1].replace("/home/ray", str(tmp_path))
    shutil.copytree(cloud.folder / "home" / ".fedcommons", tmp_path / ".fedcommons")
    shutil.copytree(ROOT / "cluster", tmp_path / "fedcommons" / "cluster")
    (tmp_path / ".bashrc").write_text(f"export PATH={tmp_path / 'bin'}:/usr/bin:/bin\n")
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("docker", 'while [ "$1" != /bin/bash ]; do shift; done; exec "$@"'),
        ("python", '[ "$*" = "-m fedcommons.federation.kinds" ] && echo fedcommons-cpu=a,fedcommons-torch=b'),
        ("ray", 'printf "%s\\n" "$@" > "$HOME/words"; env > "$HOME/env"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", f"bash --login -c -i {start}"], env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["start", "--head"]
    assert "--labels=fedcommons-cpu=a,fedcommons-torch=b" in words
    started = (tmp_path / "env").read_text().splitlines()
    assert {"RAY_AUTH_MODE=token", "RAY_USE_TLS=1", f"RAY_TLS_SERVER_CERT={tmp_path}/.fedcommons/node.crt"} <= {
        *started
    }


def test_after_ray_down_nothing_runs(cloud: Cloud) -> None:
    """The last test of this cluster."""
    assert cloud.nodes()
    cloud.ray("down", "-y")
    assert cloud.nodes() == cloud.nodes("pending") == cloud.nodes("stopped") == []
    assert cloud.ec2.describe_volumes()["Volumes"] == []
