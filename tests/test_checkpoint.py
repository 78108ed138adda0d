"""Checkpoints: read back as written, passed over where damaged or of another run."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcommons.accounting.communication import Traffic
from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.files import checksum_of
from fedcommons.runs import experiment
from fedcommons.tensors import Flat, Layout, Payload, data

LAYOUT = Layout(("w", "b"), ((2, 3), (1,)))


def standing_of(round: int) -> Standing:
    draw = torch.Generator().manual_seed(round)
    state = {name: Flat(LAYOUT, torch.randn(7, generator=draw)) for name in ("model", "a/b")}
    other = Layout(("images",), ((2, 2),))
    memory: dict[int, Payload] = {
        12: {"control": Flat(LAYOUT, torch.randn(7, generator=draw)), "times": torch.tensor(3)},
        3: {"x/y": Flat(other, torch.randn(4, generator=draw).double()), "bytes": torch.arange(4, dtype=torch.uint8)},
    }
    return Standing(round, state, ClientMemory(memory), Traffic(2**40 + round, 2, 3))


def same(a: Payload, b: Payload) -> bool:
    return a.keys() == b.keys() and all(
        type(a[name]) is type(b[name])
        and getattr(a[name], "layout", None) == getattr(b[name], "layout", None)
        and data(a[name]).dtype == data(b[name]).dtype
        and torch.equal(data(a[name]), data(b[name]))
        for name in a
    )


def require_same(a: Standing | None, b: Standing) -> None:
    assert a is not None
    assert (a.round, a.traffic) == (b.round, b.traffic)
    assert same(a.state, b.state)
    assert a.memory.keys() == b.memory.keys()
    assert all(same(a.memory[i], b.memory[i]) for i in b.memory)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is checkpoint.load_latest(tmp_path / "not there") is None
    checkpoint.save(tmp_path / "new" / "folder", standing_of(5))
    require_same(checkpoint.load_latest(tmp_path / "new" / "folder"), standing_of(5))


def test_two_names_for_the_same_numbers_can_be_saved(tmp_path: Path) -> None:
    """As when clients keep the model they were sent (MOON's first round), or a state starts as the model twice."""
    model = Flat(LAYOUT, torch.arange(7.0))
    memory = ClientMemory({0: {"anchor": model}, 1: {"anchor": model}})
    standing = Standing(1, {"model": model, "before": model}, memory)
    checkpoint.save(tmp_path, standing)
    require_same(checkpoint.load_latest(tmp_path), standing)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for number in (8, 9, 10, 11):
        checkpoint.save(tmp_path, standing_of(number))
    names = [f"round-{number:06d}.safetensors{end}" for number in (10, 11) for end in ("", ".json")]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    require_same(checkpoint.load_latest(tmp_path), standing_of(11))


DAMAGE = {
    "tensors cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "facts cut off": lambda path: path.with_name(path.name + ".json").write_text('{"sha256": "12'),
    "no facts": lambda path: path.with_name(path.name + ".json").unlink(),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: Callable[[Path], object], tmp_path: Path) -> None:
    damage(two_checkpoints(tmp_path))
    require_same(checkpoint.load_latest(tmp_path), standing_of(1))
    damage(tmp_path / "round-000001.safetensors")
    assert checkpoint.load_latest(tmp_path) is None


def two_checkpoints(folder: Path) -> Path:
    """Checkpoints of rounds 1 and 2; the tensors of the second."""
    for number in (1, 2):
        checkpoint.save(folder, standing_of(number))
    return folder / "round-000002.safetensors"


def with_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with their right checksum."""
    own = {name: fact for name, fact in facts.items() if name not in ("sha256", "facts_sha256")}
    return {**facts, "facts_sha256": checksum_of(own)}


FACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda facts: [facts["sha256"]],
    "nothing": lambda facts: {"sha256": facts["sha256"]},
    "no round": lambda facts: facts.pop("round"),
    "rejected is a number": lambda facts: facts.update(rejected=2),
    "rejected without a reason": lambda facts: facts.update(rejected=[{"client": 2, "replies": 1}]),
    "the largest in words": lambda facts: facts.update(largest=["a", "b", "c", "d"]),
    "the largest of three": lambda facts: facts.update(largest=[1, 2, 3.0]),
    "no ledger": lambda facts: facts.pop("ledger"),
    "the ledger is a list": lambda facts: facts.update(ledger=[]),
    "a ledger of something else": lambda facts: facts.update(ledger={"commons": []}),
    "steps in words": lambda facts: facts["ledger"]["updates"].update(covered=[[0, 0.5, 1.0, "many"]]),
    "an event of three": lambda facts: facts["ledger"]["updates"].update(covered=[[0, 0.5, 1.0]]),
    "no noise": lambda facts: facts["ledger"]["updates"].update(covered=[[0, 0.5, 0.0, 3]]),
    "noise below zero": lambda facts: facts["ledger"]["updates"].update(covered=[[0, 0.5, -1.0, 3]]),
    "infinite noise": lambda facts: facts["ledger"]["updates"].update(covered=[[0, 0.5, float("inf"), 3]]),
    "a rate above one": lambda facts: facts["ledger"]["commons"].update(covered=[[0, 2.0, 1.0, 3]]),
    "uncovered is a list": lambda facts: facts["ledger"]["commons"].update(uncovered=["delta"]),
    "another round": lambda facts: facts.update(round=1),
    "a round in words": lambda facts: facts.update(round="two"),
    "traffic of two": lambda facts: facts.update(traffic=[1, 2]),
    "traffic in words": lambda facts: facts.update(traffic=["a", "b", "c"]),
    "no traffic": lambda facts: facts.update(traffic=None),
    "order of one": lambda facts: facts.update(order=[12]),
    "order of strangers": lambda facts: facts.update(order=[12, 4]),
    "order is a number": lambda facts: facts.update(order=2),
    "files is a list": lambda facts: facts.update(files=["x"]),
    "a file elsewhere": lambda facts: facts.update(files={"3": "../../secret"}),
    "a file without a name": lambda facts: facts.update(files={"3": None}),
    "keys is null": lambda facts: facts.update(keys=None),
    "no state": lambda facts: facts["keys"].remove("state"),
    "tensors is a list": lambda facts: facts.update(tensors=[]),
    "no model": lambda facts: facts["tensors"].pop("state/model"),
    "the model is plain": lambda facts: facts["tensors"].update({"state/model": None}),
    "a layout too many": lambda facts: facts["tensors"].update({"state/model": 9}),
    "a layout that is text": lambda facts: facts["tensors"].update({"state/model": "0"}),
    "layouts is null": lambda facts: facts.update(layouts=None),
    "a layout too large": lambda facts: facts["layouts"][0].__setitem__(1, [[2, 4], [1]]),
    "a layout of other sides": lambda facts: facts["layouts"][0].__setitem__(1, [[3, 2], [1]]),
    "a layout of other names": lambda facts: facts["layouts"][0].__setitem__(0, ["v", "b"]),
    "a name twice": lambda facts: facts["layouts"][0].__setitem__(0, ["w", "w"]),
    "sides in words": lambda facts: facts["layouts"][0].__setitem__(1, [["2", 3], [1]]),
    "sides below zero": lambda facts: facts["layouts"][0].__setitem__(1, [[-2, -3], [1]]),
    "more names than shapes": lambda facts: facts["layouts"][0].__setitem__(0, ["w", "b", "c"]),
}


@pytest.mark.parametrize("has_new_checksum", [True, False])
@pytest.mark.parametrize("damage", FACTS.values(), ids=FACTS)
def test_malformed_facts_beside_intact_tensors_are_passed_over(
    damage: Callable[[dict[str, Any]], Any], has_new_checksum: bool, tmp_path: Path
) -> None:
    path = two_checkpoints(tmp_path).with_name("round-000002.safetensors.json")
    facts = json.loads(path.read_text())
    other = damage(facts)
    after = other if isinstance(other, list) or damage is FACTS["nothing"] else facts
    if has_new_checksum and isinstance(after, dict):  # as another version would write them
        after = with_checksum(after)
    path.write_text(json.dumps(after))
    require_same(checkpoint.load_latest(tmp_path, model=LAYOUT), standing_of(1))


def test_facts_count_only_with_their_checksum(tmp_path: Path) -> None:
    """Without it, a smaller privacy ledger or another number would pass."""
    path = two_checkpoints(tmp_path).with_name("round-000002.safetensors.json")
    facts = json.loads(path.read_text())
    assert facts == with_checksum(facts)
    del facts["facts_sha256"]
    for text in (json.dumps(facts), path.read_text().replace(str(2**40 + 2), str(2**40 + 3))):
        path.write_text(text)
        require_same(checkpoint.load_latest(tmp_path), standing_of(1))


def test_what_is_no_checkpoint_of_ours_is_neither_read_nor_removed(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("round-best.safetensors", "round-9.safetensors", "best.safetensors")]
    for path in mine:
        path.write_text("mine")
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, standing_of(number))
    require_same(checkpoint.load_latest(tmp_path), standing_of(3))
    checkpoint.remove_after(tmp_path, 2)
    require_same(checkpoint.load_latest(tmp_path), standing_of(2))
    checkpoint.remove_after(tmp_path, -1)
    assert sorted(tmp_path.iterdir()) == sorted(mine)


TINY = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 60, "client.epochs": 1, "measure.every": 0, "federation.rounds": 3,
        "federation.checkpoint_every": 1, "tracking.wandb": "off", "model.channels": (2, 4),
        "federation.memory_mb": 0.001, "partition.n_clients": 4,
    },
)  # fmt: skip
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "seed": {"seed": 7}, "rate": {"client.lr": 0.5}, "method": {"algorithm": "fedavg"}, "data": {"data.limit": 50},
    "sigma": {"dp.local": True, "dp.noise_multiplier": 2.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and others that differ from it in one field."""
    folder = tmp_path_factory.mktemp("runs")
    for name, fields in {"whole": {}, **OTHERS}.items():
        experiment.run(override(TINY, fields), folder / name, say=lambda text: None)
    return folder


@pytest.fixture
def unfinished(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run, as if it had been killed before its summary."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "whole", folder)
    (folder / "summary.json").unlink()
    return folder


def require_resumed(folder: Path, runs: Path, rounds: list[int]) -> str:
    """The run goes on with these rounds and ends as the undisturbed one; the messages."""
    seen: list[int] = []
    said: list[str] = []
    experiment.run(TINY, folder, resume=True, say=said.append, on_round=lambda number, _: seen.append(number))
    assert seen == rounds
    for name in ("rounds.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (runs / "whole" / name).read_bytes()
    return "\n".join(said)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.long
def test_checkpoints_of_another_run_are_passed_over(other: str, runs: Path, unfinished: Path) -> None:
    for name in ("checkpoints", "memory"):
        shutil.rmtree(unfinished / name)
        if (runs / other / name).exists():
            shutil.copytree(runs / other / name, unfinished / name)
    assert require_resumed(unfinished, runs, [0, 1, 2, 3]).count("is of a run with other fields, data, code") == 2


@pytest.mark.long
def test_memory_of_another_run_is_passed_over(runs: Path, unfinished: Path) -> None:
    for file in (unfinished / "memory").iterdir():
        if (runs / "seed" / "memory" / file.name).exists():
            shutil.copy(runs / "seed" / "memory" / file.name, file)
    require_resumed(unfinished, runs, [0, 1, 2, 3])


@pytest.mark.long
def test_rounds_of_another_run_are_noticed(runs: Path, unfinished: Path) -> None:
    shutil.copy(runs / "seed" / "rounds.jsonl", unfinished / "rounds.jsonl")
    assert require_resumed(unfinished, runs, [0, 1, 2, 3]).count("goes with other rounds") == 2


@pytest.mark.parametrize("is_of_earlier_version", [False, True])
@pytest.mark.long
def test_a_run_goes_on_from_its_own_checkpoint(is_of_earlier_version: bool, runs: Path, unfinished: Path) -> None:
    """Checkpoints of an earlier version name no run, and are taken for this one's."""
    lines = (unfinished / "rounds.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "rounds.jsonl").write_text("".join(lines[:3]))
    names = [*unfinished.glob("checkpoints/*.json"), *unfinished.glob("memory/*.json")]
    for path in names if is_of_earlier_version else []:
        facts = json.loads(path.read_text())
        plain = {k: v for k, v in facts.items() if k not in ("run", "record", "name")}
        path.write_text(json.dumps(with_checksum(plain)))
    said = require_resumed(unfinished, runs, [3])
    assert ("is of an earlier version" in said) == is_of_earlier_version
    assert is_of_earlier_version or not said
