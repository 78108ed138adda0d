"""Environment variables that decide how libraries round: recorded, and the same where a run goes on."""

import json
from pathlib import Path

import pytest

from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.federation.variables import ROUNDING, variables
from fedcommons.runs.experiment import run
from fedcommons.tracking.run_folder import RunFolder

CONFIG = presets.experiment("smoke", "digits", {"tracking.wandb": "off", "data.limit": 60, "federation.rounds": 1})
VALUES = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2",
          "ATEN_CPU_CAPABILITY": "avx2"}  # fmt: skip


@pytest.fixture(autouse=True)
def _none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROUNDING:
        monkeypatch.delenv(name, raising=False)


def recorded(folder: Path) -> dict[str, str]:
    return json.loads((folder / "environment.json").read_text())["variables"]


@pytest.mark.parametrize("name", VALUES)
def test_a_run_goes_on_only_where_libraries_round_as_they_did(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = VALUES[name]
    RunFolder(tmp_path / "plain", CONFIG, resume=False)
    monkeypatch.setenv(name, value)
    RunFolder(tmp_path / "set", CONFIG, resume=False)
    RunFolder(tmp_path / "set", CONFIG, resume=True)
    with pytest.raises(UserError, match=rf"{name} is not set there and '{value}' here"):
        RunFolder(tmp_path / "plain", CONFIG, resume=True)
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=rf"{name} is '{value}' there and not set here"):
        RunFolder(tmp_path / "set", CONFIG, resume=True)
    assert (recorded(tmp_path / "plain"), recorded(tmp_path / "set")) == ({}, {name: value})


def test_a_run_of_an_earlier_version_or_with_a_damaged_record_goes_on(tmp_path: Path) -> None:
    RunFolder(tmp_path, CONFIG, resume=False)
    for there in ("{}", '{"variables": 5}', '{"variables": {"PATH": "x"}}', "[]", '["variables"]', "null", "{", ""):
        (tmp_path / "environment.json").write_text(there)
        RunFolder(tmp_path, CONFIG, resume=True)
    assert recorded(tmp_path) == {}


@pytest.mark.ray
def test_actors_that_would_round_otherwise_are_refused(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"tracking.wandb": "off", "data.limit": 60, "federation.executor": "ray_actors", "federation.actors": 1}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # Ray was started without
    assert variables() == {"MKL_CBWR": "COMPATIBLE"}
    with pytest.raises(UserError, match="would round otherwise") as refused:
        run(presets.experiment("smoke", "digits", fields), tmp_path, say=lambda text: None)
    assert len(str(refused.value)) <= 200
