"""A sweep works cell after cell: the generators of the first come first, and no core has nothing to do."""

import pytest
import ray
from ray.tune.search import Searcher

from fedcommons.sweeping.order import InOrder, Lacking


def _order(cells: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch) -> InOrder:
    """Cells, each with so many generators of its own, on a machine of so many cores."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(cores)})
    lacking = [Lacking(3, [f"{name} {i}"], [name], [name]) for name, n in cells.items() for i in range(n)]
    return InOrder(dict.fromkeys(cells, 1), lacking)


def _play(order: InOrder, cores: int, fails: str = "") -> list[str]:
    """What starts when, each trial as long as any other, as Tune asks: until as many wait as there are cores."""
    running: list[tuple[str, dict]] = []
    started = []
    for number in range(100):
        while len(running) < 2 * cores:
            found = order.suggest(str((number, len(running))))
            if not isinstance(found, dict):
                break
            running.append((str((number, len(running))), found))
            started.append(found["cell"] if "cell" in found else f"makes {found['generator']['images'][0]}")
        if not running:
            assert found == Searcher.FINISHED
            return started
        trial, given = running.pop(0)
        ended = (
            {"failed": "no memory", "trace": "line 7"}
            if fails in given.get("generator", {}).get("images", [])
            else {"trained": True}
        )
        order.on_trial_complete(trial, ended)
    raise AssertionError("it never ends")


def test_a_cell_waits_for_its_generators_and_nobody_overtakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pool": 3, "real": 0, "next pool": 1, "next real": 0}
    started = _play(_order(cells, 1, monkeypatch), 1)
    assert started == [
        "makes pool 0", "makes pool 1", "makes pool 2", "pool", "real", "makes next pool 0", "next pool", "next real",
    ]  # fmt: skip


def test_a_core_without_work_takes_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the last generator of the first cell is trained the second core runs the second cell."""
    started = _play(_order({"pool": 1, "real": 0, "next pool": 1}, 2, monkeypatch), 2)
    assert started == ["makes pool 0", "real", "pool", "makes next pool 0", "next pool"]


def test_where_a_generator_fails_its_cells_fail_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _order({"pool": 2, "real": 0}, 1, monkeypatch)
    assert _play(order, 1, fails="pool 0") == ["makes pool 0", "makes pool 1", "real"]
    assert order.failed == {"pool": "the generator of client 3 failed: no memory"}
    assert order.traces == ["line 7"]
    assert order.trained == 1
