"""``fedcommons wandb`` and ``fedcommons track``: recorded runs are sent from their folders, and only once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import quiet

import fedcommons
from fedcommons import ClientError, UserError
from fedcommons.cli import main
from fedcommons.storage import file_lock
from fedcommons.tracking.remote_run import RunMirror
from fedcommons.tracking.run_folder import read_rounds, stranger
from fedcommons.tracking.wandb_media import KEYS
from fedcommons.tracking.wandb_tracker import recorded_id

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

pytestmark = pytest.mark.long
FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "data.limit": 80,
          "tracking.group": "g", "tracking.notes": "mine"}  # fmt: skip


@pytest.fixture(scope="module")
def recorded_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs; the second run was recorded on another machine, and came by a storage."""
    out = tmp_path_factory.mktemp("sweep")
    fedcommons.run(fedcommons.experiment("smoke", values=FIELDS), out / "a", say=quiet)
    there, storage = out.parent / "worker" / "b", str(out.parent / "storage")
    config = fedcommons.experiment("smoke", values={**FIELDS, "seed": 1, "storage": storage})
    fedcommons.run(config, there, say=quiet)
    (out / "b").mkdir()
    RunMirror(storage, "b", out / "b", print).fetch(resume=True)
    return out


@pytest.fixture
def sweep(recorded_sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copytree(recorded_sweep, tmp_path / "sweep"))


def play(words: list[str]) -> int:
    """Call the command ``words[0]`` of the package, without the common main function that ends the process."""
    return main.function_of(words[0])(words[1:])


def metrics(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a history without pictures, seconds and W&B's own columns."""
    return [{k: v for k, v in row.items() if not k.startswith(("_", "media/", "seconds/"))} for row in rows]


def test_a_run_is_sent_once_in_full(sweep: Path, wandb_online: "Server", capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep / "b"
    assert play(["wandb", str(run), "--project", "P"]) == 0
    bucket = wandb_online.bucket
    assert (bucket["project"], bucket["displayName"], bucket["groupName"]) == ("P", "b", "g")
    assert (bucket["notes"], wandb_online.config["seed"]) == ("mine", 1)
    assert metrics(wandb_online.history) == read_rounds(run)
    assert {KEYS[1], KEYS[2]} <= wandb_online.history[-1].keys()
    assert "rounds_used" in wandb_online.summary
    requests = len(wandb_online.asked)
    assert play(["wandb", str(run), "--project", "P"]) == 0
    assert len(wandb_online.asked) == requests
    assert "0 of 1 runs sent" in capsys.readouterr().out


def test_a_refused_run_stays_and_the_same_command_sends_it(sweep: Path, wandb_online: "Server") -> None:
    before = {path.name: path.read_bytes() for path in (sweep / "a").iterdir() if path.is_file()}
    wandb_online.refuses = True
    words = ["wandb", str(sweep / "a"), str(sweep / "b"), "--project", "P"]
    with pytest.raises(ClientError, match=r"0 of 2 runs were sent") as error:
        play(words)
    assert "\n" not in str(error.value)
    after = {path.name: path.read_bytes() for path in (sweep / "a").iterdir() if path.is_file()}
    assert before.items() <= after.items()
    wandb_online.refuses = False
    assert play(words) == 0
    assert {json.dumps(json.loads((sweep / name / "tracked.json").read_text())) for name in "ab"} == {
        '{"wandb P": [3, true]}'
    }
    sent = wandb_online.variables("upsertBucket")
    assert {row["displayName"] for row in sent if row.get("displayName")} == {"a", "b"}


def test_offline_files_have_variables_of_wandb_where_no_field_is_given(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: Callable[[Path], "WandbFile"]
) -> None:
    """Also the id of an earlier call, and the table of the sweep."""
    variables = {"MODE": "offline", "PROJECT": "Q", "RUN_GROUP": "h", "TAGS": "x,y", "NAME": "n", "RUN_ID": "i"}
    for name, text in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", text)
    (sweep / "a" / "wandb-id.txt").write_text("abc\n")
    assert play(["wandb", str(sweep), "--model"]) == 0
    runs = {name: wandb_file(sweep / name) for name in ("a", "b", ".")}
    assert [runs[name].run.project for name in runs] == ["Q"] * 3
    assert [runs[name].run.run_group for name in runs] == ["g", "g", "sweep"]  # the runs' field is set
    assert [runs[name].run.display_name for name in runs] == ["a", "b", "sweep"]
    assert runs["a"].run.run_id == "abc"
    assert len({each.run.run_id for each in runs.values()} - {"i"}) == 3
    assert runs["."].run.run_id == recorded_id(sweep)  # not the folder's name, which two sweeps may share
    assert {"x", "y", "smoke"} <= {*runs["a"].run.tags}
    (file,) = (sweep / "wandb").glob("offline-run-*/files/media/table/runs_*.json")
    table = json.loads(file.read_text())
    names = [row[table["columns"].index("run")] for row in table["data"]]
    assert (names, str(sweep) in file.read_text()) == (["a", "b"], False)
    artifacts = {name: [r for r in each.records if "artifact" in str(r)] for name, each in runs.items()}
    assert "model-abc" in str(artifacts["a"])
    assert not (sweep / "a" / "tracked.json").exists()  # the run is not at W&B yet


def test_other_trackers_get_a_run_that_none_recorded(sweep: Path) -> None:
    with file_lock.open_lock(sweep / "a", stranger, "run folder"), pytest.raises(ClientError, match="0 of 1 runs"):
        play(["track", str(sweep / "a"), "--tracker", "csv"])
    assert not (sweep / "a" / "metrics.csv").exists()
    assert play(["track", str(sweep / "a"), "--tracker", "csv"]) == 0
    text = (sweep / "a" / "metrics.csv").read_text()
    accuracy = read_rounds(sweep / "a")[-1]["test/accuracy"]
    assert f"2,test/accuracy,{accuracy!r}\n" in text
    assert text.count("seconds/train") == 3


def test_a_live_run_follows_the_variables_and_a_sweeps_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: Callable[[Path], "WandbFile"]
) -> None:
    for name, text in {"NAME": "n", "RUN_ID": "agent-1", "NOTES": "why", "RUN_GROUP": "h", "PROJECT": "Q"}.items():
        monkeypatch.setenv(f"WANDB_{name}", text)
    values = {**FIELDS, "wandb": "offline", "tracking.group": None, "tracking.notes": None, "tracking.project": "mine"}
    fedcommons.run(fedcommons.experiment("smoke", values=values), tmp_path / "run", say=quiet)
    run = wandb_file(tmp_path / "run").run
    assert (run.run_id, run.display_name, run.notes, run.run_group, run.project) == ("agent-1", "n", "why", "h", "mine")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fedcommons.run(fedcommons.experiment("smoke", values=values), tmp_path / "off", say=quiet)
    assert not (tmp_path / "off" / "wandb").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["wandb"], "at least one folder"), (["wandb", "{}/a/none"], "not a folder"),
        (["wandb", "{}", "--project", " "], "--project"), (["wandb", "{}", "--tracker", "mlfow"], "mlflow"),
        (["track", "{}", "--tracker", "csv", "--entity", "me"], "--entity"), (["wandb", "{}"], "the same W&B run"),
        (["wandb", "{}/a"], "login"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_first(words: list[str], key: str, sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(sweep / "none"))
    for name in "ab":
        (sweep / name / "wandb-id.txt").write_text("same\n")
    with pytest.raises(UserError, match=key):
        play([word.format(sweep) for word in words])
    assert not list(sweep.glob("*/tracked.json"))
