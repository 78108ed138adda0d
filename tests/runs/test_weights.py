"""Files of weights to start from, with frozen parameters, and trained models from a folder of a run alone."""

import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from report_runs import quiet
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torchvision import models

from fedcommons import Experiment, Result, UserError, experiment, load, run
from fedcommons.config import registry
from fedcommons.config.dotted import deciding, from_dict, to_dict
from fedcommons.config.weights_file import digest
from fedcommons.convergence import per_sample
from fedcommons.convergence.smoothness import hessian_vector
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.runs import assemble, model_files
from fedcommons.runs.build import build, noise_key
from fedcommons.runs.build import load as load_data
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
    monkeypatch.setenv(registry.HERE, str(tmp_path))
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
    parameters = {name.removeprefix("network."): p for name, p in model.state_dict().items()}
    for name, start in state().items():
        assert torch.equal(parameters[name], start) == name.startswith("body"), name
    down = result.rounds["comm/down_bytes"].iloc[-1]
    assert down == 4 * sent * result.summary["n_clients"]


def test_zeta_sigma_and_the_hessian_ignore_frozen_parameters() -> None:
    """The parts of the whole gradient, and the block of the whole Hessian, in the rows and columns that are trained."""
    federation, frozen = digits(), "network.last.bias"
    batch = federation.data.clients[1].columns
    whole, part = federation.module(), federation.module()
    part.get_parameter(frozen).requires_grad = False
    mask = torch.cat([torch.full((p.numel(),), name != frozen) for name, p in whole.named_parameters()])
    mean, sq_norms = per_sample.gradients(part, batch)
    assert torch.allclose(mean, per_sample.gradients(whole, batch)[0][mask], rtol=0, atol=1e-6)
    each = [per_sample.gradients(part, [t[i : i + 1] for t in batch])[0] for i in range(len(batch[1]))]
    assert torch.allclose(sq_norms, torch.stack([g.square().sum() for g in each]), rtol=1e-4)
    v = torch.zeros(len(mask), dtype=torch.float64)
    v[mask] = torch.randn(int(mask.sum()), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    along = hessian_vector(part, [batch], v[mask])
    assert torch.allclose(along, hessian_vector(whole, [batch], v)[mask], rtol=0, atol=1e-5)


@pytest.mark.long
def test_every_worker_starts_from_the_file(lab: Path) -> None:
    """A checkpoint of Lightning, in half precision."""
    _torch({"state_dict": {f"network.{n}": t.half() for n, t in state().items()}, "e": 3})(lab / "half.ckpt")
    ready = assemble.assemble(build(asked(model__weights="half.ckpt")))
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
        inside = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in inside.items():
            packed.writestr(name, data)


def _quantized(path: Path) -> None:
    torch.save({**state(), "last.bias": torch.quantize_per_tensor(torch.zeros(10), 0.1, 0, torch.quint8)}, path)


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
    "others.safetensors": (_saved(OTHERS), "lacks network.body.bias, .*also has head.bias"),
    "shape.safetensors": (_saved({**state(), "last.bias": torch.zeros(3)}), r"network.last.bias is .*\(3,\)"),
    "kind.safetensors": (_saved({**state(), "last.bias": NAN.to(torch.int64)}), "network.last.bias is torch.int64"),
    "nan.safetensors": (_saved({**state(), "last.bias": NAN}), "network.last.bias .*not finite"),
    "huge.pt": (_torch({**state(), "last.bias": torch.zeros(1).expand(10**13)}), r"last.bias is .*\(10{13},\)"),
    "sparse.pt": (_torch({**state(), "last.bias": torch.zeros(10).to_sparse()}), "last.bias .*dense.*sparse"),
    "meta.pt": (_torch({**state(), "last.bias": torch.zeros(10, device="meta")}), "last.bias .*dense.*meta"),
    "quantized.pt": (_quantized, "last.bias .*dense.*quint8"),
    "complex.pt": (_torch({**state(), "last.bias": NAN.to(torch.complex64)}), "last.bias is torch.complex64"),
    "bomb.pt": (_bomb, "unpacks to .* bytes, and at most"),
    "text.safetensors": (lambda path: path.write_text("weights"), "cannot be read as weights"),
    "code.pt": (_torch({"last.bias": _Code()}), "cannot be read as weights"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_sentence(name: str, lab: Path) -> None:
    make, words = WRONG[name]
    make(lab / name)
    with pytest.raises(UserError, match=words):
        build(asked(model__weights=name))
    assert not Path("run_by_a_file").exists()


NAME = "torchvision:shufflenet_v2_x0_5"


def backbone_file(path: Path, begins: str, n_classes: int = 1000) -> dict[str, Tensor]:
    """Write a random network of torchvision, whose names begin with ``begins``; return its tensors."""
    torch.manual_seed(5)
    tensors = models.shufflenet_v2_x0_5(num_classes=n_classes).state_dict()
    tensors["conv1.1.running_mean"] += 1
    torch.save({begins + n: t for n, t in tensors.items()}, path, _use_new_zipfile_serialization=path.suffix == ".pt")
    return tensors


WEIGHTS = "torchvision:ShuffleNet_V2_X0_5_Weights"
CACHED = "hub/checkpoints/shufflenetv2_x0.5-f707e7126e.pth"
"""Path of the file of ``WEIGHTS`` in the folder TORCH_HOME."""

BACKBONES = {
    "the name of pretrained weights": (f"{WEIGHTS}.DEFAULT", "", {"model.head": "new"}),
    "torchvision's own names, written by an old torch": ("old.pth", "", {"model.head": "new"}),
    "a prefix that is replaced": ("new.pt", "backbone.", {"model.head": "new", "model.weights_map": "backbone.=body."}),
    "a prefix that is cut": ("new.pt", "encoder.", {"model.weights_strict": False, "model.weights_map": "encoder.="}),
}


@pytest.mark.parametrize(("name", "begins", "fields"), BACKBONES.values(), ids=BACKBONES)
def test_a_backbone_is_loaded_from_a_file_of_torchvision_and_its_new_head_is_not(
    name: str, begins: str, fields: dict[str, Any], lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(lab))
    (lab / CACHED).parent.mkdir(parents=True)
    tensors, cached = backbone_file(lab / name, begins), Path("hub/checkpoints")
    if is_cached := name.startswith("torchvision:"):
        cached /= f"random-{digest(str(lab / name))[:10]}.pth"
        shutil.move(lab / name, cached)
        monkeypatch.setattr(
            models.get_weight(name.removeprefix("torchvision:")).value, "url", f"https://a/{cached.name}"
        )
    values = {"model__name": NAME, "model__weights": name, **fields}
    spec, plain = build(asked(**values)), build(asked(model__name=NAME))
    module, x = spec.module(spec.dataset).eval(), torch.rand(2, 1, 8, 8)
    its = module.state_dict()
    for key, tensor in tensors.items():
        if not key.startswith("fc."):
            assert torch.equal(its[f"network.body.{key}"], tensor), key
    assert torch.equal(its["network.last.weight"], plain.module(plain.dataset).state_dict()["network.last.weight"])
    (note,) = (note for note in spec.notes if "model.weights" in note)
    for words in ("network.last.weight", "network.last.bias", "fc.bias", f"{len(tensors) - 2} tensors were loaded"):
        assert words in note
    reference = models.shufflenet_v2_x0_5(num_classes=10)
    head = {f"fc.{n}": its[f"network.last.{n}"] for n in ("weight", "bias")}
    reference.load_state_dict(tensors | head)
    with torch.no_grad():
        assert torch.equal(module.get_submodule("network")(x), reference.eval()(x.expand(-1, 3, -1, -1)))
    assert not [note for note in plain.notes if "model.weights" in note]
    if is_cached:
        cached.write_bytes(cached.read_bytes()[:-1])
        with pytest.raises(UserError, match=f"{cached} is damaged.*--download"):
            asked(**values)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, r"network.last.weight is .*\(1000, 1024\).*\(10, 1024\); --model.head new"),
        ({"model.weights_map": "backbon=body."}, "'backbon'.*conv1.0.weight"),
        ({"model.weights_map": "backbone."}, "OLD=NEW.*'backbone.'"),
        ({"model.weights_map": "conv1=x"}, "lacks network.body.conv1.0.weight.*also has x.0.weight"),
        ({"model.weights_map": "conv1.=conv5."}, "two tensors for network.body.conv5.0"),
        (
            {"model.weights_map": "=other.", "model.weights_strict": False},
            "no tensor of the model.*other.conv1.0.weight",
        ),
        ({"model.name": "torchvision:shufflnet_v2_x0_5"}, f"model.name.*{NAME!r}"),
        ({"model.weights": None, "model.weights_strict": False}, "model.weights_strict false need a file"),
        ({"model.weights": "DEFAULT"}, "is not a file.*torchvision:ResNet18_Weights.DEFAULT"),
        ({"model.weights": f"{WEIGHTS}.DEFUALT"}, f"mean '{WEIGHTS}.DEFAULT'"),
        ({"model.weights": f"{WEIGHTS}.DEFAULT"}, rf"lacks \S+{CACHED}; --download fetches it from https"),
        (
            {"model.weights": f"{WEIGHTS}.DEFAULT", "data.download": True},
            rf"{CACHED}, which cannot be downloaded from https\S+ \(.*no network",
        ),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused_in_one_sentence(
    fields: dict[str, Any], words: str, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, path: str, hash_prefix: str) -> None:
        assert (url.rpartition("/")[2], hash_prefix) == (Path(CACHED).name, "f707e7126e")
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(lab))
    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    backbone_file(lab / "new.pt", "")
    with pytest.raises(UserError, match=words):
        build(asked(**{"model__name": NAME, "model__weights": "new.pt", **fields}))


def test_a_file_of_other_content_is_another_experiment(lab: Path) -> None:
    save_file(state(), lab / "start.safetensors")
    first = asked(model__weights="start.safetensors")
    assert deciding(first)["source.weights"]
    assert from_dict(to_dict(first)).source == first.source
    save_file({n: t + 1 for n, t in state().items()}, lab / "start.safetensors")
    second = asked(model__weights="start.safetensors")
    assert noise_key(first) != noise_key(second)
    with pytest.raises(UserError, match=r"'?start.safetensors'? is not the file it was when this experiment was"):
        build(first)


# Trained models

FIELDS = {
    "federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 0, "client.epochs": 1,
    "data.limit": 300, "wandb": "off",
}  # fmt: skip
EXECUTED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, n_classes, width: int = 8):
        super().__init__()
        print("executed")
        layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, n_classes)]
        self.body = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("models") / "run"
    return run(experiment("smoke", values=FIELDS), folder, say=quiet)


def accuracy(result: Result, module: torch.nn.Module, which: str) -> float:
    part = getattr(load_data(result.experiment.data), which)
    with torch.no_grad():
        return float((module(part.x).argmax(1) == part.y).float().mean())


def test_a_folder_alone_gives_the_models_of_the_last_and_the_best_round(done: Result, tmp_path: Path) -> None:
    """Best: the first with the largest validation accuracy. Checkpoints are not needed."""
    shutil.copytree(done.folder, tmp_path / "away")
    shutil.rmtree(tmp_path / "away" / "checkpoints")
    result, every = load(tmp_path / "away"), done.rounds
    last, best = result.model, result.best
    assert accuracy(done, last, "test") == pytest.approx(every["test/accuracy"].iloc[-1], abs=1e-6)
    top = every["validation/accuracy"].iloc[1:].max()
    assert accuracy(done, best, "validation") == pytest.approx(top, abs=1e-6)
    assert result.summary == done.summary
    tensors = load_file(done.folder / "model.safetensors")
    assert tensors.keys() == last.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in last.state_dict().items())


@pytest.mark.long
def test_a_users_module_is_executed_only_if_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(EXECUTED, encoding="utf-8")
    values = {**FIELDS, "model": "nets.py:Net", "data.validation": 0.0, "federation.rounds": 1}
    result = run(experiment("smoke", values=values), "run", say=quiet)
    assert {"network.body.2.running_mean"} <= load_file("run/model.safetensors").keys()
    assert not Path("run/best.safetensors").exists()  # without validation data there is no best round
    capsys.readouterr()
    with pytest.raises(UserError, match=r"'nets.py:Net'; to have it executed, name it"):
        _ = load("run").model
    assert "executed" not in capsys.readouterr().out
    module = load("run", may_run=["nets.py:Net"]).model
    assert accuracy(result, module, "test") == pytest.approx(result.rounds["test/accuracy"].iloc[-1], abs=1e-6)
    Path("nets.py").write_text(EXECUTED + "# changed\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not the code that run was run with"):
        _ = load("run", may_run=["nets.py:Net"]).model


def test_what_is_no_finished_run_or_damaged_is_refused(done: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        load(tmp_path)
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="is damaged"):
        _ = load(tmp_path / "run").model
    (tmp_path / "run" / "best.safetensors").unlink()
    with pytest.raises(UserError, match=r"no best\.safetensors"):
        _ = load(tmp_path / "run").best


@pytest.mark.long
def test_an_exported_model_has_the_logits(done: Result, tmp_path: Path) -> None:
    shutil.copytree(done.folder, tmp_path / "run")
    result = load(tmp_path / "run")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]

    x = load_data(done.experiment.data).test.x[:7]
    (logits,) = ReferenceEvaluator(str(result.export("onnx"))).run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), result.model(x), atol=1e-4, rtol=1e-4)


def test_messages_list_the_names_of_a_file_in_one_order() -> None:
    """The library safetensors returns the tensors of a file in random order."""
    names = [f"part{i:02}" for i in range(30)]
    content = save({name: torch.ones(1) for name in names})
    assert [*model_files._read("a.safetensors", content, 1e9)] == names  # pyright: ignore[reportPrivateUsage]


def test_a_projection_of_a_network_without_last_layer_is_refused(tmp_path: Path) -> None:
    code = "from torch import nn\ndef net(n_classes):\n    return nn.Sequential(nn.Linear(64, n_classes))\n"
    (tmp_path / "net.py").write_text(code)
    fields = {"model.name": f"{tmp_path / 'net.py'}:net", "model.projection": 4, "tracking.wandb": "off"}
    with pytest.raises(UserError, match="a Linear called last"):
        build(experiment("smoke", values=fields))
