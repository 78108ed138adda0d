"""Callbacks: their order, the effect of a failure, what they hold, and what is refused before any work."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints
from weakref import WeakSet

import pytest
from interrupted import small
from report_runs import quiet

from fedcommons.errors import UserError
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.runs import experiment
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build
from fedcommons.runs.callbacks import Callback, Progress, require_callbacks
from fedcommons.runs.federate import federate

WATCHED = {"tracking.tracker": f"{__file__}:Watch", "federation.rounds": 4, "federation.checkpoint_every": 2}


@dataclass
class Watch:
    folder: Path

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        with open(self.folder / "watch.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([round, *stored(self.folder)]) + "\n")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        (self.folder / "finished.json").write_text(json.dumps(summary is not None))


class NoTracker:
    def log(self, round: int, metrics: Mapping[str, Any]) -> None: ...


class NoMeasure: ...


def stored(folder: Path) -> tuple[int, bool, str]:
    """Return the number of recorded rounds, whether ``best.safetensors`` exists, and the last checkpoint's name."""
    n = len((folder / "rounds.jsonl").read_text().splitlines())
    last = max((p.name for p in folder.glob("checkpoints/*.json")), default="")
    return n, (folder / "best.safetensors").exists(), last


def name(round: int) -> str:
    return f"round-{round:06d}.safetensors.json"


def test_a_round_is_recorded_then_tracked_then_saved_then_reported(tmp_path: Path) -> None:
    seen: list[list[object]] = []
    folder = tmp_path / "run"
    experiment.run(small(tmp_path, WATCHED), folder, say=quiet, on_round=lambda n, _: seen.append([n, *stored(folder)]))
    tracked = [json.loads(line) for line in (folder / "watch.jsonl").read_text().splitlines()]
    assert [line[:2] for line in tracked] == [line[:2] for line in seen] == [[n, n + 1] for n in range(5)]
    assert [line[2:] for line in tracked] == [[False, ""], *[[False, name(0)]] * 2, *[[True, name(2)]] * 2]
    assert [line[2:] for line in seen] == [*[[False, name(0)]] * 2, *[[True, name(2)]] * 2, [True, name(4)]]


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_a_tracker_that_fails_does_not(tmp_path: Path) -> None:
    messages, seen, folder = list[str](), list[int](), tmp_path / "run"

    def break_folders(round: int, metrics: object) -> None:
        seen.append(round)
        if round == 0:
            (folder / "watch.jsonl").unlink()
            (folder / "watch.jsonl").mkdir()
        if round == 1:
            shutil.rmtree(folder / "checkpoints")
            (folder / "checkpoints").write_text("")

    with pytest.raises(OSError, match="checkpoints"):
        experiment.run(small(tmp_path, WATCHED), folder, say=messages.append, on_round=break_folders)
    assert ["goes on without this tracker" in text for text in messages].count(True) == 1
    assert seen == [0, 1]
    assert stored(folder)[0] == 3
    assert not {"summary.json", "finished.json"} & {path.name for path in folder.iterdir()}


def test_what_is_no_callback_is_refused_before_any_work(tmp_path: Path) -> None:
    progress = Progress(lambda *_: None)
    require_callbacks([progress])
    for callbacks, text in (([progress, NoMeasure()], "NoMeasure is no callback"), ([progress] * 2, "py:Progress")):
        with pytest.raises(UserError, match=text):
            require_callbacks(callbacks)
    for values, text in (
        ({"tracking.tracker": f"{__file__}:NoTracker"}, "NoTracker has no finish; it must have log, finish"),
        ({"measure.measure": f"{__file__}:NoMeasure", "measure.every": 1}, "NoMeasure.* has no __call__"),
    ):
        with pytest.raises(UserError, match=text):
            experiment.run(small(tmp_path, values), tmp_path / "run", say=quiet)
        assert not list(tmp_path.iterdir())


class Number(float):
    """A float to which a weak reference can point."""


@dataclass
class Counted(Callback):
    """Logs a number in each round, and counts how many of these numbers are still in memory."""

    numbers: WeakSet[Number]
    most: int = 0

    def measure(self, now: Standing, last: int) -> Mapping[str, float]:
        self.numbers.add(number := Number(now.round))
        self.most = max(self.most, len(self.numbers))
        return {"number": number}


def test_the_lines_of_all_rounds_are_not_kept_in_memory(tmp_path: Path) -> None:
    for stop in ("never", "patience"):
        ready = assemble(build(small(tmp_path, {"federation.rounds": 6, "federation.stop": stop})))
        counted = Counted(WeakSet())
        federate(ready, ready.executor(), ready.start(ClientMemory()), [], [counted])
        assert counted.most <= 3  # the best round, the last round and this round


def test_callbacks_hold_no_experiment_and_no_section_of_one() -> None:
    kinds = [kind for kind in Callback.__subclasses__() if kind.__module__.startswith("fedcommons")]
    assert len(kinds) == 8
    for kind in kinds:
        for hint in get_type_hints(kind).values():
            assert not [t for t in (hint, *get_args(hint)) if "fedcommons.config" in getattr(t, "__module__", "")], kind
