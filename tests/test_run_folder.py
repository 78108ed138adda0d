"""Run folders and those of sweeps: what others have there stays, and what is damaged is played again."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.sweeping import sweep as tuning
from fedcommons.tracking.run_folder import RunFolder, read_rounds, read_summary

TINY = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 60, "client.epochs": 1, "measure.every": 0, "federation.rounds": 6,
        "federation.checkpoint_every": 2, "tracking.wandb": "off", "model.channels": (2, 4),
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
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Files of somebody else."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return {name: f"mine: {name}".encode() for name in names}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, and one that was cut off in round 5, with checkpoints of rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")

    def cut(number: int, _: Mapping[str, float | None]) -> None:
        if number == 5:
            raise PowerCut

    experiment.run(TINY, folder / "whole")
    with pytest.raises(PowerCut):
        experiment.run(TINY, folder / "cut", on_round=cut)
    return folder


def resumed(folder: Path) -> int | None:
    """Resume a run; the first round that it plays, None for none."""
    seen: list[int] = []
    experiment.run(TINY, folder, resume=True, on_round=lambda number, _: seen.append(number))
    return seen[0] if seen else None


# --- what others have there


FOREIGN = [
    ["notes.txt"], ["checkpoints/best.safetensors"], ["memory/of/mine"], ["error.txt"], [".draft.tmp"],
    ["run/.config.yaml.7.tmp", "run/rounds.jsonl"], ["config.yaml"], ["summary.json"], [".lock"], ["rounds.jsonl"],
]  # fmt: skip


@pytest.mark.parametrize("names", FOREIGN, ids=lambda names: names[0])
@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(
    names: list[str], resume: bool, tmp_path: Path
) -> None:
    mine = write(tmp_path, names)
    with pytest.raises(
        UserError, match=rf"^--out: .* is not empty and no run folder \(it has {names[0].split('/')[0]}\)"
    ):
        experiment.run(TINY, tmp_path, resume=resume)
    with pytest.raises(UserError, match=r"is not empty and no folder of a sweep"), tuning.open_sweep(tmp_path, resume):
        pytest.fail("opened")
    assert contents(tmp_path) == mine


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
    assert resumed(folder) == 0
    found = contents(folder)
    assert {name: found.get(name) for name in mine} == mine
    assert not set(left) & set(found)
    assert outputs(folder) == outputs(runs / "whole")


def test_what_was_killed_before_it_had_a_config_can_be_used_again(runs: Path, tmp_path: Path) -> None:
    write(tmp_path, [".config.yaml.12.tmp", "environment.json", "messages.log"])
    (tmp_path / ".lock").write_text("")  # killed before it wrote there who it was
    experiment.run(TINY, tmp_path)
    assert outputs(tmp_path) == outputs(runs / "whole")


def test_another_sweeps_folder_is_no_run_folder_nor_the_other_way_round(runs: Path, tmp_path: Path) -> None:
    with tuning.open_sweep(tmp_path, resume=False):
        pass
    shutil.copytree(runs / "cut", tmp_path / "cell")
    with pytest.raises(UserError, match=r"no run folder \(it has cell\)"):
        experiment.run(TINY, tmp_path, resume=True)
    with pytest.raises(UserError, match="no folder of a sweep"), tuning.open_sweep(tmp_path / "cell", resume=True):
        pytest.fail("opened")
    with pytest.raises(UserError, match="add --resume"), tuning.open_sweep(tmp_path, resume=False):
        pytest.fail("opened")


SWEEPS = {
    "run": ["--preset=smoke"], "table1": ["--preset=smoke"], "figure3": ["--preset=smoke"],
    "convergence_parameters": ["--preset=smoke"], "advise": ["--preset=smoke"],
    "tune": ["--preset=smoke", "--space=lr=0.1,0.2"], "quadratics": ["--preset=smoke"],
    "mnist_softmax": ["--preset=smoke"],
    "communication_saved": [f"--from={Path(__file__).parent.parent}/sweeps/papers/fedssyn/published/"
                            "fedssyn_table1_rounds.csv"],
}  # fmt: skip


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize(("out", "part"), [(".", "is not empty"), ("", "--out must name a file or folder")])
def test_the_folder_one_happens_to_be_in_is_no_place_for_results(
    out: str, part: str, name: str, sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = write(tmp_path, ["thesis.tex", "summary.json", ".writable"])
    with pytest.raises(UserError, match=part):
        vars(sweeps(name))[name]([*SWEEPS[name], f"--out={out}"])
    assert contents(tmp_path) == mine


# --- lines that are damaged


def _swapped(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "truncated": lambda lines: [*lines[:3], lines[3][:9] + b"\n", *lines[4:]],
    "NUL": lambda lines: [*lines[:3], b"\0" * 40 + b"\n", *lines[4:]],
    "not UTF-8": lambda lines: [*lines[:3], b'{"round": 3, "\xff": 1}\n', *lines[4:]],
    "a list": lambda lines: [*lines[:3], b"[3]\n", *lines[4:]],
    "a number": lambda lines: [*lines[:3], b"3\n", *lines[4:]],
    "brackets": lambda lines: [*lines[:3], b"[" * 100_000 + b"\n", *lines[4:]],
    "no round": lambda lines: [*lines[:3], lines[3].replace(b'"round": 3, ', b""), *lines[4:]],
    "no metrics": lambda lines: [*lines[:3], b'{"round": 3}\n', *lines[4:]],
    "text": lambda lines: [*lines[:3], b'{"round": 3, "test/accuracy": "0.5", "train": "1"}\n', *lines[4:]],
    "true": lambda lines: [*lines[:3], b'{"round": 3, "test/accuracy": true, "train": true}\n', *lines[4:]],
    "nan": lambda lines: [*lines[:3], b'{"round": 3, "test/accuracy": NaN, "train": 1e999}\n', *lines[4:]],
    "huge": lambda lines: [*lines[:3], b'{"round": 3, "test/accuracy": 1' + b"0" * 400 + b', "train": NaN}\n'],
    "a float": lambda lines: [*lines[:3], lines[3].replace(b'"round": 3', b'"round": 3.0'), *lines[4:]],
    "empty": lambda lines: [*lines[:3], b"\n", *lines[3:]],
    "twice": lambda lines: [*lines[:4], *lines[3:]],
    "missing": lambda lines: [*lines[:3], *lines[4:]],
    "out of order": _swapped,
}


@pytest.mark.parametrize("name", ["rounds.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_ends_what_can_be_used_of_a_file(
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
def test_a_run_with_a_damaged_line_falls_back_to_the_last_checkpoint_that_fits(
    name: str, line: int, first: int, damage: bytes, runs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "cut", folder)
    lines = (folder / name).read_bytes().splitlines()
    lines[line] = damage
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    assert resumed(folder) == first
    assert outputs(folder) == outputs(runs / "whole")


@pytest.mark.parametrize("line", [6, 2])
def test_a_finished_run_whose_lines_are_not_its_rounds_is_not_finished(line: int, runs: Path, tmp_path: Path) -> None:
    cell = tuning.Trial("run", TINY)
    shutil.copytree(runs / "whole", tmp_path / "run")
    assert tuning.is_done(cell, tmp_path)
    lines = (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(line, lines[line])  # as two processes leave them
    (tmp_path / "run" / "rounds.jsonl").write_bytes(b"".join(lines))
    assert read_summary(tmp_path / "run") is None
    assert not tuning.is_done(cell, tmp_path)
    assert resumed(tmp_path / "run") == {6: None, 2: 0}[line]
    assert outputs(tmp_path / "run") == outputs(runs / "whole")
    assert tuning.is_done(cell, tmp_path)


def test_a_run_that_somebody_else_wrote_into_is_not_summarised(runs: Path, tmp_path: Path) -> None:
    """As on a file system without locks."""

    def writes_too(number: int, _: Mapping[str, float | None]) -> None:
        if number == 5:
            with open(tmp_path / "rounds.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"round": 5, "test/accuracy": 0.1}) + "\n")

    with pytest.raises(ClientError, match="does not hold rounds 0 to 6, each once and in order"):
        experiment.run(TINY, tmp_path, on_round=writes_too)
    assert not (tmp_path / "summary.json").exists()
    assert resumed(tmp_path) == 5
    assert outputs(tmp_path) == outputs(runs / "whole")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000], ids=["empty", "a list", "brackets"])
def test_a_damaged_summary_is_written_again(text: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(text)
    assert resumed(tmp_path / "run") is None  # its last checkpoint is of its last round
    assert outputs(tmp_path / "run") == outputs(runs / "whole")
