"""Where a federation stands, written to disk and read back, also after a crash."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fedcommons.accounting.communication import Traffic
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.files import checksum_of
from fedcommons.tensors import Flat, Layout, Payload, data

if TYPE_CHECKING:
    from conftest import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

LAYOUT = Layout(("w", "b"), ((2, 3), (1,)))


def _standing(round: int) -> Standing:
    draw = torch.Generator().manual_seed(round)
    state = {name: Flat(LAYOUT, torch.randn(7, generator=draw)) for name in ("model", "a/b")}
    other = Layout(("images",), ((2, 2),))
    memory: dict[int, Payload] = {
        12: {"control": Flat(LAYOUT, torch.randn(7, generator=draw)), "times": torch.tensor(3)},
        3: {"x/y": Flat(other, torch.randn(4, generator=draw).double()), "bytes": torch.arange(4, dtype=torch.uint8)},
    }
    return Standing(round, state, ClientMemory(memory), Traffic(2**40 + round, 2, 3))


def _same(a: Payload, b: Payload) -> bool:
    return a.keys() == b.keys() and all(
        type(a[name]) is type(b[name])
        and getattr(a[name], "layout", None) == getattr(b[name], "layout", None)
        and data(a[name]).dtype == data(b[name]).dtype
        and torch.equal(data(a[name]), data(b[name]))
        for name in a
    )


def _assert_same(a: Standing | None, b: Standing) -> None:
    assert a is not None
    assert (a.round, a.traffic) == (b.round, b.traffic)
    assert _same(a.state, b.state)
    assert a.memory.keys() == b.memory.keys()
    assert all(_same(a.memory[i], b.memory[i]) for i in b.memory)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "new" / "folder", _standing(5))
    _assert_same(checkpoint.load_latest(tmp_path / "new" / "folder"), _standing(5))


def test_two_names_for_the_same_numbers_can_be_saved(tmp_path: Path) -> None:
    """As when clients keep the model they were sent (MOON's first round), or a state starts as the model twice."""
    model = Flat(LAYOUT, torch.arange(7.0))
    memory = ClientMemory({0: {"anchor": model}, 1: {"anchor": model}})
    standing = Standing(1, {"model": model, "before": model}, memory)
    checkpoint.save(tmp_path, standing)
    _assert_same(checkpoint.load_latest(tmp_path), standing)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for number in (8, 9, 10, 11):
        checkpoint.save(tmp_path, _standing(number))
    names = [f"round-{number:06d}.safetensors{end}" for number in (10, 11) for end in ("", ".json")]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    _assert_same(checkpoint.load_latest(tmp_path), _standing(11))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "tensors cut off": lambda path: _truncate(path),
    "facts cut off": lambda path: path.with_name(path.name + ".json").write_text('{"sha256": "12'),
    "no facts": lambda path: path.with_name(path.name + ".json").unlink(),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: Callable[[Path], object], tmp_path: Path) -> None:
    for number in (1, 2):
        checkpoint.save(tmp_path, _standing(number))
    damage(tmp_path / "round-000002.safetensors")
    _assert_same(checkpoint.load_latest(tmp_path), _standing(1))
    damage(tmp_path / "round-000001.safetensors")
    assert checkpoint.load_latest(tmp_path) is None


def with_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """These facts of a file with the right checksum of them."""
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


@pytest.mark.parametrize("vouched", [False, True], ids=["a checksum of their own", "their old checksum"])
@pytest.mark.parametrize("damage", FACTS.values(), ids=FACTS)
def test_malformed_facts_beside_intact_tensors_fall_back_too(
    damage: Callable[[dict[str, Any]], Any], vouched: bool, tmp_path: Path
) -> None:
    for number in (1, 2):
        checkpoint.save(tmp_path, _standing(number))
    path = tmp_path / "round-000002.safetensors.json"
    facts = json.loads(path.read_text())
    other = damage(facts)
    after = other if isinstance(other, list) or damage is FACTS["nothing"] else facts
    if not vouched and isinstance(after, dict):  # as if another version had written them
        after = with_checksum(after)
    path.write_text(json.dumps(after))
    _assert_same(checkpoint.load_latest(tmp_path, model=LAYOUT), _standing(1))


def test_facts_without_their_checksum_are_damaged(tmp_path: Path) -> None:
    """Else the ledger in them could be made smaller."""
    for number in (1, 2):
        checkpoint.save(tmp_path, _standing(number))
    path = tmp_path / "round-000002.safetensors.json"
    facts = json.loads(path.read_text())
    assert facts == with_checksum(facts)
    del facts["facts_sha256"]
    path.write_text(json.dumps(facts))
    _assert_same(checkpoint.load_latest(tmp_path), _standing(1))


def test_a_number_that_changed_in_the_facts_is_found_out(tmp_path: Path) -> None:
    """No form tells it: only the facts' own checksum does."""
    for number in (1, 2):
        checkpoint.save(tmp_path, _standing(number))
    path = tmp_path / "round-000002.safetensors.json"
    path.write_text(path.read_text().replace(str(2**40 + 2), str(2**40 + 3)))
    _assert_same(checkpoint.load_latest(tmp_path), _standing(1))


def test_what_is_no_checkpoint_of_ours_is_neither_read_nor_removed(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("round-best.safetensors", "round-9.safetensors", "best.safetensors")]
    for path in mine:
        path.write_text("mine")
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, _standing(number))
    _assert_same(checkpoint.load_latest(tmp_path), _standing(3))
    checkpoint.remove_after(tmp_path, 2)
    _assert_same(checkpoint.load_latest(tmp_path), _standing(2))
    checkpoint.remove_after(tmp_path, -1)
    assert sorted(tmp_path.iterdir()) == sorted(mine)


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "not there") is None


# Traffic
