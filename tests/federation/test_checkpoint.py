"""Checkpoints: read back as written, skipped if damaged or of another run."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import require_resumed, small

from fedcommons.config.dotted import override
from fedcommons.config.experiment import Experiment
from fedcommons.core.communication import Traffic
from fedcommons.federation import checkpoint
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Flat, Layout, Payload, data
from fedcommons.runs import experiment
from fedcommons.storage.atomic_files import checksum_of

LAYOUT = Layout(("w", "b"), ((2, 3), (1,)))


def standing_of(round: int) -> Standing:
    """Two names of its state share their numbers."""
    draw = torch.Generator().manual_seed(round)
    model = Flat(LAYOUT, torch.randn(7, generator=draw))
    state = {"model": model, "before": model, "a/b": Flat(LAYOUT, torch.randn(7, generator=draw))}
    other = Layout(("images",), ((2, 2),))
    memory: dict[int, Payload] = {
        12: {"control": Flat(LAYOUT, torch.randn(7, generator=draw)), "times": torch.tensor(3)},
        3: {"x/y": Flat(other, torch.randn(4, generator=draw).double()), "bytes": torch.arange(4, dtype=torch.uint8)},
    }
    return Standing(round, state, ClientMemory(memory), Traffic(2**40 + round, 2, 3))


def require_same(actual: Standing | None, right: Standing) -> None:
    """Compare everything in a checkpoint bit by bit."""

    def plain(standing: Standing) -> list[Any]:
        payloads = {-1: standing.state, **{client: standing.memory[client] for client in standing.memory}}
        numbers = {
            (client, name): (type(x), getattr(x, "layout", None), data(x).dtype, data(x).tolist())
            for client, payload in payloads.items()
            for name, x in payload.items()
        }
        return [standing.round, standing.traffic, [*payloads], numbers]

    assert actual is not None
    assert plain(actual) == plain(right)


def test_the_last_two_checkpoints_are_kept_and_read_as_they_were_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert checkpoint.load_latest(tmp_path) is checkpoint.load_latest(folder) is None
    for number in (8, 9, 10, 11):
        checkpoint.save(folder, standing_of(number))
    names = [f"round-{number:06d}.safetensors{end}" for number in (10, 11) for end in ("", ".json")]
    assert sorted(p.name for p in folder.iterdir()) == names
    require_same(checkpoint.load_latest(folder), standing_of(11))
    require_same(checkpoint.load_latest(folder, before=11), standing_of(10))


def two_checkpoints(folder: Path) -> Path:
    """Checkpoints of rounds 1 and 2; the tensors of the second."""
    for number in (1, 2):
        checkpoint.save(folder, standing_of(number))
    return folder / "round-000002.safetensors"


def facts_of(path: Path) -> Path:
    return path.with_name(path.name + ".json")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensors cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "facts cut off": lambda path: facts_of(path).write_text('{"sha256": "12'),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "other facts": lambda path: facts_of(path).write_text(facts_of(path).read_text().replace(f"{2**40}"[:9], "1")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: Callable[[Path], object], tmp_path: Path) -> None:
    damage(two_checkpoints(tmp_path))
    require_same(checkpoint.load_latest(tmp_path), standing_of(1))
    damage(tmp_path / "round-000001.safetensors")
    assert checkpoint.load_latest(tmp_path) is None


def with_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with their right checksum."""
    content = {name: fact for name, fact in facts.items() if name not in ("sha256", "facts_sha256")}
    return {**facts, "facts_sha256": checksum_of(content)}


GONE = "(removed)"
UPDATES, COMMONS = ("ledger", "updates", "covered"), ("ledger", "commons")
SHAPES, NAMES, MODEL = ("layouts", 0, 1), ("layouts", 0, 0), ("tensors", "state/model")
WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("round",), GONE), (("round",), 1), (("round",), "two"), (("rejected",), 2), (("largest",), [1, 2, 3.0]),
    (("ledger",), GONE), (("ledger",), {"commons": []}), (UPDATES, [[0, 0.5, 1.0, "many"]]), (UPDATES, [[0, 0.5, 1.0]]),
    (UPDATES, [[0, 0.5, 0.0, 3]]), (UPDATES, [[0, 0.5, float("inf"), 3]]), ((*COMMONS, "covered"), [[0, 2.0, 1.0, 3]]),
    ((*COMMONS, "uncovered"), ["delta"]), (("traffic",), [1, 2]), (("traffic",), [1, 2, -1]), (("order",), [12, 4]),
    (("files",), ["x"]), (("files",), {"3": "../../secret"}), (("keys", 0), GONE), (("tensors",), []), (MODEL, GONE),
    (MODEL, 9), (MODEL, "0"), (("layouts",), None), (SHAPES, [[2, 4], [1]]), (NAMES, ["v", "b"]), (NAMES, ["w", "w"]),
    (SHAPES, [["2", 3], [1]]), (("layouts", 1, 1), [[-2, -2]]), (NAMES, ["w", "b", "c"]), (NAMES, ["w", 3]),
]  # fmt: skip


def test_malformed_facts_beside_intact_tensors_are_passed_over(tmp_path: Path) -> None:
    """With the right checksum, as another version would write it."""
    path = facts_of(two_checkpoints(tmp_path))
    right = json.loads(path.read_text())
    assert right == with_checksum(right)
    for (*outer, last), value in WRONG:
        facts = place = copy.deepcopy(right)
        for name in outer:
            place = place[name]
        if value == GONE:
            del place[last]
        else:
            place[last] = value
        path.write_text(json.dumps(with_checksum(facts)))
        latest = checkpoint.load_latest(tmp_path, model=LAYOUT)
        assert latest is not None, (outer, last, value)
        assert latest.round == 1, (outer, last, value)
    path.write_text(json.dumps(right))
    require_same(checkpoint.load_latest(tmp_path, model=LAYOUT), standing_of(2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and another one that differs in its seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("whole", 0), ("seed", 7)):
        experiment.run(override(config_of(folder), {"seed": seed}), folder / name, say=lambda text: None)
    return folder


def config_of(folder: Path) -> Experiment:
    return small(folder, {"federation.rounds": 3, "federation.checkpoint_every": 1})


@pytest.fixture
def unfinished(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run, as if it had been killed before its summary."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "whole", folder)
    (folder / "summary.json").unlink()
    return folder


OF_ANOTHER = {"*/*.safetensors*": "is of a run with other fields, data, code", "memory/*": "",
              "rounds.jsonl": "belongs to other rounds"}  # fmt: skip


@pytest.mark.parametrize("files", OF_ANOTHER)
@pytest.mark.long
def test_files_of_another_run_are_passed_over(files: str, runs: Path, unfinished: Path) -> None:
    for path in unfinished.glob(files):
        shutil.copy(runs / "seed" / path.relative_to(unfinished), path)
    messages = require_resumed(config_of(runs), unfinished, runs / "whole", 0)
    assert messages.count(OF_ANOTHER[files] or "skipped") == 2 * bool(OF_ANOTHER[files])


@pytest.mark.long
def test_a_checkpoint_of_an_earlier_version_names_no_run_and_is_taken_for_this(runs: Path, unfinished: Path) -> None:
    lines = (unfinished / "rounds.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "rounds.jsonl").write_text("".join(lines[:3]))
    shutil.copytree(runs / "whole", whole := unfinished.parent / "whole")
    for path in [*unfinished.glob("*/*.safetensors.json"), *whole.glob("*/*-000002.safetensors.json")]:
        facts = json.loads(path.read_text())
        facts = {k: v for k, v in facts.items() if k not in ("run", "record", "name")}
        path.write_text(json.dumps(with_checksum(facts)))
    assert "is of an earlier version" in require_resumed(config_of(runs), unfinished, whole, 3)
