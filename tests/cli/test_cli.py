"""Command lines of one experiment: what they mean, and what is refused before any work."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedcommons.cli import parse, parser, search_space
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.build import check
from fedcommons.tracking.record_schema import flaw_of_config
from fedcommons.tracking.run_folder import read_config, read_run
from papers.fedssyn import authors

FIELDS = parse.parser("a test", ["--sharing.setting", "shuffled_synthetic"], {}).fields


def flat_of(argv: list[str]) -> Mapping[str, Any]:
    """Return the fields of the experiment that ``run.py`` would run."""
    defaults = presets.preset(parse.early(argv, "preset", "small"), parse.early(argv, "data.name", "digits"))
    parser = parse.parser("a test", argv, defaults)
    parser.add_argument("--preset", type=str, default="small")
    parser.add_argument("--resume", action="store_true")
    options = parse.parse(parser, argv)
    return authors.settled(options.preset, parse.experiment(options), options.asked).flat


SMOKE = {"target": 0.2, "data.limit": 200, "partition.n_clients": 4, "client.lr": 0.1, "client.epochs": 5,
         "federation.rounds": 3, "federation.checkpoint_every": 1, "measure.every": 3,
         "tracking.preset": "smoke"}  # fmt: skip
ACCEPTED: dict[str, dict[str, Any]] = {
    "--seed 1 --seed=2": {"seed": 2}, "--lr 0.1 --client.lr 0.2": {"client.lr": 0.2},
    "--dp.local --sigma 2": {"dp.local": True, "dp.noise_multiplier": 2.0}, "--dp.local yes": {"dp.local": True},
    "--dp.local --dp.local=false": {}, "--data.augment ~": {}, "--model.projection Null": {},
    "--model.projection 256": {"model.projection": 256}, "--tracking.group ''": {"tracking.group": ""},
    "--federation.memory_mb .inf": {"federation.memory_mb": float("inf")},
    "--cnn.channels '[\"8\", 1_6]'": {"model.channels": (8, 16)},
    "--rounds 3 --clients=5 --epochs 2 --batch-size 4": {"federation.rounds": 3, "partition.n_clients": 5,
                                                         "client.epochs": 2, "client.batch_size": 4},
    "--partition iid": {"partition.name": "iid"}, "--alpha .5 --dirichlet_classes.recut": {"partition.alpha": 0.5},
    "--algorithm fedavg --algorithm feddyn --feddyn.alpha 1": {"algorithm": "feddyn", "feddyn.alpha": 1.0},
    "--setting local_synthetic --ddpm.epochs 3 --rho 1": {"sharing.setting": "local_synthetic", "sharing.p": None,
                                                          "generator.epochs": 3, "generator.rho": 1.0},
    "--setting shuffled_real --p 0.5 --sharing none": {}, "--resume=false --resume": {},
    "--preset smoke --dataset mnist": {**SMOKE, "data.name": "mnist", "client.onednn": True},
    "--algorithm feddpms --dp.noise secret": {"algorithm": "feddpms", "dp.noise": "secret"},
}  # fmt: skip
"""Options -> the fields that are not as without options."""


@pytest.mark.parametrize("words", ACCEPTED)
def test_options_change_these_fields_and_no_other(words: str) -> None:
    now, plain, expected = flat_of(shlex.split(words)), flat_of([]), ACCEPTED[words]
    changed = {name: now[name] for name in plain if name in now and repr(now[name]) != repr(plain[name])}
    new = {name: now[name] for name in expected if name not in plain}
    assert {name: repr(value) for name, value in {**changed, **new}.items()} == {
        name: repr(value) for name, value in expected.items()
    }  # 1 is not 1.0
    # nor is a constant of a component that is new another than it is without options
    new_ones = {n: v for n, v in presets.preset("small", "digits", "ddpm").items() if n in now and n not in plain}
    wanted = choose({**{n: v for n, v in plain.items() if n in now}, **new_ones, **expected}).flat
    assert {n: repr(v) for n, v in now.items()} == {n: repr(v) for n, v in wanted.items()}


REFUSED = r"""
--algorithm fedpvr --client.momentum 0.9 -> client.momentum fedpvr 0.9
--algorithm fedpvr --fedpvr.layers network.last,network.heads -> 'network.heads' no layer network.conv1 network.last
--algorithm moon --model.name linear -> model.name linear has no features for moon
--algorithm moon --model.name linear --model.projection 8 -> accepted
--algorithm fedpvr --dp.local true -> accepted
--algorithm fednova --client.momentum 0.9 -> accepted
--algorithm fednova --client.optimizer adam -> client.optimizer must be sgd for fednova
--algorithm scaffold --client.momentum 0.9 -> client.momentum must be 0 for scaffold scaffold.option 1
--algorithm scaffold --scaffold.option 1 --client.momentum 0.9 -> accepted
--algorithm scaffold --scaffold.option 1 --dp.local true -> scaffold.option must be 2 with dp.local
--algorithm gradient_coding --straggler.partial take -> straggler.partial gradient_coding
--model.norm_bias false -> model.norm_bias model.batch_norm
--dp.noise secret -> dp.noise --dp.local
--partition.n_clients 100000 -> number of training images 100000
--partition.name single_class --partition.n_clients 7 -> single_class 10 classes 7
--partition.n_clients 150 --partition.name dirichlet_niid -> cannot be met fewer clients
--sharing.setting shuffled_synthetic --sharing.p 0.999999999 -> synthetic GB sharing.p
--sharing.setting shuffled_synthetic --generator.channels [80000,80000] -> generator.channels GB
--model.name vgg11 -> vgg11 32x32 digits
--data.limit 99999 -> data.limit 99999
--data.name mnist --data.dir /nowhere -> /nowhere/MNIST/raw --download
--dp.local true --client.precision fp16-mixed -> client.precision must be dp.local
--dp.local true --client.accumulate 2 -> client.accumulate must be 1 with dp.local, got 2
--client.batched true --model.batch_norm true -> client.batched model cnn: statistics
--client.batched true --dp.local true -> client.batched cannot be used with dp.local
--client.batched true --algorithm feddm -> client.batched changes nothing for feddm
--client.graphs true --client.batched true -> client.graphs needs client.batched false
--client.graphs true --client.optimizer adam -> client.graphs model cnn: optimizer is Adam
--evaluate.clients true --measure.every 0 --measure.clients true -> measure.clients must be false
--algorithm fedproto --measure.every 1 -> clients true and --measure.every 0
--algorithm fedper --evaluate.clients true --measure.every 2 -> fedper has no server model needs --measure.every 0.
--algorithm fedbn --evaluate.clients true --measure.every 0 --model.batch_norm true -> --federation.buffers keep
--algorithm fedbn --evaluate.clients true --measure.every 0 --federation.buffers keep -> needs a model with BatchNorm
--evaluate.every 0 -> evaluate.every
--evaluate.new_clients 0.2 -> evaluate.new_clients data.client_test
--evaluate.new_clients 0.95 --data.client_test 0.2 -> evaluate.new_clients [0, 0.9]
--evaluate.new_clients 0.2 --data.client_test 0.2 --partition.n_clients 1 -> no client for training
--evaluate.new_clients 0.9 --data.client_test 0.2 --federation.participation 0.5 -> participation 1 clients
--target new/accuracy_mean>=0.5 -> target new/accuracy_mean last round
--evaluate.adapt_epochs 2 -> changes nothing without evaluate.new_clients
--algorithm fedproto --evaluate.new_clients 0.2 --data.client_test 0.2 -> clients true
--dp.local true --dp.at_once 8 --client.precision bf16 -> client.precision fp32 or tf32
--dp.local true --dp.target_epsilon 4 --dp.noise_multiplier 2 -> either dp.target_epsilon or dp.noise_multiplier
--dp.local true --dp.target_epsilon 0.01 -> a client of examples: dp.target_epsilon 0.01
--dp.local true --dp.target_epsilon 4 --algorithm feddm --feddm.init noise -> FedDM make no local steps
--algorithm feddm --feddm.ipc 11 -> feddm.ipc feddm.least = 1 got 11
--algorithm feddm --dp.local true -> dp.local feddm.init noise
--algorithm feddm --dp.local true --feddm.init noise --feddm.sigma 1 -> feddm.sigma 0
--algorithm feddm --dp.local true --feddm.init noise --feddm.iterations 0 -> feddm.iterations of at least 1
--algorithm feddm --feddm.sigma 1 --feddm.iterations 0 -> feddm.sigma must be 0
--algorithm fedlap --fedlap.radius 0 -> fedlap.radius (0,
--algorithm fedlap --fedlap.classes some -> fedlap.classes all, own
--algorithm fedlap --dp.local true -> needs fedlap.classes all
--algorithm fedlap --dp.local true --fedlap.classes all --dp.clip 0 -> dp.clip
--algorithm fedlap --dp.local true --fedlap.classes all --dp.target_epsilon 0.001 -> examples: dp.target_epsilon 0.001
--algorithm fedlap --model.batch_norm true -> FedLAP is not defined BatchNorm
--algorithm fedlap --client.clip_norm 1 -> client.clip_norm fedlap
--algorithm ifca --evaluate.clients true -> ifca has no server model needs --measure.every 0
--algorithm ifca --model.batch_norm true -> IFCA is not defined BatchNorm
--dp.central true --dp.central_epsilon 4 --dp.central_noise 2 -> either dp.central_epsilon or dp.central_noise
--dp.central true --dp.central_epsilon 0.001 -> dp.central_epsilon noise multiplier above 100
--dp.central_epsilon 4 -> dp.central_epsilon dp.central true
--algorithm qfedavg --qfedavg.q -1 -> qfedavg.q [0, 10] got -1
--algorithm qfedavg --client.optimizer adam -> client.optimizer sgd qfedavg
--algorithm fedbuff --fedbuff.refill step -> accepted
--algorithm fedbuff --fedbuff.buffer 5 -> fedbuff.buffer at most fedbuff.concurrency got 5 and 4
--algorithm fedbuff --fedbuff.concurrency 5 -> at most the number of clients, 4: got 1 and 5
--algorithm fedbuff --federation.participation 0.5 -> federation.participation 1, got 0.5 fedbuff.concurrency
--algorithm fedbuff --straggler.q 0.1 -> fedbuff straggler.q 0
--algorithm fedbuff --straggler.rule slow -> fedbuff straggler.q 0
--algorithm fedvae -> FedVAE needs attribute encode model.name vae
--algorithm feddpms --model.name vae --feddpms.preliminary_rounds 3 -> preliminary_rounds below federation.rounds = 3
--algorithm feddpms --model.name vae --feddpms.classes 11 -> feddpms.classes must be at most the 10 classes
--algorithm feddpms --model.name vae --feddpms.privacy sound --feddpms.sigma 0 -> feddpms.sigma must be above 0
--algorithm feddpms --model.name vae --feddpms.privacy sound --feddpms.receive real -> receive must not be real
--algorithm fedcvae --federation.participation 0.5 -> federation.participation 1, got 0.5
--algorithm fedcvae --federation.buffers keep -> federation.buffers average
--algorithm fedcvae --dp.local true -> dp.local false
--algorithm fedcvae --fedcvae.channels [4,4,4,4,4] -> fedcvae.channels must have 1 to 4 levels got 5
--algorithm fedcvae --model.batch_norm true -> FedCVAE BatchNorm
--algorithm dense --dense.warmup_rounds 3 -> dense.warmup_rounds must be below federation.rounds = 3
--algorithm dense --federation.participation 0.5 -> federation.participation 1, got 0.5
--algorithm one_shot --sharing local_synthetic -> sharing.setting server_synthetic
--algorithm one_shot --sharing server_synthetic --model.batch_norm true -> OneShot BatchNorm
--algorithm fedddpm --model ddpm -> sharing.setting server_synthetic
--straggler.rule per_client --straggler.qs [0.1,0.2] -> straggler.qs 4 clients, got 2
--straggler.rule per_client --straggler.qs [0.1,0.2,1.0,0] -> straggler.qs [0, 1)
--straggler.rule fastest --straggler.k 5 -> straggler.k 4, got 5
--straggler.rule deadline --straggler.deadline 1e-9 -> deadline 1e-09 arrives in 3 rounds
--straggler.rule slow --straggler.share 1.0 -> arrives in 3 rounds is at most 0
--straggler.k 3 -> straggler.k needs --straggler.rule fastest
--federation.gpus_per_actor half -> federation.gpus_per_actor must lie in
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_an_experiment_that_cannot_be_is_refused_in_one_sentence(line: str) -> None:
    words, _, parts = line.partition(" -> ")
    argv = words.split()
    parser = parse.parser("a test", argv, presets.preset("smoke", "digits"))
    if parts == "accepted":  # beside what is refused
        build.build(parse.experiment(parse.parse(parser, argv)))
        return
    with pytest.raises(UserError) as error:
        build.build(parse.experiment(parse.parse(parser, argv)))
    assert [part for part in parts.split() if part not in str(error.value)] == [], str(error.value)
    assert "\n" not in str(error.value)


IGNORED: dict[str, Any] = {
    "client.lr_schedule": "cosine", "client.warmup": 2, "client.momentum": 0.9, "client.weight_decay": 0.1,
    "client.clip_norm": 1.0, "client.accumulate": 2, "client.precision": "bf16",
}  # fmt: skip


def test_fields_of_local_steps_are_refused_for_methods_without_them() -> None:
    for name, value in IGNORED.items():
        with pytest.raises(UserError, match=f"{name} changes nothing for feddm"):
            check(presets.experiment("smoke", "digits", {"algorithm": "feddm", name: value}))
        check(presets.experiment("paper", "digits", {"algorithm": "dense", name: value}))


DAMAGED = {
    "client: {lr: 0.1, speed: 3}": "of another version.*client.speed",
    "client: {lr: fast}": "damaged.*client.lr is 'fast'",
    "generator: {channels: 8}\nsharing: {setting: shuffled_synthetic}": "damaged.*generator.channels is 8",
    "algorithm: 5": "damaged.*algorithm is 5",
    "model: {name: [cnn]}": "damaged.*model.name",
    "seed: " + "[" * 3000: "damaged",
}


def test_a_config_of_another_version_names_its_file_and_the_key(tmp_path: Path) -> None:
    for text, words in DAMAGED.items():
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=f"^{tmp_path / 'config.yaml'} is {words}"):
            read_config(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    assert read_run(tmp_path) == (None, [])
    assert flaw_of_config([1]) is not None


BAD_SPACES = {
    "lr=loguniform(1e-301,1)": "1e-300", "lr=uniform(-1e301,1)": "1e300", "p=uniform(nan,1)": "LOW < HIGH",
    "lr=uniform(1,1)": "LOW < HIGH", "client.batch_size=randint(-1,7)": "whole", "lr=nan": "finite float",
    f"seed=randint(0,{2**62 + 1})": "2\\^62", "dp.local=uniform(0,1)": "list of values only",
}  # fmt: skip


def test_the_limits_of_a_search_space() -> None:
    for text, words in BAD_SPACES.items():
        with pytest.raises(UserError, match=words):
            search_space.read_space([text], FIELDS, {})
    texts = ["lr=loguniform(1e-300,1e300)", "p=uniform(-1e300,1e300)", f"seed=randint(0,{2**62})"]
    assert search_space.read_space(texts, FIELDS, {}).keys() == {"client.lr", "sharing.p", "seed"}


def test_search_points_are_keyed_and_within_their_bounds() -> None:
    space = search_space.read_space(["alpha=0.01,0.1", "p=uniform(0,0.5)", "lr=loguniform(0.01,0.1)"], FIELDS, {})
    few, many = search_space.points(space, 3, 0), search_space.points(space, 6, 0)
    assert len(few) == 6
    assert few == search_space.points(space, 3, 0) != search_space.points(space, 3, 1)
    assert [p for p in many if p in few] == few  # more samples keep the points there were
    whole = search_space.read_space(["seed=randint(1,5)", "lr=uniform(0.1,0.2)"], FIELDS, {})
    assert {point["seed"] for point in search_space.ends(whole)} == {1, 4}
    assert all(0 <= p["sharing.p"] < 0.5 and 0.01 <= p["client.lr"] <= 0.1 for p in many)
    assert search_space.count({"seed": [0] * 300, "alpha": [0] * 60, "lr": None}, 10) == 180_000
    assert search_space.some([range(10**9)] * 9, 3) == search_space.some([range(10**9)] * 9, 3)


def test_no_sharing_is_the_strategy_real_wherever_a_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("sharing: {setting: none}", encoding="utf-8")
    for words in (["--sharing", "none"], ["--sharing.setting=none"], ["--config", str(tmp_path / "none.yaml")]):
        assert flat_of(words) == flat_of([])
    assert presets.experiment("smoke", values={"sharing": "none"}) == presets.experiment("smoke")
    (tmp_path / "swept.yaml").write_text(
        'space: ["sharing=none,shuffled_synthetic", "sharing.withhold=none"]', encoding="utf-8"
    )
    swept = parse.parser("a test", words := ["--config", str(tmp_path / "swept.yaml")], {})
    swept.add_argument("--space", action="append", default=[], help="")
    assert parse.parse(swept, words)["space"] == ["sharing=real,shuffled_synthetic", "sharing.withhold=none"]
    words = ["--settings", "none, merf", "--sharing.withhold=none"]
    grid = parse.parser("a test", words, {}, {"settings": "real"})
    grid.add_argument("--settings", type=str, default="real", help="")
    assert (options := parse.parse(grid, words))["settings"] == "real, merf"
    assert options["sharing.withhold"] == "none"
    other = parser.Parser("a sweep with an option of this name")
    other.add_argument("--sharing", type=str, default="binomial", help="")
    assert parse.parse(other, ["--sharing", "none"])["sharing"] == "none"


def test_printed_options_escape_text_that_turns_the_direction_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("\u202etxt", "日本"):
        with pytest.raises(SystemExit):
            flat_of(["--tracking.group", group, "--print_config"])
        text = capsys.readouterr().out
        assert yaml.safe_load(text)["tracking"]["group"] == group
        assert (group in text) == group.isprintable()
