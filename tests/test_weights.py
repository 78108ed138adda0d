"""Frozen parameters, which are not sent, counted, measured or trained, and files of weights to start from."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedcommons import experiment, run
from fedcommons.config import parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import deciding, from_dict, to_dict
from fedcommons.convergence import per_sample
from fedcommons.convergence.smoothness import hessian_vector
from fedcommons.errors import UserError
from fedcommons.federation.memory import ClientMemory
from fedcommons.runs import build
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import noise_key
from fedcommons.testing import digits

NET = """
from torch import nn


class Tuned(nn.Module):
    def __init__(self, shape, n_classes, frozen: bool = True):
        super().__init__()
        self.body = nn.Linear(64, 16).requires_grad_(not frozen)
        self.last = nn.Linear(16, n_classes)

    def forward(self, x):
        return self.last(self.body(x.flatten(1)).relu())
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(parts.HERE, str(tmp_path))
    return tmp_path


def asked(**values: object) -> Experiment:
    few = {"data.limit": 80, "federation.rounds": 2, "model.name": "mine.py:Tuned", "tracking.wandb": "off"}
    return experiment("smoke", values={**few, **{n.replace("__", "."): v for n, v in values.items()}})


def state() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    shapes = {"body.weight": (16, 64), "body.bias": (16,), "last.weight": (10, 16), "last.bias": (10,)}
    return {name: torch.randn(shape, generator=draws) / 10 for name, shape in shapes.items()}


def _torch(what: object) -> Callable[[Path], object]:
    return lambda path: torch.save(what, path)


def _saved(tensors: dict[str, Tensor]) -> Callable[[Path], object]:
    return lambda path: save_file(tensors, path)


@pytest.mark.long
def test_frozen_parameters_stay_the_modules_own_and_are_neither_sent_nor_counted(lab: Path) -> None:
    save_file(state(), lab / "start.safetensors")
    result = run(asked(model__weights="start.safetensors", measure__every=0), lab / "run", say=lambda _: None)
    model, sent = result.model, 10 * 16 + 10
    found = {name.removeprefix("network."): p for name, p in model.state_dict().items()}
    for name, start in state().items():
        assert torch.equal(found[name], start) == name.startswith("body"), name
    down = result.rounds["comm/down_bytes"].iloc[-1]
    assert down == 4 * sent * result.summary["n_clients"]


def test_zeta_sigma_and_the_hessian_ignore_frozen_parameters() -> None:
    """The parts of the whole gradient, and the block of the whole Hessian, in the rows and columns that are trained."""
    federation, frozen = digits(), "network.last.bias"
    batch = federation.data.clients[1].columns
    whole, part = federation.module(), federation.module()
    part.get_parameter(frozen).requires_grad = False
    kept = torch.cat([torch.full((p.numel(),), name != frozen) for name, p in whole.named_parameters()])
    mean, sq_norms = per_sample.gradients(part, batch)
    assert torch.allclose(mean, per_sample.gradients(whole, batch)[0][kept], rtol=0, atol=1e-6)
    each = [per_sample.gradients(part, [t[i : i + 1] for t in batch])[0] for i in range(len(batch[1]))]
    assert torch.allclose(sq_norms, torch.stack([g.square().sum() for g in each]), rtol=1e-4)
    v = torch.zeros(len(kept), dtype=torch.float64)
    v[kept] = torch.randn(int(kept.sum()), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    along = hessian_vector(part, [batch], v[kept])
    assert torch.allclose(along, hessian_vector(whole, [batch], v)[kept], rtol=0, atol=1e-5)


@pytest.mark.long
def test_every_worker_starts_from_the_file(lab: Path) -> None:
    """A checkpoint of Lightning, in half precision."""
    _torch({"state_dict": {f"network.{n}": t.half() for n, t in state().items()}, "e": 3})(lab / "half.ckpt")
    ready = build.assemble(prepare(asked(model__weights="half.ckpt")))
    executor = ready.executor()
    work = executor.worker.work  # pyright: ignore[reportAttributeAccessIssue]
    for name, tensor in state().items():
        assert torch.equal(work.module.get_parameter(f"network.{name}"), tensor.half().float())
    start = ready.start(ClientMemory()).model
    assert torch.equal(start["network.last.bias"], work.initial["network.last.bias"])
    executor.close()


def _bomb(path: Path) -> None:
    torch.save({"x": torch.zeros(2**20)}, path)
    with zipfile.ZipFile(path) as packed:
        inside = {one: packed.read(one) for one in packed.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for one, data in inside.items():
            packed.writestr(one, data)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("run_by_a_file").write_text, ("",))


def _less(*names: str) -> dict[str, Tensor]:
    return {n: t for n, t in state().items() if n not in names}


NAN = torch.full((10,), float("nan"))
OTHERS = {**_less("body.bias", "last.bias"), "head.bias": torch.zeros(3)}
WRONG: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "absent.pt": (lambda path: None, "cannot be read"),
    "lacking.safetensors": (
        _saved(_less("body.bias", "last.weight", "last.bias")),
        r"lacks (\S+, ){2}network.last.bias(?! and)",
    ),
    "others.safetensors": (_saved(OTHERS), "lacks network.body.bias, .*has network.head.bias besides"),
    "shape.safetensors": (_saved({**state(), "last.bias": torch.zeros(3)}), r"network.last.bias is .*\(3,\)"),
    "kind.safetensors": (_saved({**state(), "last.bias": NAN.to(torch.int64)}), "network.last.bias is torch.int64"),
    "nan.safetensors": (_saved({**state(), "last.bias": NAN}), "network.last.bias .*not finite"),
    "bomb.pt": (_bomb, "unpacks to .* bytes, and at most"),
    "text.safetensors": (lambda path: path.write_text("weights"), "cannot be read as weights"),
    "code.pt": (_torch({"last.bias": _Code()}), "cannot be read as weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_sentence(name: str, lab: Path) -> None:
    make, words = WRONG[name]
    make(lab / name)
    with pytest.raises(UserError, match=words):
        prepare(asked(model__weights=name))
    assert not Path("run_by_a_file").exists()


def test_a_file_of_other_content_is_another_experiment(lab: Path) -> None:
    save_file(state(), lab / "start.safetensors")
    first = asked(model__weights="start.safetensors")
    assert deciding(first)["source.weights"]
    assert from_dict(to_dict(first)).source == first.source
    save_file({n: t + 1 for n, t in state().items()}, lab / "start.safetensors")
    second = asked(model__weights="start.safetensors")
    assert noise_key(first) != noise_key(second)
    with pytest.raises(UserError, match=r"'?start.safetensors'? is not the file it was when this experiment was"):
        prepare(first)
