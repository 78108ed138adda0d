"""Pictures of a run for W&B: what they show, and what they must not disclose."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import quiet

from fedcommons import experiment, run
from fedcommons.tracking.wandb_media import CLASSES, KEYS, allowed, heat_map, histogram, pool_images

POOL, PARTITION, SIZES = KEYS
SMALL = {"wandb": "offline", "federation.rounds": 1, "client.epochs": 1, "measure.every": 0, "data.limit": 80}


def uploaded(folder: Path) -> set[str]:
    """The pictures among the files that W&B has of a run, or will have."""
    files = (folder / "wandb" / "latest-run" / "files").rglob("*.png")
    return {f"media/{path.name.partition('_')[0]}" for path in files}


USER_FILE = """
from dataclasses import dataclass

from fedcommons.sharing.synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Contributions
from fedcommons.generators.requests import Contribution


@dataclass(frozen=True)
class Copying(ShuffledSynthetic):
    def make(self, client_data, generated):
        n, real = len(generated[0].examples), client_data.clients.store
        contributed = [Contribution(real[rows[:n]], n_sources=n) for rows in client_data.clients.rows]
        return Contributions.from_generated(client_data, contributed)
"""


@pytest.mark.parametrize(
    ("setting", "more", "expected"),
    [
        ("raw_copies", {"sharing.c": 0.2}, {PARTITION, SIZES}),
        ("shuffled_synthetic", {"dp.local": True}, {SIZES}),  # noise, and a pool that no epsilon covers
        ("mine.py:Copying", {}, {PARTITION, SIZES}),  # it declares real images as synthetic ones
    ],
)
@pytest.mark.long
def test_the_pictures_of_a_run(
    setting: str, more: dict[str, Any], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    if setting != "raw_copies":
        more = {**more, "generator.epochs": 1, "generator.sampling_steps": 2, "generator.channels": (8, 8)}
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "setting": setting, **more}
    run(experiment("smoke", values=values), tmp_path / "run", say=quiet)
    assert uploaded(tmp_path / "run") == expected


def statement(noise: str | None, commons: str, **config: Any) -> dict[str, Any]:
    """The part of a summary that decides."""
    usual = {"dp.noise": "seeded", "sharing.setting": "shuffled_synthetic", "generator.name": "ddpm"}
    return {"config": {**usual, **config}, "privacy": {"noise": noise, "commons": commons}}


def test_a_pool_that_an_epsilon_covers_may_be_shown_and_class_counts_may_not() -> None:
    assert allowed(statement(None, "uncovered")) == {*KEYS}
    assert allowed(statement("secret", "covered", **{"dp.noise": "secret"})) == {POOL, SIZES}
    assert allowed(statement("secret", "uncovered", **{"dp.noise": "secret"})) == {SIZES}
    assert allowed(statement("seeded", "uncovered")) == {SIZES}
    assert allowed(statement(None, "uncovered", **{"generator.name": "mine.py:Painter"})) == {PARTITION, SIZES}
    assert allowed(statement(None, "uncovered", **{"sharing.setting": "shuffled_real"})) == {PARTITION, SIZES}


def test_a_pool_with_one_real_row_has_no_images() -> None:
    x, y = np.arange(24 * 4, dtype=np.uint8).reshape(24, 1, 2, 2), np.repeat(np.arange(12), 2)
    columns = pool_images(x, y, np.arange(24))
    assert [label for label, _ in columns] == [f"{c} (2)" for c in range(CLASSES)]
    assert all((image == x[2 * c + i]).all() for c, (_, images) in enumerate(columns) for i, image in enumerate(images))
    assert pool_images(x, y, np.array([0, 1, -1])) == ()
    assert pool_images(x.astype(np.float32), y, np.arange(24)) == ()


def test_shades_of_a_heat_map_and_heights_of_bars_follow_the_counts() -> None:
    counts = np.array([[0, 40], [20, 0], [10, 30]])
    pixels = np.array(heat_map(counts)).astype(int)
    assert pixels.shape[0] == 14 * (len(counts) + 3)
    assert heat_map(np.ones((1, 9), int)).size == (48 * 10 + 4, 14 * 4)
    cell = {(i, c): pixels[14 * (i + 2) + 1, 48 * (c + 1) + 44] for i, c in np.ndindex(counts.shape)}
    assert sorted(cell, key=lambda at: -cell[at].sum())[-4:] == [(2, 0), (1, 0), (2, 1), (0, 1)]
    assert cell[0, 0].tolist() == cell[1, 1].tolist() == [247, 251, 255]
    picture = np.array(histogram([10] * 6 + [20] * 3))
    dark = (picture == picture[8 * 14 - 1, 4]).all(axis=2)  # of a bar's foot
    assert (dark[:, 4].sum() - 1, dark[:, 52].sum() - 1) == (5 * 14, 5 * 14 // 2)
