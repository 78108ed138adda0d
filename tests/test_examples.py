"""examples/ and docs/notebook.ipynb: each program but the sweep runs alone, and so do commands of its docstring."""

import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from fedcommons import load_runs

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PRINTED = {
    "own_method": "keeps every promise", "own_model": "accuracy by round: 0.", "own_stage": "mean images",
    "own_partition": "images of each client: 138 36 16 10", "own_tracker": "2,test/accuracy,0.",
    "own_measure": "measure/sharpness", "own_server": "keeps every promise", "lora": "26,784 bytes up in a round",
    "fine_tuning": "5,280 bytes up in a round", "characters": "clients: 7",
    "hospitals": "patients of each hospital: ", "fedprox_synthetic": "| synthetic(1, 1) | FedProx, mu = 1 |",
    "regression": "squared error by round: ", "segmentation": "IoU by round: ",
    "autoencoder": "loss by round: 1", "two_nn": "fedadam, accuracy",
}  # fmt: skip
SMALL = ["--preset=smoke", "--federation.rounds=1", "--client.epochs=1", "--data.limit=100", "--wandb=off"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "fedprox_synthetic" else pytest.mark.long) for n in PRINTED]
)
def test_a_program_and_the_commands_of_its_docstring_run(
    sweeps: Callable[[str], ModuleType],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]
    monkeypatch.chdir(ROOT)
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"^python sweeps/run\.py (.*)$", text, re.M)
    assert commands
    for number, command in enumerate(commands):
        assert f"examples/{name}.py:" in command
        every = [] if "measure.every" in command else ["--measure.every=0"]
        words = [f"--out={tmp_path / str(number)}", *shlex.split(command.replace(" runs/", f" {tmp_path}/"))]
        assert not sweeps("run").run([*SMALL, *every, *words])


@pytest.mark.long
def test_adapters_of_peft_are_those_of_the_example() -> None:
    pytest.importorskip("peft")
    model = runpy.run_path(str(EXAMPLES / "lora.py"))["LoRA"]
    ours, its, x = model((8,), 3), model((8,), 3, by_peft=True), torch.randn(5, 8)
    trained = [[p for _, p in net.named_parameters() if p.requires_grad] for net in (ours, its)]
    for parameters in trained:
        for number, p in enumerate(sorted(parameters, key=lambda p: p.shape)):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(number))
    frozen = [[p for p in net.parameters() if not p.requires_grad] for net in (ours, its)]
    for target, theirs in zip(*frozen, strict=True):
        target.data.copy_(theirs)
    torch.testing.assert_close(ours(x), its(x))


@pytest.mark.ray
def test_the_notebook_runs(shared_ray: dict[str, str], tmp_path: Path) -> None:
    """It sweeps too, on a real Ray, so examples/sweep.py is not run besides."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "sweep"}
    text = (ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8")
    # smaller, so that it takes two thirds of the time
    small = text.replace('rounds\\": 8', 'rounds\\": 2').replace('experiment(\\"small', 'experiment(\\"smoke')
    book = nbformat.reads(small, as_version=4)
    client = NotebookClient(book, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=shared_ray)
    assert len(load_runs(tmp_path / "notebook-runs" / "sweep")) == 4
    assert (tmp_path / "notebook-runs" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert not [out for cell in book.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
