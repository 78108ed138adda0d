"""Bad input gets one clear sentence before any work: field, value, what is allowed, the nearest valid name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedcommons.config import cli, presets, search_space
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import from_dict, override, to_dict
from fedcommons.config.parts import KINDS
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.checks import check
from fedcommons.tracking.run_folder import read_config

SYNTHETIC = ["--sharing.setting", "shuffled_synthetic"]
FIELDS = cli.parser("a test", SYNTHETIC, {}).fields


def asked(argv: list[str]) -> Experiment:
    """What a script would run."""
    parser = cli.parser("a test", argv, presets.preset("smoke", "digits"))
    return cli.experiment(cli.parse(parser, argv))


def refused(argv: list[str]) -> str:
    """The sentence a script would end with."""
    with pytest.raises(UserError) as error:
        build.prepare(asked(argv))
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--data.name", "digit"], ["data.name", "'digit'", "did you mean 'digits'"]),
        (["--algorithm", "fedavgg"], ["algorithm", "did you mean 'fedavg'"]),
        (["--partition.name", "dirichlet_class"], ["did you mean 'dirichlet_classes'"]),
        (["--partition.alhpa", "0.1"], ["--partition.alhpa", "did you mean '--partition.alpha'"]),
        (["--partition.alpha", "-1"], ["partition.alpha", "[1e-300, 1e30]", "-1"]),
        (["--partition.alpha", "nan"], ["partition.alpha", "nan"]),
        (["--partition.alpha", "much"], ["partition.alpha", "float", "'much'"]),
        ([*SYNTHETIC, "--sharing.p", "much"], ["sharing.p takes float or null, got 'much'."]),
        ([*SYNTHETIC, "--sharing.p", ""], ["sharing.p takes float or null, got ''."]),
        (["--client.lr", " "], ["client.lr takes float, got ''."]),
        (["--client.momentum", "1"], ["client.momentum", "[0, 1)"]),
        (
            ["--algorithm", "fednova", "--client.optimizer", "adam"],
            ["client.optimizer", "sgd for fednova", "SGD steps"],
        ),
        (
            ["--algorithm", "scaffold", "--client.momentum", "0.9"],
            ["must be 0 for scaffold", "0.9", "scaffold.option 1"],
        ),
        (["--algorithm", "fedpvr", "--client.momentum", "0.9"], ["must be 0 for fedpvr", "0.9"]),
        (["--algorithm", "scaffold", "--scaffold.option", "3"], ["scaffold.option", "[1, 2]", "3"]),
        (["--algorithm", "fedprox", "--fedprox.mu", "-0.1"], ["fedprox.mu", "[0, 1e38]", "-0.1"]),
        (["--algorithm", "feddyn", "--feddyn.alpha", "0"], ["feddyn.alpha", "(0, 1e38]", "0"]),
        (["--algorithm", "moon", "--moon.temperature", "0"], ["moon.temperature", "(0, 1e38]"]),
        (["--algorithm", "fedmix", "--fedmix.mix", "1.5"], ["fedmix.mix", "[0, 1]", "1.5"]),
        (
            ["--algorithm", "fedpvr", "--fedpvr.layers", "network.last,network.heads"],
            ["'network.heads' matches no layer", "network.conv1, network.conv2, network.hidden, network.last"],
        ),
        (["--dp.local", "true", "--dp.noise_multiplier", "0"], ["dp.noise_multiplier", "[0.001, 1e6]"]),
        (["--dp.local", "true", "--algorithm", "scaffold", "--scaffold.option", "1"], ["scaffold.option must be 2"]),
        (["--client.optimizer", "adam", "--client.momentum", "0.5"], ["client.momentum must be 0", "adam", "0.5"]),
        (["--algorithm", "moon", "--model.name", "linear"], ["no features for moon"]),
        (["--dp.local", "true", "--dp.noise_multiplier", "1e-200"], ["dp.noise_multiplier", "0.001"]),
        (["--straggler.q", "1"], ["straggler.q", "[0, 1)"]),
        (
            ["--model.batch_norm", "true", "--model.name", "linear"],
            ["model.batch_norm needs --model.name cnn", "is linear"],
        ),
        (["--federation.participation", "0.01"], ["less than one client", "at least 0.25"]),
        (["--partition.n_clients", "100000"], ["at most the number of training images", "100000"]),
        (["--partition.name", "single_class", "--partition.n_clients", "7"], ["single_class", "10 classes", "7"]),
        (["--partition.n_clients", "150", "--partition.name", "dirichlet_niid"], ["cannot be met", "fewer clients"]),
        (["--federation.executor", "ray_actors", "--federation.actors", "9"], ["actors = 9", "blocks = 4"]),
        (["--sharing.setting", "shuffled_synthetic", "--sharing.p", "1"], ["sharing.p", "[0, 1)"]),
        ([*SYNTHETIC, "--generator.rho", "0"], ["generator.rho", "(0, 1]"]),
        (["--model.name", "vgg11"], ["vgg11", "32x32", "digits"]),
        (["--data.limit", "99999"], ["data.limit", "99999"]),
        (["--data.name", "mnist", "--data.dir", "/nowhere"], ["/nowhere/MNIST/raw", "--download"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml", "cannot be read"]),
        (["--partition.alpha", "1e-301"], ["partition.alpha must lie in [1e-300, 1e30], got 1e-301."]),
        (["--seed", "9" * 4000], ["seed must lie in [0, 4611686018427387904], got 99", "..."]),
        (["--target", "9" * 4000], ["--target is nested too deeply or too large a number, got '99"]),
        ([*SYNTHETIC, "--generator.channels", "8,16"], ["takes a list such as [16,32], got '8,16'."]),
        (
            [*SYNTHETIC, "--generator.channels", "[" * 3000],
            ["generator.channels takes a list such as [16,32], got '[[[", "[..."],
        ),
        (["--client.epochs", str(10**18)], ["client.epochs must lie in [1, 1e9]"]),
        (["--federation.blocks", str(10**12)], ["federation.blocks must lie in [1, 1e6]"]),
        ([*SYNTHETIC, "--generator.timesteps", str(10**12)], ["generator.timesteps must lie in [1, 1e6]"]),
        (["--model.projection", str(10**12)], ["model.projection must lie in [1, 1e6]"]),
        (["--model.channels", f"[8, {10**30}]"], ["model.channels must lie in [1, 1e6]"]),
        (["--model.channels", "[1000000, 1000000]"], ["the model would take 1.", "e+05 GB or more", "model.channels"]),
        (["--model.projection", "1000000", "--model.channels", "[900000, 900000]"], ["GB of memory"]),
        ([*SYNTHETIC, "--generator.channels", "[80000, 80000]"], ["the generator would take", "generator.channels"]),
        (["--feddyn.alpha", "0.1"], ["feddyn.alpha needs --algorithm feddyn, and algorithm is fedavg."]),
        (
            ["--p", "0.3"],
            [
                "sharing.p needs --sharing.setting shuffled_synthetic or",
                "server_synthetic, and sharing.setting is real.",
            ],
        ),
        (
            ["--rho", "0.3"],
            [
                "generator.rho needs --sharing.setting shuffled_synthetic or local_synthetic",
                "and sharing.setting is real.",
            ],
        ),
        (["--sigma", "0.3"], ["dp.noise_multiplier changes nothing without --dp.local true."]),
        (["--dp.noise", "secret"], ["dp.noise changes nothing without --dp.local true."]),
        (["--alhpa", "0.3"], ["unknown option '--alhpa'; did you mean '--partition.alpha'?"]),
        (["--zzzzzz", "1"], ["unknown option '--zzzzzz'. See --help."]),
        ([*SYNTHETIC, "--sharing.p", "0.999999999"], ["synthetic images would take", "GB", "a smaller sharing.p"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) and v[0].startswith("--") else "",
)
def test_a_bad_request_is_refused_in_one_sentence(argv: list[str], parts: list[str]) -> None:
    message = refused(argv)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("words", [[*SYNTHETIC, "--generator", "private_ddpm"], ["--algorithm", "feddpms"]], ids=str)
def test_what_draws_noise_of_its_own_takes_secret_noise_without_dp_in_local_steps(words: list[str]) -> None:
    argv = [*words, "--dp.noise", "secret"]
    options = cli.parse(cli.parser("", argv, presets.preset("smoke", "digits")), argv)
    assert (options.dp.noise, options.dp.local) == ("secret", False)


IGNORED: dict[str, Any] = {
    "client.lr_schedule": "cosine", "client.warmup": 2, "client.momentum": 0.9, "client.weight_decay": 0.1,
    "client.clip_norm": 1.0, "client.accumulate": 2, "client.precision": "bf16",
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_fields_of_local_steps_are_refused_for_methods_without_them(name: str) -> None:
    """A server with a pool trains on it as clients would, so one-shot Fedssyn takes them."""
    for method in ("feddm", "fedcvae"):
        with pytest.raises(UserError, match=f"{name} changes nothing for {method}, whose clients make no local steps"):
            check(presets.experiment("smoke", "digits", {"algorithm": method, name: IGNORED[name]}))
    for method in ("fedavg", "dense", "one_shot"):
        check(presets.experiment("smoke", "digits", {"algorithm": method, name: IGNORED[name]}))


def test_of_a_repeated_option_the_last_decides_as_for_the_parser() -> None:
    assert cli.early(["--preset", "smoke", "--preset=paper"], "preset", "small") == "paper"
    assert cli.early(["--preset=paper", "--preset", "smoke"], "preset", "small") == "smoke"


def test_what_was_asked_for_is_told_from_a_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("partition:\n  alpha: 0.1\nseed: 0\n", encoding="utf-8")
    argv = ["--config", str(path), "--client.lr=0.05", "--federation.rounds", "9"]
    options = cli.parse(cli.parser("a test", argv, {}), argv)
    assert options.asked == {"partition.alpha", "seed", "client.lr", "federation.rounds"}


def test_an_unknown_key_in_a_config_file_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("partition:\n  alfa: 0.1\n", encoding="utf-8")
    assert "did you mean 'partition.alpha'" in refused(["--config", str(path)])
    path.write_text("- a list\n", encoding="utf-8")
    assert "keys and values" in refused(["--config", str(path)])


def test_options_and_files_describe_the_same_experiment(tmp_path: Path) -> None:
    path, argv = tmp_path / "c.yaml", ["--config", str(tmp_path / "c.yaml"), "--client.lr", "0.2", "--rho=0.5"]
    path.write_text(
        "seed: 3\nalpha: 0.5\nsharing: local_synthetic\nmodel: linear\n"
        "generator: {channels: [8, 16]}\nddpm: {epochs: 7}\n",
        encoding="utf-8",
    )
    by_file = cli.experiment(cli.parse(cli.parser("a test", argv, {}), argv))
    wanted = {"seed": 3, "partition.alpha": 0.5, "generator.channels": (8, 16), "client.lr": 0.2, "generator.rho": 0.5}
    wanted |= {"sharing.setting": "local_synthetic", "model.name": "linear", "generator.epochs": 7}
    assert by_file == override(Experiment(), wanted)


def test_a_config_survives_its_yaml() -> None:
    values = {"generator.channels": (8, 16, 24), "sharing.p": 0.25, "seed": 9, "sharing.setting": "shuffled_synthetic"}
    one = override(Experiment(), values)
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(one)))) == one


def test_every_field_has_a_line_of_help() -> None:
    lists = {"algorithms": ",".join(KINDS["algorithm"].known), "settings": ",".join(KINDS["sharing"].known)}
    parser = cli.parser("a test", [], {}, lists)
    text = " ".join(parser.format_help().split())
    assert {"fedmix.mean_size", "feddyn.alpha", "sharing.p", "generator.rho", "model.channels"} < parser.fields.keys()
    for name in parser.fields:
        assert f"--{name} " in text
        # the type stands straight after the value's name where a field has no line of help
        assert not re.search(rf"--{re.escape(name)} \S+ \(type", text), name


def test_a_config_of_another_version_names_its_file_and_the_key(tmp_path: Path) -> None:
    for text, said in (
        ("client: {lr: 0.1, speed: 3}\n", "is of another version: unknown config key 'client.speed'"),
        ("client: {lr: fast}\n", "is damaged (client.lr is 'fast' and no float or int)"),
        (
            "sharing: {setting: shuffled_synthetic}\ngenerator: {channels: 8}\n",
            "is damaged (generator.channels is 8 and no tuple)",
        ),
        ("seed: " + "[" * 3000, "is damaged"),
        ("algorithm: 5\n", "is damaged (algorithm is 5 and no str)"),
        ("model: {name: [cnn]}\n", "is damaged (model.name is ('cnn',) and no str)"),
    ):
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as error:
            read_config(tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'config.yaml'} {said}")


def test_presets_are_valid() -> None:
    for name in presets.PRESETS:
        check(presets.experiment(name, "digits"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("alhpa=1", "did you mean 'alpha'"),
        ("alpha", "NAME=VALUES"),
        ("lr=loguniform(0,1)", "0 < LOW < HIGH"),
        ("p=normal(0,1)", "unknown distribution"),
        ("alpha=a,b", "float values"),
        ("lr=uniform(0,inf)", "uniform takes (LOW,HIGH) with LOW < HIGH"),
        ("p=uniform(nan,1)", "uniform takes (LOW,HIGH) with LOW < HIGH"),
        ("lr=uniform(-1e308,1e308)", "within 1e300 of 0"),
        ("lr=loguniform(1e-320,1)", "from 1e-300 to 1e300"),
        ("client.batch_size=randint(0.2,0.7)", "whole 0 <= LOW < HIGH"),
        ("client.batch_size=randint(0,1e30)", "whole 0 <= LOW < HIGH"),
        (f"seed=randint(0,{10**30})", "up to 2^62"),
        ("lr=nan", "finite float values"),
        ("lr=0.1,0.10", "different values"),
        ("dp.local=maybe", "--space dp.local takes"),
        ("generator.channels=8", "is a list and cannot be swept"),
        ("seed=" + "1" * 4000, "--space seed must lie in [0, 4611686018427387904], got 111"),
    ],
)
def test_a_bad_search_space_is_refused(text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        search_space.parse([text], FIELDS, {})
    assert part in str(error.value)


def test_search_points_are_keyed_and_within_their_bounds() -> None:
    space = search_space.parse(["alpha=0.01,0.1", "p=uniform(0,0.5)", "lr=loguniform(0.01,0.1)"], FIELDS, {})
    few, many = search_space.points(space, 3, 0), search_space.points(space, 6, 0)
    assert len(few) == 6
    assert few == search_space.points(space, 3, 0) != search_space.points(space, 3, 1)
    assert [p for p in many if p in few] == few  # more samples keep the points there were
    assert all(0 <= p["sharing.p"] < 0.5 and 0.01 <= p["client.lr"] <= 0.1 for p in many)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (["table1.py", "--partition.alpha", "0.3"], "use --alphas instead of 0.3"),
        (["run.py", "--out", "{file}/x", "--preset", "smoke"], "cannot be written"),
        (["table1.py", "--data-dir=~nosuchuser", "--dataset=mnist"], "--data.dir cannot be '~nosuchuser'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_scripts_exit_with_2_and_no_traceback(
    line: list[str], part: str, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    script, *rest = [word.replace("{file}", str(tmp_path / "file")) for word in line]
    done = command(script.removesuffix(".py"), *rest, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()  # nothing half-written


@pytest.mark.long
def test_letters_that_a_terminal_lacks_are_escaped() -> None:
    code = """
from fedcommons.config import cli
from fedcommons.errors import UserError
def script(argv):
    print(chr(0x3c3), flush=True)
    raise UserError(f"{chr(0x3b1)} is no number.")
cli.main(script)
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, env=ascii_only)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"\\u03c3\n", b"error: \\u03b1 is no number.\n")
