"""The audit of stages that fit images to noisy sums: right sums, and sums with half of their noise."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedcommons.audits.directions import Estimate
from fedcommons.config.flat import choose
from fedcommons.core.noise import CipherStream
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.sharing.stage import Contributions
from papers.fedssyn.noisy_sums import audited

STAGES = {
    "merf": ["--sharing.features", "20", "--partition.n_clients", "2"],
    "ndpdc": ["--sharing.iterations", "30", "--sharing.batch", "5", "--partition.n_clients", "2"],
}
BOTH = pytest.mark.parametrize("setting", STAGES)


@pytest.fixture(scope="module")
def sweep(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("audit_pool")


def found(sweep: ModuleType, setting: str, canaries: int, *more: str) -> Estimate:
    argv = ["--preset", "smoke", "--sharing", setting, "--sharing.target_epsilon", "10", *STAGES[setting], *more]
    return audited(prepare(sweep.arguments(argv).config), None, canaries)[1]


@pytest.mark.long
@BOTH
def test_right_sums_say_most_of_what_is_reported_and_no_more(sweep: ModuleType, setting: str) -> None:
    """merf: with one step and q = 1 mu says all; ndpdc: mu says less than who weighs each step by itself."""
    of = found(sweep, setting, 20 if setting == "merf" else 100)
    assert of.faults == []
    assert 0.75 * of.ceiling < of.epsilon < of.reported == pytest.approx(10, abs=0.01)
    assert of.ceiling == pytest.approx(of.reported, rel=1e-3 if setting == "merf" else 0.5)
    assert of.verdict == "not above the reported one"


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        *((setting, lambda normal: normal / 2) for setting in STAGES),
        ("ndpdc", lambda normal: np.random.default_rng(0).standard_normal(normal.shape)),
    ],
    ids=["merf-half", "ndpdc-half", "ndpdc-the same in all steps"],
)
def test_a_broken_stream_of_secret_noise_is_found(
    sweep: ModuleType,
    setting: str,
    change: Callable[[np.ndarray], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = CipherStream.standard_normal
    monkeypatch.setattr(CipherStream, "standard_normal", lambda self, *size, **kind: change(right(self, *size, **kind)))
    of = found(sweep, setting, 20)
    assert any("the noise multiplier is about" in fault for fault in of.faults)
    assert of.epsilon > of.reported
    assert of.verdict == "above the reported one"


def test_summed_noise_is_that_of_the_sum(sweep: ModuleType) -> None:
    of = found(sweep, "merf", 40, "--sharing.noise", "summed")
    assert of.faults == []
    assert of.noise[0] == pytest.approx(of.sigma, rel=0.1)


def test_a_client_that_is_not_there_and_sums_without_noise_are_refused(sweep: ModuleType) -> None:
    argv = ["--preset", "smoke", "--sharing", "merf", "--sharing.target_epsilon", "10"]
    prepared = prepare(sweep.arguments(argv).config)
    with pytest.raises(UserError, match=r"--attacked .* got 10000"):
        audited(prepared, 10000, 8)
    bare = prepare(sweep.arguments([*argv[:-2], "--sharing.noise_multiplier", "0"]).config)
    with pytest.raises(UserError, match="without noise"):
        audited(bare, None, 8)


@BOTH
def test_noise_that_no_accountant_takes_is_refused_and_discloses_all(sweep: ModuleType, setting: str) -> None:
    """Before any work; a stage that is called all the same says what it gives away."""
    small = {"sharing.setting": setting, "sharing.noise_multiplier": 1e-9}
    with pytest.raises(UserError, match=r"sharing.noise_multiplier .* 0.0001, got 1e-09"):
        prepare(choose(small))
    prepared = prepare(choose({**small, "sharing.noise_multiplier": 1e-4}))
    given, stage = prepared.dealt, prepared.stage
    for sigma, covered in ((0.0, False), (9e-5, False), (1e-4, True)):
        of = replace(stage, noise_multiplier=sigma)  # type: ignore[type-var]
        _, events = of.release(given, Contributions.none(given))
        assert [(event.covered, event.seen) for event in events] == [
            (covered, 0 if covered else n) for n in given.own.sizes
        ]


@pytest.mark.parametrize("more", [["--shadows", "5"], ["--resume"]])
def test_what_only_generators_have_is_refused(sweep: ModuleType, more: list[str]) -> None:
    argv = ["--preset", "smoke", "--sharing", "merf", "--sharing.target_epsilon", "10", *more]
    with pytest.raises(UserError, match=f"{more[0]} is for audits of generators"):
        sweep.arguments(argv)


def test_the_sweep_writes_a_line_for_each_seed(
    sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "smoke", "--sharing", "merf", "--sharing.target_epsilon", "5", *STAGES["merf"]]
    argv += ["--seeds", "0,1", "--out", str(tmp_path / "out")]
    assert sweep.audit_pool([*argv, "--dry-run"]) == 0
    assert "Nothing is trained" in capsys.readouterr().out
    assert sweep.audit_pool(argv) == 0
    text = (tmp_path / "out" / "audit_pool.md").read_text()
    assert text.startswith("**SMOKE")
    rows = re.findall(r"^\| ([01]) +\| [01] +\| 1 +\| 0\.89\d* +\| 1 ", text, re.M)
    assert rows == ["0", "1"]
    with pytest.raises(UserError, match="holds an audit already"):
        sweep.audit_pool([*argv, "--sharing.features", "30"])
    assert (tmp_path / "out" / "audit_pool.md").read_text() == text
