"""``cluster/kuberay.yaml`` has the fields that KubeRay knows; no Kubernetes is started."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((Path(__file__).parent / "kuberay.json").read_text())


@pytest.fixture
def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume and the cluster."""
    volume, cluster = yaml.safe_load_all((ROOT / "cluster" / "kuberay.yaml").read_text())
    return volume, copy.deepcopy(cluster)  # what anchors share is then its own


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's group and those of workers."""
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def test_every_field_is_one_of_kuberays(documents: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(documents[1], SCHEMA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(autoscalerOption={}), "'autoscalerOption' was unexpected"),
        (lambda spec: spec["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
        (lambda spec: spec["workerGroupSpecs"][0].update(maxReplica=1), "'maxReplica' was unexpected"),
        (lambda spec: spec["workerGroupSpecs"][1].pop("minReplicas"), "'minReplicas' is a required property"),
        (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "0 is not of type 'string'"),
        (lambda spec: spec["workerGroupSpecs"][0]["rayStartParams"].update(labels="a=b"), "'labels' should not be"),
    ],
)
def test_a_misspelt_field_is_refused(change: Callable[[dict[str, Any]], None], said: str, documents: Any) -> None:
    change(documents[1]["spec"])
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(documents[1], SCHEMA)


def test_it_asks_for_a_token_and_tls_and_scales_to_nothing_but_one_gpu(documents: Any) -> None:
    spec = documents[1]["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["tlsOptions"] == {"enabled": True}
    assert spec["enableInTreeAutoscaling"] is True
    assert {group["groupName"]: group["minReplicas"] for group in spec["workerGroupSpecs"]} == {"gpu": 1, "cpu": 0}
    assert all(group["minReplicas"] <= group["maxReplicas"] for group in spec["workerGroupSpecs"])


def test_all_pods_have_the_volume_and_the_limit_of_a_calls_size(documents: Any) -> None:
    volume, cluster = documents
    aws = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())["docker"]["run_options"]
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups(cluster):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": volume["metadata"]["name"]}} in pod["volumes"]
        assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
        (limit,) = (each["value"] for each in container["env"] if each["name"] == "RAY_max_direct_call_object_size")
        assert f"--env RAY_max_direct_call_object_size={limit}" in aws
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_image_is_that_of_the_other_clusters(documents: Any) -> None:
    image = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())["docker"]["image"]
    lines = (ROOT / "cluster" / "Dockerfile").read_text().splitlines()
    assert f"FROM {image}" in lines
    assert image.startswith(f"rayproject/ray:{documents[1]['spec']['rayVersion']}-")
