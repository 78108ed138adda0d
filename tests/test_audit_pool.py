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
    assert e["ceiling"] == lower_bound(40, 10, 10, 1e-5) >= e["at_least"]
    assert (e["reported"], e["verdict"]) == (None, "no epsilon is reported")
    table = (here / "out" / "audit_pool.md").read_text()
    assert table.startswith("**SMOKE")
    assert "**memorised**" in table
    assert "pixels: finds" in table
    assert f"trained on {record['validation']} validation images" in table
    assert "untrained, as there are no validation images" in words({**record, "validation": 0}, 4)
    assert "reported: none, as nothing protects it" in table
    assert f"were all right, {e['ceiling']:.3g})" in " ".join(table.split())
    for name in ("roc", "pairs"):
        assert (here / "out" / f"audit_pool_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--setting", "real"], "sharing.setting real makes no images"),
        (["--shadows", "1"], r"--shadows must lie in \[2, 10000\], got 1"),
        (["--canaries", "3"], r"--canaries must lie in \[4, 1e9\], got 3"),
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


HELD_OUT = """
import torch

def of(label, n):
    x = torch.randint(0, 256, (200 + n, 1, 8, 8), dtype=torch.uint8)
    y = torch.arange(200 + n) % 2
    return (x[:200], y[:200]), (x[200:], y[200:] if label is None else torch.full((n,), label))

def few():
    return of(None, 3)

def others():
    return of(2, 10)
"""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("few", "an audit needs at least 4 test images, which are held out, and data set theirs.py:few has 3"),
        ("others", "needs held-out images of client 0's classes, and there are none"),
    ],
)
def test_an_audit_without_held_out_data_is_refused_before_any_work(
    data: str, said: str, here: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    (here / "theirs.py").write_text(HELD_OUT)
    argv = ["--preset", "smoke", "--data.name", f"theirs.py:{data}", "--data.validation", "0", "--generator.rho", "1"]
    with pytest.raises(UserError, match=said):
        sweeps("audit_pool").audit_pool([*argv, "--out", "out"])
    assert [path.name for path in (here / "out").glob("*") if not path.name.startswith(".")] == []
