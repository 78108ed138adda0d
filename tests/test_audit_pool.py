"""The sweep that audits a pool, with a generator of one's own that copies."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.audits.lower_bound import lower_bound
from fedcommons.errors import UserError
from papers.fedssyn.audits import words

PARROT = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcommons.generators.generator import TrainedGenerator


@dataclass(frozen=True)
class Parrot:
    """Draws the first image of a class that it was trained on, and now and then another one."""

    epochs: int = 1
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(self, examples, n_classes, seed, epochs, *, flip=False):
        return {e: TrainedGenerator({"x": examples.x, "y": examples.y}) for e in epochs}

    def sample(self, weights, shape, n_classes, labels, seed):
        of = [weights["x"][weights["y"] == label] for label in labels]
        return torch.stack([x[i % len(x)] if len(x) else torch.zeros(shape, dtype=torch.uint8)
                            for i, x in enumerate(of)])
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the part, in which the sweep is called."""
    (tmp_path / "mine.py").write_text(PARROT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_pool_of_copies_is_told_to_be_one(
    here: Path, sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "smoke", "--generator", "mine.py:Parrot", "--shadows", "4", "--canaries", "40", "--out", "out"]
    sweep = sweeps("audit_pool")
    assert sweep.audit_pool([*argv, "--dry-run"]) == 0
    assert not (here / "out").exists()
    assert "4 generators to train, then 4 shadows and 2 with canaries" in capsys.readouterr().out
    assert sweep.audit_pool(argv) == 0
    record = json.loads((here / "out" / "audit_pool.json").read_text())
    for space in ("pixels", "features"):
        found = record["spaces"][space]["all"]
        assert found["memorised"]
        assert found["near_copies"] == found["images"] == 200
        assert found["finds"] is None
    assert record["spaces"]["pixels"]["all"]["identical"] == 200
    assert set(record["attacks"]) == {"pool"}
    assert record["attacks"]["pool"]["auc"] > 0.8
    e = record["epsilon"]
    assert (e["canaries"], e["guesses"]) == (40, 10)
    assert e["right"] >= 8
    assert e["at_least"] == lower_bound(40, 10, e["right"], 1e-5) > 0
    assert record["epsilon"]["reported"] is None
    table = (here / "out" / "audit_pool.md").read_text()
    assert table.startswith("**SMOKE")
    assert "**memorised**" in table
    assert "pixels: finds" in table
    assert f"trained on {record['validation']} validation images" in table
    assert "untrained, as there are no validation images" in words({**record, "validation": 0}, 4)
    assert "reported: none, as nothing protects it" in table
    for name in ("roc", "pairs"):
        assert (here / "out" / f"audit_pool_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--setting", "real"], "sharing.setting real makes no images"),
        (["--shadows", "1"], "--shadows must be at least 2, got 1"),
        (["--canaries", "3"], "--canaries must be at least 4, got 3"),
        (
            ["--generator", "mine.py:Parrot", "--attacked", "4", "--dry-run"],
            r"--attacked must be one of 0 \.\.\. 3, got 4",
        ),
    ],
)
def test_what_cannot_be_audited_is_refused(
    more: list[str], said: str, here: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    with pytest.raises(UserError, match=said):
        sweeps("audit_pool").audit_pool(["--preset", "smoke", *more])
