"""A run that is extended by more rounds equals one planned with them, in every file without times."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from interrupted import PowerCut, cut_at
from report_runs import quiet

from fedcommons import Experiment, UserError, experiment
from fedcommons.cli.display import Display
from fedcommons.config.dotted import override
from fedcommons.runs.experiment import run
from fedcommons.tune import continue_runs, sweep
from fedcommons.tune.api import named

FIELDS = {
    "federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 2, "client.epochs": 1, "data.limit": 60,
    "tracking.wandb": "off",
}  # fmt: skip
FEDDPMS = {"algorithm": "feddpms", "feddpms__tries": 4, "model__name": "vae", "model__channels": (2, 4),
           "measure__every": 0}  # fmt: skip


def config(folder: Path, rounds: int, **values: Any) -> Experiment:
    named = {name.replace("__", "."): value for name, value in values.items()}
    fields = {**FIELDS, "artifacts": str(folder / "artifacts"), **named, "federation.rounds": rounds}
    return experiment("smoke", "digits", fields)


def bits(folder: Path) -> dict[str, bytes]:
    """All that a run leaves but its times and what it was run on; of its checkpoints the last."""
    last = max(folder.glob("checkpoints/*.safetensors"))
    paths = [p for p in folder.iterdir() if p.is_file() and p.name not in ("timing.jsonl", "environment.json", ".lock")]
    return {p.name: p.read_bytes() for p in (*paths, last, last.with_name(f"{last.name}.json"))}


def play(folder: Path, plan: Experiment, kill_at: int | None = None) -> list[int]:
    """Go on in this folder; the rounds that were played."""
    seen: list[int] = []

    def watch(number: int, metrics: Mapping[str, float | None]) -> None:
        seen.append(number)
        cut_at(kill_at)(number, metrics)

    run(plan, folder, resume=True, say=quiet, on_round=watch)
    return seen


def equals_planned(folder: Path, plan: Experiment) -> bool:
    """Whether the run in ``folder / "run"`` is the one that was planned so from the start."""
    run(plan, folder / "whole", say=quiet)
    return bits(folder / "run") == bits(folder / "whole")


@pytest.mark.parametrize(
    ("plans", "first", "values"),
    [
        ((3, 4, 5, 8), 5, {}),  # round 3 is measured as the last one only, so it is played again
        ((3, 6), 1, {"federation__checkpoint_every": 9}),  # before round 3 there is only the checkpoint of round 0
        ((2, 5), 3, {"algorithm": "scaffold", "federation__memory_mb": 1e-6}),
        ((3, 7), 3, {"measure__every": 0, "evaluate__every": 2, "evaluate__clients": True}),
        ((3, 6), 3, {"evaluate__new_clients": 0.3, "data__client_test": 0.2, "measure__every": 0}),
        ((2, 3), None, FEDDPMS),  # 0.4 of the rounds are one round of stage I in both plans
    ],
)
@pytest.mark.long
def test_a_longer_plan_gives_the_same_bits(
    plans: tuple[int, ...], first: int | None, values: Mapping[str, Any], tmp_path: Path
) -> None:
    """first: the round with which it goes on; None: that depends on which round is the best."""
    seen: list[list[int]] = [play(tmp_path / "run", config(tmp_path, rounds, **values)) for rounds in plans]
    assert first in (None, seen[-1][0])
    assert equals_planned(tmp_path, config(tmp_path, plans[-1], **values))


@pytest.mark.long
def test_a_killed_run_resumes_when_the_config_asks_for_fewer_rounds(tmp_path: Path) -> None:
    """A round that becomes the last is measured."""
    with pytest.raises(PowerCut):
        play(tmp_path / "run", config(tmp_path, 9), 5)
    assert play(tmp_path / "run", config(tmp_path, 5)) == [5]
    assert equals_planned(tmp_path, config(tmp_path, 5))


def test_what_cannot_go_on_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    pool = {"sharing__setting": "shuffled_real", "sharing__p": 0.1}
    play(tmp_path / "run", config(tmp_path, 4, **pool))
    before = bits(tmp_path / "run")
    for plan, why in (
        (config(tmp_path, 3, **pool), "has 4 rounds already"),
        (config(tmp_path, 6, **{**pool, "sharing__p": 0.2}), r"another sharing\.p"),
    ):
        with pytest.raises(UserError, match=why):
            play(tmp_path / "run", plan)
        assert bits(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("plans", "values", "why"),
    [((4, 6), {"client__lr_schedule": "cosine"}, "client.lr_schedule cosine depends"),
     ((2, 6), FEDDPMS, "algorithm feddpms depends on federation.rounds")],
    ids=["a schedule", "a method"],
)  # fmt: skip
@pytest.mark.long
def test_a_fixed_plan_is_not_extended(plans: tuple[int, int], values: dict[str, Any], why: str, tmp_path: Path) -> None:
    short, long = (config(tmp_path, rounds, **values) for rounds in plans)
    play(tmp_path / "run", short)
    with pytest.raises(UserError, match=why):
        play(tmp_path / "run", long)
    (cell,) = named([short])
    (tmp_path / "run").rename(tmp_path / cell.name)
    with Display() as display:  # nor does a sweep take it for a predecessor
        assert sweep.todo(named([long]), tmp_path, display).shorter == {}


@pytest.mark.long
def test_a_longer_cell_goes_on_from_a_copy_of_the_shorter(tmp_path: Path) -> None:
    """Of several the one with the most rounds; a run of other fields, or one that cannot go on, is left alone."""
    plans = [config(tmp_path, rounds) for rounds in (2, 3, 7)]
    other = config(tmp_path, 4, seed=1)
    cells = {plan.federation.rounds: cell for plan in plans for cell in named([plan])}
    out = tmp_path / "out"
    for cell in (cells[2], cells[3], *named([other])):
        run(cell.config, out / cell.name, say=quiet)
    before = bits(out / cells[3].name)
    long, short = cells[7], named([override(other, {"federation.rounds": 2})])[0]
    with Display() as display:
        work = sweep.todo([cells[2], cells[3], long, short], out, display)
    assert work.shorter == {long.name: out / cells[3].name}
    continue_runs.copy(out / cells[3].name, out / long.name)
    assert play(out / long.name, long.config)[0] == 3
    run(long.config, tmp_path / "whole", say=quiet)
    assert bits(out / long.name) == bits(tmp_path / "whole")
    assert bits(out / cells[3].name) == before


@pytest.mark.long
def test_a_copy_of_a_run_that_is_killed_midway_costs_only_replayed_rounds(tmp_path: Path) -> None:
    """Some of its files are there."""
    play(tmp_path / "run", config(tmp_path, 4))
    continue_runs.copy(tmp_path / "run", tmp_path / "whole")
    paths = sorted((p for p in (tmp_path / "whole").rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
    for path in paths[4:]:
        path.unlink()
    (tmp_path / "whole" / "checkpoints").rmdir()
    play(tmp_path / "whole", config(tmp_path, 6))
    play(tmp_path / "run", config(tmp_path, 6))
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")
