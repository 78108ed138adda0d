"""Config files and paths: a file is taken whole or refused, and counts as its options where it is named."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons import Experiment, UserError
from fedcommons.cli import parse
from fedcommons.cli.parser import Options
from fedcommons.config.dotted import override
from fedcommons.storage.paths import user_path


def parsed(*argv: str) -> Options:
    parser = parse.parser("a test", argv, {})
    parser.add_argument("--preset", type=str)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=str, default="runs/x")
    return parse.parse(parser, argv)


REFUSED = {
    "resume: [true, false]\n": "resume takes true or false", "seed: 1\n---\nseed: 2\n": "is not YAML",
    "[a, b]: 2\n": r"a key that is no name \(line 1\)", "help: true\n": "help is no key",
    "partition: {alpha: 1}\npartition.alpha: 2\n": "partition.alpha twice",
    "config: good.yaml\n": "unknown config key 'config'", "' seed ': 1\n": "did you mean 'seed'",
    'algorithm: "\\e[31m"\n': r"algorithm must be text without control characters, got '\\x1b",
    "seed: !!python/object/apply:os.system ['true']\n": r"'seed' must be a value.*\(line 1\)",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n": "'b' must be a value",
    "a: &a {x: 1}\nb: {<<: [*a, *a]}\n": "'b.<<' must be a value",
    "tracking: {group: " + "x" * 4097 + "}": "4096 characters, got 4097",
    "model: {channels: [" + "1, " * 99_996 + "]}": "more than 100,000 values",
}  # fmt: skip


def test_a_config_file_is_taken_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, word in REFUSED.items():
        path.write_text(text)
        with pytest.raises(UserError, match=word) as error:
            parsed("--config", str(path))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


ACCEPTED: dict[str, dict[str, object]] = {
    "tracking: {group: " + "x" * 4096 + "}": {"tracking.group": "x" * 4096},
    "# " + "x" * 999_990 + "\nseed: 1": {"seed": 1},
    "\ufeffseed: 4\r\nclient:\r\n  lr: 0.1\r\ndata: {dir: }\r\nfeddyn: {}": {"seed": 4, "client.lr": 0.1},
    "alpha: 0.3\np: 0.2\nsharing: local_synthetic\nmodel: linear\ndata-dir: x\nddpm: {epochs: 7}\n": {
        "partition.alpha": 0.3, "sharing.setting": "local_synthetic", "sharing.p": 0.2, "model.name": "linear",
        "data.dir": "x", "generator.epochs": 7,
    },
}  # fmt: skip


def test_a_config_file_sets_these_fields(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, fields in ACCEPTED.items():
        path.write_bytes(text.encode())
        assert parse.experiment(parsed("--config", str(path))) == override(Experiment(), fields)


def test_a_config_file_stands_for_its_options_where_it_stands(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("preset: paper\nseed: 1\nresume: true\ndata: {dir: }\nmodel: {channels: [8, 16]}\n")
    second.write_text("client.lr: 1e-1\nfederation: {rounds: 7}\nresume: false\n")
    argv = ["--preset", "smoke", "--seed", "9", "--config", str(first), "--seed=3", f"--config={second}"]
    assert parse.early(argv, "preset", "small") == "paper"
    options = parsed(*argv)
    assert not options.resume
    assert options.asked == {"seed", "data.dir", "model.channels", "client.lr", "federation.rounds"}
    fields = {"seed": 3, "model.channels": (8, 16), "client.lr": 0.1, "federation.rounds": 7,
              "tracking.preset": "paper"}  # fmt: skip
    assert parse.experiment(options) == override(Experiment(), fields)
    assert parsed("--client.lr", "2", "--config", str(second)).client.lr == 0.1


def test_a_printed_config_is_read_again(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset=smoke", "--sharing=shuffled_synthetic", "--algorithm=fedprox", "--dp.local", "--out=~/x"]
    module, path = sweeps("run"), tmp_path / "c.yaml"
    with pytest.raises(SystemExit) as ended:
        module.arguments([*words, "--print_config"])
    assert not ended.value.code
    path.write_text(capsys.readouterr().out)
    again, first = module.arguments(["--config", str(path)]), module.arguments(words)
    assert {n: v for n, v in again.items() if v != first[n]} == {}
    assert [*again] == [*first]


def test_impossible_paths_are_refused_and_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home := tmp_path / "home"))
    (tmp_path / "loop").symlink_to("loop")
    for option in ("--out", "--artifacts", "--data.dir", "--config"):
        for path, reason in (("loop/x", "symbolic links"), ("a\nb", "control characters"), ("", "a file or folder")):
            with pytest.raises(UserError, match=f"{option}.*{reason}"):
                parsed(f"{option}={path}")
    home.mkdir()
    (home / "c.yaml").write_text("seed: 4\n")
    options = parsed("--config=~/c.yaml", "--out=~/out", "--artifacts=~/store", "--data.dir=~", "--storage=~/s")
    assert (options.seed, options.out, options.artifacts) == (4, f"{home}/out", f"{home}/store")
    assert (options.data.dir, options.storage) == (str(home), f"{home}/s")
    assert user_path("--out", "~/new/folder") == home / "new" / "folder"
