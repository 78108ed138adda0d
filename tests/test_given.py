"""What a command line sets: every word of it, and every key of its config files, is understood or refused."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli, presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import UserError
from fedcommons.paths import user_path


def parse(argv: Sequence[str]) -> None:
    """As a script would."""
    parser = cli.parser("a test", argv, presets.preset("smoke", "digits"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=str, default="runs/x")
    cli.parse(parser, argv)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """The sentence that these options end with; ``file``: what is in a config file besides."""

    def run(*argv: str, file: str | bytes | None = None) -> str:
        if file is not None:
            path = tmp_path / "c.yaml"
            path.write_bytes(file.encode() if isinstance(file, str) else file)
            argv = (*argv, "--config", str(path))
        with pytest.raises(UserError) as error:
            parse(argv)
        message = str(error.value)
        assert "\n" not in message
        assert len(message) < 400
        return message

    return run


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--resum", "did you mean '--resume'"),
        ("--no-resume", "unknown option '--no-resume'"),
        ("--resume=maybe", "--resume takes true or false, got 'maybe'."),
        ("--resume maybe", "--resume takes true or false, got 'maybe'."),
        ("--resume=", "--resume takes true or false, got ''."),
        ("-- --client.lr 0.1", "an option is --NAME VALUE or --NAME=VALUE, got '--'."),
        ("--client.lr 0.1 0.2", "got '0.2'"),
        ("-x", "got '-x'"),
        ("--client.lr --resume", "--client.lr needs a value."),
        ("--partition {alpha:0.1}", "unknown partition.name '{alpha:0.1}'"),
        ("--client.epochs 1:30", "--client.epochs takes decimal numbers, got '1:30'."),
        ("--config", "--config needs a value."),
    ],
)
def test_no_word_is_passed_over(refused: Callable[..., str], words: str, part: str) -> None:
    assert part in refused(*words.split())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("resume: maybe\n", "resume takes true or false, got 'maybe'."),
        ("resume: [true, false]\n", "resume takes true or false"),
        ("seed: 1\nseed: 2\n", "has seed twice."),
        ("partition: {alpha: 1}\npartition.alpha: 2\n", "has partition.alpha twice."),
        ("partition: {alpha: {x: 1}}\n", "'partition.alpha' must be a value or a list of values (line 1)."),
        ("partition: other.yaml\n", "unknown partition.name 'other.yaml'"),
        ("config: other.yaml\n", "unknown config key 'config'"),
        ("1: 2\n", "unknown config key '1'"),
        ("Experiment: {}\n", "'Experiment' must be a value"),
        ("out: null\n", "out takes one text, got 'null'."),
        ("algorithm: [fedavg]\n", "algorithm takes one text, got '[fedavg]'."),
        ("[a]: 2\n", "has a key that is no name (line 1)."),
        ("seed: !!python/object/apply:os.system ['true']\n", "'seed' must be a value or a list of values"),
        ("seed: !mine 3\n", "'seed' must be a value"),
        ("seed: " + "9" * 5000, "seed must have at most 4096 characters, got 5000"),
        ("[" * 3000, "is nested too deeply"),
        ("seed: " + "[" * 3000 + "]" * 3000, "is nested too deeply"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "'b' must be a value or a list of values (line 1)."),
        ("seed: &a [*a]\n", "'seed' must be a value or a list of values"),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}\n", "'b.<<' must be a value or a list of values"),
        ("seed: 1\n---\nseed: 2\n", "is not YAML"),
        ("", "must hold keys and values."),
        ("null", "must hold keys and values."),
        (b"\0\0", "is not YAML"),
        (bytes(range(256)), "is not YAML"),
        ('algorithm: "\\e[31m"\n', r"algorithm must be text without control characters, got '\x1b[31m'."),
        ("# " + "x" * 1_000_000 + "\nseed: 1\n", "has more than 1,000,000 bytes."),
    ],
    ids=lambda v: str(v)[:20] if not isinstance(v, bytes) else "bytes",
)
def test_a_config_file_is_taken_whole_or_refused(refused: Callable[..., str], text: str | bytes, part: str) -> None:
    assert part in refused("--algorithm", "fedavg", file=text)


def test_a_config_file_stands_for_its_options_where_it_stands(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("preset: paper\nseed: 1\nresume: true\ndata: {dir: }\nmodel: {channels: [8, 16]}\n")
    second.write_text("client.lr: 1e-1\nfederation: {rounds: &r 7, checkpoint_every: *r}\nresume: false\n")
    argv = ["--preset", "smoke", "--seed", "9", "--config", str(first), "--seed=3", f"--config={second}"]
    assert cli.early(argv, "preset", "small") == "paper"
    parser = cli.parser("a test", argv, {})
    parser.add_argument("--preset", type=str)
    parser.add_argument("--resume", action="store_true")
    options = cli.parse(parser, argv)
    assert not options.resume
    assert options.asked == {"seed", "data.dir", "model.channels", "client.lr", "federation.rounds",
                             "federation.checkpoint_every"}  # fmt: skip
    fields = {"seed": 3, "model.channels": (8, 16), "client.lr": 0.1, "federation.rounds": 7,
              "federation.checkpoint_every": 7, "tracking.preset": "paper"}  # fmt: skip
    assert cli.experiment(options) == override(Experiment(), fields)


def test_what_a_script_prints_as_its_config_it_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, preset in (
        ("table1", "paper"),
        ("figure3", "small"),
        ("advise", "smoke"),
        ("convergence_parameters", "paper"),
    ):
        module = sweeps(name)
        with pytest.raises(SystemExit):
            module.arguments(["--preset", preset, "--print_config"])
        path = tmp_path / "c.yaml"
        path.write_text(capsys.readouterr().out)
        assert "partition:" in path.read_text()
        assert module.arguments(["--config", str(path)]).preset == preset


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize("option", ["--out", "--artifacts", "--data.dir", "--config"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("loop", "symbolic links"),
        ("loop/below", "symbolic links"),
        ("x" * 300, "too long"),
        ("~nosuchuser/x", "home directory"),
        ("a\0b", "control characters"),
        ("a\nb", "control characters"),
        ("", "must name a file or folder"),
    ],
)
def test_a_path_that_nothing_can_have_is_refused(
    refused: Callable[..., str], places: Path, option: str, path: str, reason: str
) -> None:
    message = refused(f"{option}={path}")
    assert option in message
    assert reason in message


def test_a_tilde_is_the_home_folder_everywhere(places: Path) -> None:
    home = places / "home"
    home.mkdir()
    (home / "c.yaml").write_text("seed: 4\n")
    argv = ["--config=~/c.yaml", "--out=~/out", "--artifacts=~/store", "--data.dir=~"]
    parser = cli.parser("a test", argv, {})
    parser.add_argument("--out", type=str)
    options = cli.parse(parser, argv)
    assert (options.seed, options.out, options.artifacts) == (4, f"{home}/out", f"{home}/store")
    assert options.data.dir == str(home)
    assert user_path("--out", "~/new/folder") == home / "new" / "folder"


@pytest.mark.parametrize("value", ["x" * 4000, "/x" * 2000, "x y" * 1000])
def test_no_more_of_a_value_is_echoed_than_80_characters(refused: Callable[..., str], value: str) -> None:
    for option in ("--algorithm", "--client.lr", f"--{value}", "--config", "--model.channels"):
        if option == "--algorithm":
            with pytest.raises(UserError) as error:
                cli.split("--algorithms", value, int)
            message = str(error.value)
        else:
            message = refused(f"{option}={value}")
        assert value[:20] in message
        assert value[:90] not in message


def test_a_script_reads_its_config_file_once(tmp_path: Path) -> None:
    file, root = tmp_path / "once.yaml", Path(__file__).parent.parent
    file.write_text("seed: 4\n")
    code = (
        "import runpy, sys; opened = []; sys.path.insert(0, 'sweeps')\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"except SystemExit: print(opened.count({str(file)!r}))"
    )
    play = f"import sys; sys.argv = ['sweeps/table1.py', '--config', {str(file)!r}, '--print_config']\n{code}"
    done = subprocess.run([sys.executable, "-c", play], capture_output=True, text=True, cwd=root)
    assert done.stdout.splitlines()[-1] == "1", done.stdout + done.stderr
