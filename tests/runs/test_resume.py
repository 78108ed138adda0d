"""Interrupted at any point and resumed = never interrupted; what others have in a folder stays."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from forked import write_mine
from interrupted import PowerCut, contents, cut_at, outputs, require_resumed, small

from fedcommons.config.dotted import override
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.storage.file_lock import locked
from fedcommons.tracking.run_folder import RunFolder, read_rounds, read_summary
from fedcommons.tune import sweep as tuning

TINY = small(Path("store"), {"measure.every": 3})
POOL = {"sharing.setting": "shuffled_synthetic", "sharing.p": 0.5, "generator.epochs": 1, "generator.channels": (8, 8),
        "generator.sampling_steps": 2, "federation.rounds": 1}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, and one that was interrupted in round 5, with checkpoints of rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    experiment.run(TINY, folder / "whole")
    with pytest.raises(PowerCut):
        experiment.run(TINY, folder / "cut", on_round=cut_at(5))
    return folder


@pytest.mark.parametrize(("last", "first"), [(1, 1), (2, 3), (6, None)])
@pytest.mark.long
def test_a_run_interrupted_in_any_round_ends_as_usual(last: int, first: int | None, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        experiment.run(TINY, tmp_path / "cut", on_round=cut_at(last))
    require_resumed(TINY, tmp_path / "cut", runs / "whole", first)  # from the last checkpoint


FAILS = """
import os
from fedcommons.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    def client(self, work, message, memory, data, round, seed):
        assert round < 4 or not os.environ.get("FAILS")
        return super().client(work, message, memory, data, round, seed)
"""


@pytest.mark.long
def test_a_run_that_a_client_stopped_goes_on_from_that_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its regular checkpoints were of rounds 0 and 2; a resumption that fails again changes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FAILS)
    config, folder = small(tmp_path, {"algorithm": "mine.py:Mine"}), tmp_path / "cut"
    experiment.run(config, tmp_path / "whole")
    monkeypatch.setenv("FAILS", "1")
    for resume in (False, True):
        with pytest.raises(ClientError, match="round 4"):
            experiment.run(config, folder, resume=resume)
        assert (folder / "error.txt").exists()
    monkeypatch.delenv("FAILS")
    require_resumed(config, folder, tmp_path / "whole", 4)
    assert not (folder / "error.txt").exists()


def test_measures_that_are_not_finite_are_reported_once(tmp_path: Path) -> None:
    messages: list[str] = []
    noisy = {"dp.local": True, "dp.noise_multiplier": 1e6, "client.lr": 1e4, "federation.rounds": 3}
    experiment.run(override(TINY, noisy), tmp_path / "run", say=messages.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    lost = {name for line in lines for name, value in line.items() if value is None}
    reported = [name for text in messages if "not finite" in text for name in re.findall(r"\w+/\w+", text)]
    assert lost
    assert sorted(reported) == sorted(lost)


def test_a_finished_run_is_read_and_not_overwritten(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "whole", folder)
    messages: list[str] = []
    never = {"resume": True, "on_round": lambda *_: pytest.fail("ran again")}
    summary = experiment.run(TINY, folder, say=messages.append, **never)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert len(messages) == 1
    assert "finished" in messages[0]
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        experiment.run(TINY, folder)
    with pytest.raises(UserError, match=r"another client\.lr"):
        experiment.run(override(TINY, {"client.lr": 0.3}), folder, resume=True)
    experiment.run(override(TINY, {"federation.actors": 3}), folder, **never)  # it decides no bit
    assert outputs(folder) == outputs(runs / "whole")


@pytest.mark.long
def test_artifacts_are_built_where_they_are_missing_or_damaged(tmp_path: Path) -> None:
    messages, shuffled = list[str](), small(tmp_path, POOL)
    with pytest.raises(LookupError, match="client 0 have not been generated"):  # a trial leaves them to its sweep
        experiment.run(shuffled, tmp_path / "trial", may_generate=False)
    assert not (tmp_path / "artifacts").exists()
    experiment.run(shuffled, tmp_path / "first", say=lambda _: None)
    damaged = max((tmp_path / "artifacts" / "images").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    experiment.run(shuffled, tmp_path / "second", say=messages.append)
    assert any("truncated or altered" in text and "built again" in text for text in messages)
    experiment.run(shuffled, tmp_path / "third", say=pytest.fail)
    assert outputs(tmp_path / "third") == outputs(tmp_path / "second") == outputs(tmp_path / "first")


FOREIGN = ["notes.txt", "checkpoints/best.safetensors", ".draft.tmp", "config.yaml", ".lock", "rounds.jsonl"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_files_of_the_user_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    user_files = contents(write_mine(tmp_path, name))
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"^--out: .* is not a run folder \(it contains {name.split('/')[0]}\)"):
            experiment.run(TINY, tmp_path, resume=resume)
        with pytest.raises(UserError, match="not a folder of a sweep"), tuning.open_sweep(tmp_path, resume):
            pytest.fail("opened")
    assert contents(tmp_path) == user_files


@pytest.mark.long
def test_a_run_removes_nothing_that_it_did_not_write(runs: Path, tmp_path: Path) -> None:
    user_files = contents(write_mine(
        tmp_path / "mine", ".draft.tmp", ".notes.md.7.tmp", "notes.md", "deep/error.txt", "deep/.config.yaml.7.tmp",
        "deep/checkpoints/round-000002.safetensors", "checkpoints/best.safetensors", "checkpoints/.best.7.tmp",
        "checkpoints/round-best.safetensors", "memory/client-mine.safetensors", ".tune/mine", ".writable",
    ))  # fmt: skip
    temporary = [".summary.json.7.tmp", "checkpoints/.round-000004.safetensors.json.7.tmp",
            "memory/.client-0000001-round-000004.safetensors.7.tmp"]  # fmt: skip
    for source in (runs / "cut", tmp_path / "mine"):
        shutil.copytree(source, tmp_path / "run", dirs_exist_ok=True)
    write_mine(tmp_path / "run", *temporary)
    (tmp_path / "run" / "rounds.jsonl").write_text("")  # so that it begins again and its checkpoints are removed
    require_resumed(TINY, tmp_path / "run", runs / "whole", 0)
    remaining = contents(tmp_path / "run")
    assert {name: remaining.get(name) for name in user_files} == user_files
    assert not set(temporary) & set(remaining)


@pytest.mark.long
def test_a_run_killed_before_its_config_can_begin_again(runs: Path, tmp_path: Path) -> None:
    write_mine(tmp_path, ".config.yaml.12.tmp", "environment.json", "messages.log")
    (tmp_path / ".lock").write_text("")  # killed before it wrote its process number there
    experiment.run(TINY, tmp_path)
    assert outputs(tmp_path) == outputs(runs / "whole")


def test_the_folder_of_a_sweep_is_no_run_folder_nor_the_other_way_round(runs: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    with tuning.open_sweep(tmp_path, True, notes.append):
        assert [f"Nothing to resume in {tmp_path}: " in text for text in notes] == [True]
        shutil.copytree(runs / "cut", tmp_path / "cell")
    with pytest.raises(UserError, match=r"not a run folder \(it contains cell\)"):
        experiment.run(TINY, tmp_path, resume=True)
    for where, resume, word in ((tmp_path / "cell", True, "not a folder of a sweep"), (tmp_path, False, "--resume")):
        with pytest.raises(UserError, match=word), tuning.open_sweep(where, resume):
            pytest.fail("opened")


@pytest.mark.parametrize("name", ["run", "table1", "quadratics"])
def test_a_folder_in_use_or_of_the_user_is_no_place_for_results(
    name: str, sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = vars(sweeps(name))[name]
    user_files = contents(write_mine(tmp_path, "thesis.tex", "summary.json", ".writable"))
    for out, word in ((".", "is not empty"), ("", "--out must name a file or folder")):
        with pytest.raises(UserError, match=word):
            run(["--preset=smoke", f"--out={out}"])
    assert contents(tmp_path) == user_files
    (tmp_path / "busy").mkdir()
    resume = ["--resume"] if name != "quadratics" else []
    with locked(tmp_path / "busy"), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        run(["--preset=smoke", *resume, "--out=busy"])
    assert ("Nothing to resume in busy: " in capsys.readouterr().out) == (name == "run")
    assert [path.name for path in (tmp_path / "busy").iterdir()] == [".lock"]


NAME = b'"round": 3'
DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "truncated": lambda lines: [lines[3][:9] + b"\n"], "no round": lambda lines: [lines[3].replace(NAME + b", ", b"")],
    "a float": lambda lines: [lines[3].replace(NAME, NAME + b".0")], "empty": lambda lines: [b"\n", lines[3]],
    "twice": lambda lines: [lines[3], lines[3]], "missing": lambda lines: [],
    "out of order": lambda lines: [lines[4], lines[3]],
}  # fmt: skip
INSTEAD = {
    "NUL": b"\0" * 40, "not UTF-8": b'{"round": 3, "\xff": 1}', "a list": b"[3]", "brackets": b"[" * 100_000,
    "no metrics": b'{"round": 3}', "text": b'{"round": 3, "test/accuracy": "0.5"}',
    "true": b'{"round": 3, "test/accuracy": true}', "nan": b'{"round": 3, "test/accuracy": NaN, "train": 1e999}',
}  # fmt: skip


@pytest.mark.parametrize("name", ["rounds.jsonl", "timing.jsonl"])
def test_a_file_counts_up_to_its_first_damaged_line(name: str, runs: Path, tmp_path: Path) -> None:
    lines = (runs / "whole" / name).read_bytes().splitlines(keepends=True)
    for other in ("rounds.jsonl", "timing.jsonl"):
        shutil.copy(runs / "whole" / other, tmp_path / other)
    record = RunFolder(tmp_path, TINY, resume=False)
    assert record.whole() == 7
    replaced: dict[str, list[bytes]] = {kind: [text + b"\n"] for kind, text in INSTEAD.items()}
    for kind, new in (replaced | {kind: damage(lines) for kind, damage in DAMAGES.items()}).items():
        (tmp_path / name).write_bytes(b"".join([*lines[:3], *new, *lines[4:]]))
        assert record.whole() == 3 + (kind == "twice"), kind
        assert len(read_rounds(tmp_path)) == (record.whole() if name == "rounds.jsonl" else 7), kind


@pytest.mark.parametrize(
    ("run", "name", "line", "new", "first"),
    [("cut", "rounds.jsonl", 5, b"\0" * 40, 5), ("cut", "rounds.jsonl", 4, b'{"round": 4, "te', 3),
     ("cut", "timing.jsonl", 0, b"", 0), ("whole", "rounds.jsonl", 2, None, 0)],
)  # fmt: skip
@pytest.mark.long
def test_a_run_with_a_damaged_line_falls_back_to_the_last_checkpoint_that_fits(
    run: str, name: str, line: int, new: bytes | None, first: int | None, runs: Path, tmp_path: Path
) -> None:
    """new: a line in the place of another; None: the line is there twice, as two processes leave it."""
    folder, cell = tmp_path / "run", tuning.Trial("run", TINY)
    shutil.copytree(runs / run, folder)
    assert tuning.is_done(cell, tmp_path) == (run == "whole")
    lines = (folder / name).read_bytes().splitlines()
    lines[line : line + 1] = [lines[line]] * 2 if new is None else [new]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    assert read_summary(folder) is None
    assert not tuning.is_done(cell, tmp_path)
    require_resumed(TINY, folder, runs / "whole", first)
    assert tuning.is_done(cell, tmp_path)


@pytest.mark.long
def test_a_run_into_which_another_process_wrote_is_not_summarised(runs: Path, tmp_path: Path) -> None:
    """As on a file system without locks."""

    def writes_too(number: int, _: Mapping[str, float | None]) -> None:
        if number == 5:
            with open(tmp_path / "rounds.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"round": 5, "test/accuracy": 0.1}) + "\n")

    with pytest.raises(ClientError, match="does not hold rounds 0 to 6"):
        experiment.run(TINY, tmp_path, on_round=writes_too)
    assert not (tmp_path / "summary.json").exists()
    require_resumed(TINY, tmp_path, runs / "whole", 5)


def test_a_damaged_summary_is_written_again(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("[]")
    for path in (runs / "whole" / "checkpoints").glob("round-000004*"):  # an old one, which a killed run left
        shutil.copy(path, tmp_path / "run" / "checkpoints" / path.name.replace("4", "2"))
    require_resumed(TINY, tmp_path / "run", runs / "whole", None)  # its last checkpoint is of its last round
