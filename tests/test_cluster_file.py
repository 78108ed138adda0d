"""ray_cluster.yaml is what ``ray up`` accepts; a real cluster is another test's."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def validate(content: dict) -> None:
    from ray.autoscaler._private.util import (
        prepare_config,
        validate_config,
    )  # what `ray up` calls; it has no public name

    validate_config(prepare_config(content))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray warns of its own old modules
def test_the_cluster_file_is_valid_and_a_broken_one_is_not() -> None:
    content = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    validate(dict(content))
    with pytest.raises(Exception, match="shm_size"):
        validate(content | {"docker": content["docker"] | {"shm_size": "1g"}})


def test_the_cluster_keeps_token_authentication_on() -> None:
    content = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    for command in (content["head_start_ray_commands"][-1], content["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token" in command
