"""Nodes of several kinds: what their labels say, which kind is chosen, and that nothing of ours runs on another.

This file is also a driver: run as a script it starts nodes of two kinds and says where its processes were.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.sections import Federation
from fedcommons.errors import UserError
from fedcommons.federation import cluster, kinds
from fedcommons.federation.evaluation import ModelTask
from fedcommons.federation.kinds import CHOICE, CPU, GPU, TORCH

OURS = kinds.labels()[TORCH]
INTEL = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nflags\t\t: fpu sse4_1 avx avx2 avx512f"
)
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def node(cpu: str = "", torch: str = OURS, cores: float = 2, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ``ray.nodes()`` has it."""
    labels = {CPU: cpu, TORCH: torch} if cpu else {}
    labels |= {GPU: "A10G"} if resources else {}
    return {"Alive": alive, "Labels": labels, "Resources": {"CPU": cores, "memory": 1e9, **resources}}


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        (INTEL, "intel-6-143-avx512"),
        (f"{INTEL} amx_tile", "intel-6-143-amx"),
        (INTEL.replace("avx2 avx512f", "avx2"), "intel-6-143-avx2"),
        (INTEL.replace("GenuineIntel", "AuthenticAMD").replace("143", "49"), "amd-6-49-avx512"),
        (INTEL.replace("GenuineIntel", "Other Maker, Inc."), "Other-Maker-Inc.-6-143-avx512"),
    ],
)
def test_a_cpu_is_named_by_its_maker_model_and_widest_instructions(text: str, is_said: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"{text}\n\n{text.replace('143', '7')}\n"
    )  # a machine's first core stands for all
    assert kinds.cpu(tmp_path / "cpuinfo") == is_said


def test_arm_and_systems_without_cpuinfo_are_named_too(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    assert kinds.cpu(tmp_path / "cpuinfo").endswith("-0x41-0xd40")
    assert kinds.cpu(tmp_path / "absent")


def test_ray_takes_the_labels_that_the_module_prints() -> None:
    from ray._private.label_utils import parse_node_labels_string

    said = subprocess.run([sys.executable, "-m", "fedcommons.federation.kinds"], capture_output=True, text=True)
    assert parse_node_labels_string(said.stdout.strip()) == kinds.labels()


def test_the_kind_with_the_most_cores_is_chosen_and_the_choice_of_a_user_before_it(monkeypatch: Any) -> None:
    nodes = [node("b", cores=3), node("a"), node("a"), node("c", cores=99, alive=False), node(cores=99)]
    assert kinds.chosen(nodes, 0) == {CPU: "a", TORCH: OURS}
    assert kinds.chosen([node("b"), node("a")], 0)[CPU] == "a"  # of equal ones the first by name, whatever their order
    assert kinds.resources(nodes, {CPU: "a"})["CPU"] == 4
    assert kinds.described(nodes, kinds.chosen(nodes, 0)) == (
        f"2 node(s) a, not on 1 node(s) b with torch {OURS}, not on 1 node(s) unlabelled with torch unlabelled"
    )
    monkeypatch.setenv(CHOICE, "b")
    assert kinds.chosen(nodes, 0)[CPU] == "b"
    monkeypatch.setenv(CHOICE, "bb")
    with pytest.raises(UserError, match=r"no node is of the kind 'bb'; did you mean 'b'\? The nodes have a, b\."):
        kinds.chosen(nodes, 0)
    with pytest.raises(UserError, match=r"No node of Ray has a label"):
        kinds.chosen([node()], 0)


def test_gpus_decide_where_they_are_asked_for() -> None:
    nodes = [node("a", cores=99), node("b", GPU=1)]
    assert kinds.chosen(nodes, 0)[CPU] == "a"
    assert kinds.chosen(nodes, 0.25) == {CPU: "b", TORCH: OURS, GPU: "A10G"}


def test_nodes_with_another_torch_have_no_part_in_it_and_are_refused_where_all_have(monkeypatch: Any) -> None:
    nodes = [node("a", torch="1.0", cores=9), node("a")]
    assert kinds.resources(nodes, kinds.chosen(nodes, 0))["CPU"] == 2
    with pytest.raises(UserError, match=r"the nodes of Ray have torch 1\.0, and torch is .* here"):
        kinds.chosen(nodes[:1], 0)
    monkeypatch.setenv(CHOICE, "b")
    with pytest.raises(UserError, match=r"the nodes of Ray have torch 0\.9, and torch is .* here"):
        kinds.chosen([*nodes, node("b", torch="0.9")], 0)


def test_a_ray_without_labels_is_used_as_it_is() -> None:
    assert kinds.chosen([node(), node()], 0) == {}
    assert kinds.described([node(), node()], {}) == "2 node(s)"


def where(worker: Any, shared: Any, job: int) -> str:
    """The labels of the node where an actor lies."""
    import ray

    labels = ray.get_runtime_context().get_node_labels()
    return f"{labels[CPU]} {labels[TORCH]}"


def pinned(path: Path) -> None:
    """Three nodes, each of another kind: where actors and trials were, and what was refused."""
    import ray
    from ray import tune
    from ray.cluster_utils import Cluster

    from fedcommons.federation.ray_actors import RayActors
    from fedcommons.sweeping.trials import resources
    from fedcommons.testing import digits

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {CPU: "odd", TORCH: OURS}})
    nodes.add_node(num_cpus=3, labels={CPU: kinds.cpu(), TORCH: "1.0"})
    nodes.add_node(num_cpus=2, labels={CPU: kinds.cpu(), TORCH: OURS})
    os.environ["RAY_ADDRESS"] = str(nodes.address)
    cluster.connect()
    federation = digits()
    actors = RayActors(federation.build(FedAvg()), federation.data, 2, 0)
    at = actors.map(where, ModelTask(federation.model), [0, 1])
    found: dict[str, Any] = {"actors": at, "said": cluster.describe(0)}
    actors.close()

    def trial(config: dict[str, Any]) -> None:
        tune.report({"at": where(None, None, 0)})

    for name, f in (("serial", Federation()), ("with actors", Federation(executor="ray_actors", actors=2))):
        trainable = tune.with_resources(trial, partial(resources, f, cluster.pinned(0)))
        run = tune.RunConfig(storage_path=str(path.parent / name), verbose=0)
        tuned = tune.Tuner(trainable, tune_config=tune.TuneConfig(num_samples=3), run_config=run).fit()
        found[name] = [result.metrics["at"] if result.metrics else str(result.error) for result in tuned]
    for name, refused in (
        ("too many", lambda: cluster.require_actors(3, 0)),
        ("another label", lambda: RayActors(federation.build(FedAvg()), federation.data, 1, 0)),
    ):
        try:
            refused()
        except UserError as error:
            found[name] = str(error)
        os.environ[CHOICE] = "odd"  # which this machine is not
    path.write_text(json.dumps(found), encoding="utf-8")
    ray.shutdown()
    nodes.shutdown()


def chosen_by_a_driver(path: Path) -> None:
    """A run with an actor in a sweep whose driver alone knows the choice: more cores are of another kind."""
    import ray
    from ray.cluster_utils import Cluster

    from fedcommons.config import presets
    from fedcommons.sweeping.display import Display
    from fedcommons.sweeping.sweep import Todo, Trial, run_cells

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {CPU: kinds.cpu(), TORCH: OURS}})
    nodes.add_node(num_cpus=2, labels={CPU: "odd", TORCH: OURS})
    os.environ |= {"RAY_ADDRESS": str(nodes.address), CHOICE: kinds.cpu()}
    fields = {
        "federation.executor": "ray_actors", "federation.actors": 1, "federation.rounds": 1, "data.limit": 80,
        "tracking.wandb": "off",
    }  # fmt: skip
    cell = Trial("cell", presets.experiment("smoke", "digits", fields))
    path.parent.joinpath("out").mkdir()
    outcome = run_cells(Todo(1, [cell], []), path.parent / "out", Display(quiet=True))
    told = json.loads((path.parent / "out" / "cell" / "environment.json").read_text())
    path.write_text(json.dumps({"failures": outcome.failures, "kinds": told["cpu_kinds"]}), encoding="utf-8")
    ray.shutdown()
    nodes.shutdown()


def found_by(what: str, folder: Path) -> dict[str, Any]:
    """What this file as a driver finds."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:  # sockets lie there
        done = subprocess.run(
            [sys.executable, __file__, what, str(folder / "found.json")], capture_output=True, text=True, timeout=400,
            env={**os.environ, "RAY_TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.ray
def test_trials_on_other_machines_know_the_choice_of_their_driver(tmp_path: Path) -> None:
    assert found_by("chosen_by_a_driver", tmp_path) == {"failures": {}, "kinds": [kinds.cpu()]}


@pytest.mark.ray
def test_actors_and_trials_stay_on_nodes_of_one_kind(tmp_path: Path) -> None:
    found = found_by("pinned", tmp_path)
    ours = f"{kinds.cpu()} {OURS}"
    assert found["actors"] == [ours] * 2
    assert found["serial"] == found["with actors"] == [ours] * 3
    assert found["said"].startswith(f"2 cores, 0 GPUs, 1 node(s) {kinds.cpu()}, not on")
    assert "Ray has 2, room for 2 such actors" in found["too many"]
    assert found["another label"].startswith(f"a node of Ray has the label {CPU}: odd, and is {kinds.cpu()}; correct")


if __name__ == "__main__":
    {"pinned": pinned, "chosen_by_a_driver": chosen_by_a_driver}[sys.argv[1]](Path(sys.argv[2]))
