"""Where a federation stands, written to disk and read back, also after a crash."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fedcommons.accounting.communication import Traffic
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Standing
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


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "not there") is None


# Traffic
