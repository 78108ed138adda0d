"""Labels that are floats, or none: read, trained, shared and refused by what works by class; examples of any type."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons import ClientDatasets, Clients, Examples, Experiment, UserError
from fedcommons.config import presets
from fedcommons.data import user_data
from fedcommons.runs import build
from fedcommons.runs.experiment import run
from fedcommons.sharing.exchange import share
from fedcommons.sharing.real import ShuffledReal
from fedcommons.tracking.run_folder import read_class_counts
from lightning_modules import Regressor

N = 60
X = np.random.default_rng(0).standard_normal((N, 4))
REAL = X @ [1.0, -2.0, 0.5, 0.0]


def test_labels_that_are_no_classes_are_read() -> None:
    for y, shape, dtype in (
        (REAL.astype("f2"), (), torch.float32), (REAL[:, None], (), torch.float32),
        (np.stack([REAL, -REAL], 1), (2,), torch.float32), (np.arange(N) / 1, (), torch.float32),
        (None, (), torch.int64),
    ):  # fmt: skip
        result, _ = user_data.read("mine", (X, y))
        for part in (result.train, result.test):
            assert (part.y.shape[1:], part.y.dtype) == (shape, dtype)
        assert result.n_classes is None


def test_the_regressors_loss_is_the_mean_squared_error_weighted_by_examples() -> None:
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    module, x = Regressor(network, lr=0.1), torch.randn(9, 4)
    y, weight = torch.randn(9, 2), torch.rand(9)
    errors = (network(x) - y).square().mean(1)
    assert torch.allclose(module.training_step((x, y), 0), errors.mean())
    assert torch.allclose(module.training_step((x, y, weight), 0), (weight * errors).mean())


PARTS = """
import numpy as np
from torch import nn

X = np.random.default_rng(0).standard_normal((200, 4)).astype("float32")


def reals():
    return X, X @ np.array([1.0, -2.0, 0.5, 0.0], "float32")


def numbers():
    return X[:, 0], X[:, 1]


def nothing():
    return X, None


class WideNetwork(nn.Linear):
    def __init__(self):
        super().__init__(7, 1)

    def forward(self, x):
        return super().forward(x)
"""


@pytest.fixture
def lab(tmp_path: Path) -> str:
    (tmp_path / "lab.py").write_text(PARTS)
    return str(tmp_path / "lab.py")


def experiment(lab: str, data: str, **values: Any) -> Experiment:
    fields = {
        "data.name": f"{lab}:{data}", "data.limit": None, "model.name": "linear", "partition.name": "iid",
        "partition.n_clients": 4, "federation.rounds": 3, "tracking.wandb": "off", "client.lr": 0.05, **values,
    }  # fmt: skip
    return presets.experiment("smoke", values=fields)


@pytest.mark.long
def test_real_labels_are_shared_and_judged_by_the_loss_alone(lab: str, tmp_path: Path) -> None:
    config, lines = experiment(lab, "reals", **{"sharing.setting": "shuffled_real", "sharing.p": 0.5}), []
    summary = run(config, tmp_path / "run", say=lambda _: None, on_round=lambda _, metrics: lines.append(dict(metrics)))
    assert lines[-1]["test/loss"] < lines[0]["test/loss"] / 2
    assert not [name for line in lines for name in line if "accuracy" in name]
    assert summary["last_accuracy"] is None
    assert read_class_counts(tmp_path / "run") == []
    store = Examples(torch.zeros(80, 30), torch.linspace(-1, 1, 80))
    client_data = ClientDatasets(Clients(store, list(np.arange(80).reshape(4, 20))), None, False, 0)
    assert share(ShuffledReal(0.5), client_data).traffic.once == 2 * 40 * (4 * 30 + 4)


@pytest.mark.parametrize(
    ("data", "fields", "words"),
    [("reals", {"partition.name": "dirichlet_niid"}, "dirichlet_niid divides classes"),
     ("reals", {"sharing.setting": "shuffled_synthetic"}, "torch.float32 examples"),
     ("reals", {"algorithm": "feddm"}, "feddm works by class"), ("nothing", {}, "model.name linear needs labels"),
     ("numbers", {}, "model.name linear needs examples with at least one axis.*reshape"),
     ("reals", {"model.name": "lab.py:WideNetwork"}, r"2x4 and 7x1")],
)  # fmt: skip
def test_what_works_by_class_is_refused(data: str, fields: dict[str, Any], words: str, lab: str) -> None:
    with pytest.raises(UserError, match=words):
        build.build(experiment(lab, data, **{n: value.replace("lab.py", lab) for n, value in fields.items()}))


def test_a_hugging_face_set_is_taken_with_its_groups() -> None:
    hugging_face = pytest.importorskip("datasets")
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (N, 8, 8), dtype=np.uint8)
    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.ClassLabel(num_classes=3)})
    rows = {"image": [Image.fromarray(image) for image in images], "label": [i % 3 for i in range(N)]}
    dataset = hugging_face.Dataset.from_dict(rows, features=features)
    result, _ = user_data.read("mine", hugging_face.DatasetDict({"train": dataset, "test": dataset}))
    assert torch.equal(result.train.x[:, 0], torch.from_numpy(images))
    assert (result.n_classes, result.train.y.tolist()) == (3, rows["label"])
    named = dataset.add_column("group", [f"writer {i % 4}" for i in range(N)])
    result, origin = user_data.read("mine", named)
    assert result.train.groups is not None
    assert result.train.groups.tolist() == (origin.rows % 4).tolist()
    texts = hugging_face.Dataset.from_dict({"ids": [[1] * (1 + i % 3) for i in range(N)], "label": rows["label"]})
    result, _ = user_data.read("mine", {"x": {"ids": texts["ids"]}, "y": texts["label"], "pad": 0})
    assert result.inputs == (("ids", (3,)),)
    with pytest.raises(UserError, match="sets named train and test"):
        user_data.read("mine", hugging_face.DatasetDict({"train": dataset, "validation": dataset}))
