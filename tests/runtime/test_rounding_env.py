"""Environment variables that decide how libraries round: recorded, and the same where a run goes on."""

from pathlib import Path

import pytest

from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.runs.experiment import run
from fedcommons.runtime.rounding_env import ROUNDING
from fedcommons.tracking.run_folder import RunFolder

CONFIG = presets.experiment("smoke", "digits", {"tracking.wandb": "off", "data.limit": 60, "federation.rounds": 1})


def test_a_run_goes_on_only_where_libraries_round_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROUNDING:
        monkeypatch.delenv(name, raising=False)
    RunFolder(tmp_path / "plain", CONFIG, resume=False)
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(name, "AVX2")
        RunFolder(tmp_path / name, CONFIG, resume=False)
        RunFolder(tmp_path / name, CONFIG, resume=True)
        with pytest.raises(UserError, match=rf"{name} is not set there and 'AVX2' here"):
            RunFolder(tmp_path / "plain", CONFIG, resume=True)
        monkeypatch.delenv(name)
        with pytest.raises(UserError, match=rf"{name} is 'AVX2' there and not set here"):
            RunFolder(tmp_path / name, CONFIG, resume=True)
    for earlier in ("{}", '{"variables": 5}', '{"variables": {"PATH": "x"}}', "[]", "{"):  # older or damaged
        (tmp_path / "plain" / "environment.json").write_text(earlier)
        RunFolder(tmp_path / "plain", CONFIG, resume=True)


@pytest.mark.ray
def test_actors_that_would_round_otherwise_are_refused(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"tracking.wandb": "off", "data.limit": 60, "federation.executor": "ray_actors", "federation.actors": 1}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # Ray was started without
    with pytest.raises(UserError, match="would round otherwise"):
        run(presets.experiment("smoke", "digits", fields), tmp_path, say=lambda text: None)
