"""Run folders and those of sweeps: what others have there stays, and what is damaged is run again."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.errors import ClientError, UserError
from fedcommons.locks import locked
from fedcommons.runs import experiment
from fedcommons.sweeping import sweep as tuning
from fedcommons.tracking.run_folder import RunFolder, read_rounds, read_summary

TINY = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 40, "client.epochs": 1, "measure.every": 0, "federation.rounds": 6,
        "federation.checkpoint_every": 2, "tracking.wandb": "off", "model.channels": (2, 4), "partition.n_clients": 3,
        "federation.memory_mb": 0.001,
    },
)  # fmt: skip


class PowerCut(Exception):
    pass


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ: metrics, summary, the last checkpoints and the memories that they name."""
    paths = [folder / "rounds.jsonl", folder / "summary.json", *folder.glob("*/[!.]*-*[0-9].safetensors*")]
    return {path.name: path.read_bytes() for path in paths}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Write files of the user."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return {name: f"mine: {name}".encode() for name in names}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, and one that was interrupted in round 5, with checkpoints of rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")

    def cut(number: int, _: Mapping[str, float | None]) -> None:
        if number == 5:
            raise PowerCut

    experiment.run(TINY, folder / "whole")
    with pytest.raises(PowerCut):
        experiment.run(TINY, folder / "cut", on_round=cut)
    return folder


def require_resumed(folder: Path, runs: Path, first: int | None) -> None:
    """The run goes on with this round, None for no round, and ends as the undisturbed one."""
    seen: list[int] = []
    experiment.run(TINY, folder, resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == ([] if first is None else [*range(first, 7)])
    assert outputs(folder) == outputs(runs / "whole")


FOREIGN = [
    ["notes.txt"], ["checkpoints/best.safetensors"], ["memory/of/mine"], ["error.txt"], [".draft.tmp"],
    ["run/.config.yaml.7.tmp", "run/rounds.jsonl"], ["config.yaml"], ["summary.json"], [".lock"], ["rounds.jsonl"],
]  # fmt: skip


@pytest.mark.parametrize("names", FOREIGN, ids=lambda names: names[0])
def test_a_folder_with_files_of_the_user_is_refused_and_stays(names: list[str], tmp_path: Path) -> None:
    mine = write(tmp_path, names)
    first = names[0].split("/")[0]
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"^--out: .* no run folder \(it has {first}\)"):
            experiment.run(TINY, tmp_path, resume=resume)
        with pytest.raises(UserError, match="no folder of a sweep"), tuning.open_sweep(tmp_path, resume):
            pytest.fail("opened")
    assert contents(tmp_path) == mine


@pytest.mark.long
def test_a_run_removes_nothing_that_it_did_not_write(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "cut", folder)
    mine = write(folder, [
        ".draft.tmp", ".notes.md.7.tmp", "notes.md", "deep/error.txt", "deep/.config.yaml.7.tmp",
        "deep/checkpoints/round-000002.safetensors", "checkpoints/best.safetensors", "checkpoints/.best.7.tmp",
        "checkpoints/round-best.safetensors", "memory/client-mine.safetensors", ".tune/mine", ".writable",
    ])  # fmt: skip
    left = [".summary.json.7.tmp", "checkpoints/.round-000004.safetensors.json.7.tmp",
            "memory/.client-0000001-round-000004.safetensors.7.tmp"]  # fmt: skip
    write(folder, left)
    (folder / "rounds.jsonl").write_text("")  # so that it begins again and its checkpoints are removed
    require_resumed(folder, runs, 0)
    found = contents(folder)
    assert {name: found.get(name) for name in mine} == mine
    assert not set(left) & set(found)


@pytest.mark.long
def test_a_run_killed_before_its_config_can_begin_again(runs: Path, tmp_path: Path) -> None:
    write(tmp_path, [".config.yaml.12.tmp", "environment.json", "messages.log"])
    (tmp_path / ".lock").write_text("")  # killed before it wrote its process number there
    experiment.run(TINY, tmp_path)
    assert outputs(tmp_path) == outputs(runs / "whole")


def test_the_folder_of_a_sweep_is_no_run_folder_nor_the_other_way_round(runs: Path, tmp_path: Path) -> None:
    with tuning.open_sweep(tmp_path, resume=False):
        pass
    shutil.copytree(runs / "cut", tmp_path / "cell")
    with pytest.raises(UserError, match=r"no run folder \(it has cell\)"):
        experiment.run(TINY, tmp_path, resume=True)
    with pytest.raises(UserError, match="no folder of a sweep"), tuning.open_sweep(tmp_path / "cell", resume=True):
        pytest.fail("opened")
    with pytest.raises(UserError, match="add --resume"), tuning.open_sweep(tmp_path, resume=False):
        pytest.fail("opened")


PUBLISHED = Path(__file__).parent.parent / "sweeps" / "papers" / "fedssyn" / "published"
RESUMABLE = ("run", "table1", "figure3", "convergence_parameters", "advise", "tune")
SWEEPS = {
    **{name: ["--preset=smoke"] for name in (*RESUMABLE, "quadratics", "mnist_softmax")},
    "tune": ["--preset=smoke", "--space=lr=0.1,0.2"],
    "communication_saved": [f"--from={PUBLISHED}/fedssyn_table1_rounds.csv"],
}  # fmt: skip


@pytest.mark.parametrize("name", SWEEPS)
def test_a_folder_in_use_or_of_the_user_is_no_place_for_results(
    name: str, sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = vars(sweeps(name))[name]
    mine = write(tmp_path, ["thesis.tex", "summary.json", ".writable"])
    for out, word in ((".", "is not empty"), ("", "--out must name a file or folder")):
        with pytest.raises(UserError, match=word):
            run([*SWEEPS[name], f"--out={out}"])
    assert contents(tmp_path) == mine
    (tmp_path / "held").mkdir()
    resume = ["--resume"] if name in RESUMABLE else []
    with locked(tmp_path / "held"), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        run([*SWEEPS[name], *resume, "--out=held"])
    assert [path.name for path in (tmp_path / "held").iterdir()] == [".lock"]


def line_3(new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[:3], new + b"\n", *lines[4:]]


DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "truncated": lambda lines: [*lines[:3], lines[3][:9] + b"\n", *lines[4:]],
    "NUL": line_3(b"\0" * 40),
    "not UTF-8": line_3(b'{"round": 3, "\xff": 1}'),
    "a list": line_3(b"[3]"),
    "a number": line_3(b"3"),
    "brackets": line_3(b"[" * 100_000),
    "no round": lambda lines: [*lines[:3], lines[3].replace(b'"round": 3, ', b""), *lines[4:]],
    "no metrics": line_3(b'{"round": 3}'),
    "text": line_3(b'{"round": 3, "test/accuracy": "0.5", "train": "1"}'),
    "true": line_3(b'{"round": 3, "test/accuracy": true, "train": true}'),
    "nan": line_3(b'{"round": 3, "test/accuracy": NaN, "train": 1e999}'),
    "huge": line_3(b'{"round": 3, "test/accuracy": 1' + b"0" * 400 + b', "train": NaN}'),
    "a float": lambda lines: [*lines[:3], lines[3].replace(b'"round": 3', b'"round": 3.0'), *lines[4:]],
    "empty": lambda lines: [*lines[:3], b"\n", *lines[3:]],
    "twice": lambda lines: [*lines[:4], *lines[3:]],
    "missing": lambda lines: [*lines[:3], *lines[4:]],
    "out of order": lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
}


@pytest.mark.parametrize("name", ["rounds.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_counts_up_to_its_first_damaged_line(
    damage: Callable[[list[bytes]], list[bytes]], name: str, runs: Path, tmp_path: Path
) -> None:
    for other in ("rounds.jsonl", "timing.jsonl"):
        shutil.copy(runs / "whole" / other, tmp_path / other)
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    (tmp_path / name).write_bytes(b"".join(damage(lines)))
    record = RunFolder(tmp_path, TINY, resume=False)
    assert record.whole() == (4 if damage is DAMAGES["twice"] else 3)
    assert [line["round"] for line in read_rounds(tmp_path)] == list(range(record.whole() if "rounds" in name else 7))


@pytest.mark.parametrize(
    ("name", "line", "first", "damage"),
    [
        ("rounds.jsonl", 5, 5, b"\0" * 40), ("rounds.jsonl", 4, 3, b'{"round": 4, "te'), ("timing.jsonl", 3, 3, b"\0"),
        ("rounds.jsonl", 2, 0, b"[]"), ("timing.jsonl", 0, 0, b""),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_run_with_a_damaged_line_falls_back_to_the_last_checkpoint_that_fits(
    name: str, line: int, first: int, damage: bytes, runs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "cut", folder)
    lines = (folder / name).read_bytes().splitlines()
    lines[line] = damage
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    require_resumed(folder, runs, first)


@pytest.mark.parametrize(("line", "first"), [(6, None), (2, 0)])
@pytest.mark.long
def test_a_run_whose_lines_are_not_its_rounds_is_not_finished(
    line: int, first: int | None, runs: Path, tmp_path: Path
) -> None:
    cell = tuning.Trial("run", TINY)
    shutil.copytree(runs / "whole", tmp_path / "run")
    assert tuning.is_done(cell, tmp_path)
    lines = (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(line, lines[line])  # as two processes leave them
    (tmp_path / "run" / "rounds.jsonl").write_bytes(b"".join(lines))
    assert read_summary(tmp_path / "run") is None
    assert not tuning.is_done(cell, tmp_path)
    require_resumed(tmp_path / "run", runs, first)
    assert tuning.is_done(cell, tmp_path)


@pytest.mark.parametrize(("at", "first"), [(5, 5), (6, None)])
@pytest.mark.long
def test_a_run_into_which_another_process_wrote_is_not_summarised(
    at: int, first: int | None, runs: Path, tmp_path: Path
) -> None:
    """As on a file system without locks."""

    def writes_too(number: int, _: Mapping[str, float | None]) -> None:
        if number == at:
            with open(tmp_path / "rounds.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"round": at, "test/accuracy": 0.1}) + "\n")

    with pytest.raises(ClientError, match="does not hold rounds 0 to 6"):
        experiment.run(TINY, tmp_path, on_round=writes_too)
    assert not (tmp_path / "summary.json").exists()
    require_resumed(tmp_path, runs, first)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000], ids=["empty", "a list", "brackets"])
def test_a_damaged_summary_is_written_again(text: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(text)
    require_resumed(tmp_path / "run", runs, None)  # its last checkpoint is of its last round
