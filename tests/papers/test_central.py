"""Central training: a plain Trainer on the clients' classifier, keyed like everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.schema import Data
from fedcommons.data.examples import Dataset
from fedcommons.generators import image_cache
from fedcommons.generators.image_cache import Job, JobResult
from fedcommons.runs.build import build, load
from fedcommons.storage.artifact_store import Store
from lightning_modules import Classifier
from lightning_modules.networks import CNN
from papers.fedssyn import central
from papers.fedssyn.central import Central


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load(Data("digits"))


@pytest.mark.long
def test_it_learns_digits_and_the_same_seed_gives_the_same_bits(digits: Dataset) -> None:
    def trained(seed: int, epochs: int = 1) -> tuple[list[float], Tensor]:
        """Accuracies and weights of a small network with dropout, always from the same initial weights."""
        torch.manual_seed(0)
        network = CNN(digits.shape, 10, channels=(8, 8), hidden=32)
        network.hidden = nn.Sequential(network.hidden, nn.Dropout(0.1))  # pyright: ignore[reportAttributeAccessIssue]
        module = Classifier(network, lr=0.1, mean=digits.mean, std=digits.std)
        torch.seed()  # what state the default generator is in must not matter
        accuracies = central.fit(module, central.Batches(digits.train, 16, seed), digits.test, epochs)
        return accuracies, nn.utils.parameters_to_vector(module.parameters()).detach()

    accuracies, _ = trained(0, epochs=3)
    assert accuracies[-1] > 0.85  # 0.91 to 0.95 for seeds 0 to 4; chance is 0.1
    (first,), once = trained(0)
    assert first == accuracies[0]
    assert torch.equal(trained(0)[1], once)
    assert not torch.equal(trained(1)[1], once)


def smoke(**fields: Any) -> Experiment:
    return presets.experiment("smoke", "digits", {k.replace("__", "."): v for k, v in fields.items()})


def test_a_finished_training_is_read_not_repeated(tmp_path: Path) -> None:
    line = Central("central_real", smoke(seed=2), epochs=2)
    summary = central.run(line, tmp_path / line.name)
    assert summary["images"] == 200  # data.limit of the preset
    dataset = build(line.config).dataset  # of 359 test images, so that only their accuracy is a multiple of 1/359
    for name, examples in (("last_accuracy", dataset.test), ("validation_accuracy", dataset.validation)):
        right = summary[name] * len(examples)
        assert right == pytest.approx(round(right), abs=1e-6), name
        assert 0 < right < len(examples)
    assert summary["last_accuracy"] == summary["accuracies"][-1]
    assert summary["last_accuracy"] <= summary["best_accuracy"] == max(summary["accuracies"])
    assert central.run(line, tmp_path / "another") == summary
    file = tmp_path / line.name / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "last_accuracy": 0.123}))
    assert central.run(line, tmp_path / line.name)["last_accuracy"] == 0.123


def test_central_synthetic_trains_on_what_the_clients_contribute(tmp_path: Path) -> None:
    config = smoke(sharing__setting="shuffled_synthetic", sharing__p=0.2, artifacts=str(tmp_path / "store"))
    line = Central("central_synthetic", config, epochs=1)
    with pytest.raises(LookupError, match="have not been generated"):
        central.run(line, tmp_path / "out")
    store = Store(tmp_path / "store")
    for need in build(config).requests:  # grey images stand for what generators would draw
        grey = torch.full((len(need.labels), 1, 8, 8), 128, dtype=torch.uint8)
        image_cache.keep(store, Job([need], {}), JobResult({}, [grey]))
    summary = central.run(line, tmp_path / "out")
    assert summary["images"] == pytest.approx(0.2 / 0.8 * 200, abs=2)
    assert summary["partition"] == build(config).partition.fingerprint


def test_a_folder_is_named_by_all_that_decides_the_result_and_nothing_else() -> None:
    def name(source: str, epochs: int = 3, **fields: Any) -> str:
        setting = {} if source == "central_real" else {"sharing__setting": "shuffled_synthetic"}
        return Central(source, smoke(**{**setting, **fields}), epochs).name

    real, synthetic = name("central_real"), name("central_synthetic")
    assert real == name("central_real", partition__alpha=0.5, sharing__setting="shuffled_real", sharing__p=0.5)
    assert synthetic == name("central_synthetic", sharing__setting="local_synthetic", federation__rounds=7)
    others = [name("central_real", epochs=4), name("central_real", seed=1), name("central_real", client__lr=0.2)]
    others += [name("central_synthetic", partition__alpha=0.5), name("central_synthetic", sharing__p=0.3)]
    assert len({real, synthetic, *others}) == 7
