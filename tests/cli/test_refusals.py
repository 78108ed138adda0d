"""Refused commands: exit code 2, one line, nothing written. ``make snapshots`` writes new sentences here."""

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from inline_snapshot import snapshot

from fedcommons.cli import main, parse
from fedcommons.tune.sweep_folder import write_plan

WORDS = {"{long}": "x" * 5000, "{digits}": "9" * 4000, "{nul}": "\0", "{escape}": "\x1b[31m", "{surrogate}": "\udc80"}
"""Placeholders in a command, besides ``{tmp}`` for the folder."""

MY_LAB = """
from torch import nn


class Small(nn.Module):
    def __init__(self, shape, n_classes, width: int = 8):
        super().__init__()
        self.body = nn.Linear(64, n_classes)


class Client:
    def __init__(self, lr: float = 0.5):
        pass


class Careless:
    capabilities = {"needs_pool": True}


def greedy(labels, n_clients, wanted):
    return []
"""
FILES = {
    "capable.py": "import fedcommons\n\n\nclass Lab:\n    capabilities = fedcommons.Capabilities(need_pool=True)\n",
    "my_lab.py": MY_LAB, "bad.py": "1 / 0\n", "lacking.py": "import no_such_package_of_mine\n\n\nclass Net: ...\n",
    "good.yaml": "seed: 4\nclient: {lr: 0.1}\n", "dup.yaml": "seed: 1\nseed: 2\n", "list.yaml": "- seed: 1\n",
    "deep.yaml": "[" * 1000, "nested.yaml": "partition: {alpha: {x: 1}}\n", "section.yaml": "partitions: {alpha: 1}\n",
    "large.yaml": "# " + "x" * 1_000_000 + "\nseed: 1\n", "space.yaml": "space: [alpha=0.1, lr=fast]\n",
}  # fmt: skip
LOADED: dict[str, ModuleType] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands, without links in its path."""
    path = tmp_path_factory.mktemp("commands")
    for name, content in FILES.items():
        (path / name).write_text(content)
    (path / "folder").mkdir()
    (path / "sweep").mkdir()
    write_plan(path / "sweep", {"fedavg-real-a0.1": 2})
    (path / "loop").symlink_to("loop")
    return path.resolve()


@pytest.fixture
def refusal(
    folder: Path,
    sweeps: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str], str]:
    """Give a command in the folder. Check that it exits with 2, prints one line and writes nothing; return the line."""

    def refused(line: str) -> str:
        name, *argv = shlex.split(line)
        for mark, word in {**WORDS, "{tmp}": str(folder)}.items():
            argv = [text.replace(mark, word) for text in argv]
        before, handler = sorted(folder.rglob("*")), signal.getsignal(signal.SIGTERM)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        if name in main.COMMANDS:
            script = main.function_of(name)
        else:
            script = getattr(LOADED.setdefault(name, LOADED.get(name) or sweeps(name)), name)
        with pytest.raises(SystemExit) as ended:
            parse.main(script)
        signal.signal(signal.SIGTERM, handler)
        printed = capsys.readouterr().err.replace(str(folder), "{tmp}").splitlines()
        assert ended.value.code == 2, printed
        assert len(printed) == 1, printed
        assert printed[0].startswith("error: ")
        assert sorted(folder.rglob("*")) == before
        return printed[0].removeprefix("error: ")

    return refused


SENTENCES = {
    "run --seeed=1": snapshot("unknown option '--seeed'; did you mean '--seed'? See --help."),
    "run --client.lr --resume": snapshot("--client.lr needs a value."),
    "run --seed -1": snapshot("seed must lie in [0, 4611686018427387904], got -1."),
    "run --p 0.3": snapshot(
        "sharing.p needs --sharing.setting shuffled_synthetic or local_synthetic or shuffled_real or "
        "server_synthetic, and sharing.setting is real."
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", SENTENCES)
def test_a_refused_command_prints_this_sentence(line: str, refusal: Callable[[str], str]) -> None:
    assert refusal(line) == SENTENCES[line]


REFUSED = r"""
run --mu=0.1 -> --fedprox.mu fedprox --moon.mu moon | run --C=0.1 -> --federation.participation
run --gpus=1 -> CUDA_VISIBLE_DEVICES | run --epsilon=10 -> dp.target_epsilon | run --momentum=1 -> '--client.momentum'
run --proximal_mu 1 --fraction-fit 1 -> --fedprox.mu --federation.participation | run --data a.npz -> function (x, y)
run --learning-rate=0.1 -> --client.lr | run --model my_lab.py:Smal -> my_lab.py 'Small'
run --partition my_lab.py:greedy -> wanted default labels, n_classes | run --config dup.yaml -> seed twice
run --client.optimizer adamw -> client.optimizer 'adamw' 'adam'
table1 --federations 10:x -> --federations N:C '10:x' | tune --space alpha -> --space NAME=VALUES 'alpha'
run seed=1 -> --NAME=VALUE 'seed=1' | run -- --seed 1 -> '--' | run --resume maybe -> --resume false 'maybe'
run --seed 0x10 -> --seed decimal '0x10' | run --client.lr .inf -> client.lr (0, 1e38] inf
run --target {digits} -> --target large 999... | run --target 80% -> target 'loss <= 0.3' '80%'
run --data.augment maybe -> data.augment bool null | run --model.projection none -> model.projection int null 'none'
run --model.channels '[8, null]' -> model.channels int 'null' | run --model.channels 8,16 -> [16,32] '8,16'
run --dataset digit -> data.name 'digits' import path | run --preset smal -> preset 'small' authors
run --preset authors -> Table 1 digits | run --algorithm fedavgg -> 'fedavg' --help
run --algorithm fedala -> package my_algorithm.py:Name | run --target 0 -> target (0, 1] | run --target 1.01 -> target
run --model no_such_module:Small -> ModuleNotFoundError no_such_module | run --model nothing.py:N -> {tmp}/nothing.py
run --model bad.py:Net -> ZeroDivisionError line 1 | run --model lacking.py:Net -> (line 1) no_such_package_of_mine
run --algorithm capable.py:Lab -> 'need_pool' 'needs_pool' (capable.py, line 5
run --algorithm my_lab.py:Careless -> my_lab.py:Careless.capabilities Capabilities(...) dict
run --model my_lab.py:Small --cnn.width 3 -> --cnn.width '--model.width'
run --algorithm my_lab.py:Client -> another name: client section
run --generator.target_epsilon 1 --sharing shuffled_synthetic -> private_ddpm private_gan ddpm
run --sharing shuffled_synthetic --generator private_ddpm -> target_epsilon noise_multiplier neither
run --sharing shuffled_real -> sharing.p share | run --sigma 0.3 -> dp.noise_multiplier --dp.local
run --federation.executor ray_actors --federation.actors 9 -> federation.actors 9 federation.blocks 4
run --federation.transport fast -> federation.transport federation.executor ray_actors
run --communication.compress topk:0 -> topk:SHARE (0, 1] 'topk:0' | run --communication.compress topk:2 -> 'topk:2'
run --communication.compress qsgd:0 -> qsgd:BITS [2, 16] 'qsgd:0' | run --communication.compress qsgd:4.5 -> 'qsgd:4.5'
run --communication.compress zip:3 -> communication.compress none topk:SHARE qsgd:BITS 'zip:3'
run --communication.compress qsgd:4 --communication.error_feedback false -> error_feedback --communication.compress topk
run --algorithm fedproto --communication.compress topk:0.1 -> communication.compress fedproto averages adds_updates
run --client.optimizer adam --client.momentum 0.5 -> client.momentum adam 0.5
run --federation.participation 0.01 -> federation.participation 10 0.1
run --clients 10 --federation.aggregation krum:8 -> krum:8 19 10 | run --federation.aggregation krumm:1 -> 'krum'?
run --federation.aggregation trimmed_mean:0.5 -> trimmed_mean:B [0, 0.5) | run --algorithm krum -> aggregation median
run --algorithm scaffold --federation.aggregation median -> scaffold federation.aggregation averages
run --algorithm scaffold --attack.name alie -> scaffold attack.name averages
run --attack.name signflip -> 'sign_flip'?
run --algorithm perfedavg --data.client_test 0.2 --evaluate.new_clients 0.2 --evaluate.adapt_epochs 4 -> adapt_epochs 4
run --algorithm apfl --client.momentum 0.9 -> client.momentum apfl 0.9
run --algorithm apfl --client.optimizer adam -> client.optimizer apfl adam
run --attack.name alie --attack.share 0.6 -> attack.share [0, 0.5] 0.6 | run --attack.share 0.1 -> attack.name none
run --attack.name backdoor --attack.target 10 -> attack.target 0 9 10
run --algorithm feddf -> --data.public | run --algorithm feddf --feddf.rows pool -> pool server_synthetic
run --algorithm feddf --federation.buffers keep -> feddf federation.buffers average
run --data.public 0.6 -> data.public [0, 0.5] | run --data.public .5 --data.validation .5 -> data.public below 1
run --algorithm feddm --client.clip_norm 1 -> client.clip_norm feddm local steps
run --dp.central true --algorithm scaffold -> dp.central scaffold averages | run --dp.central_noise 2 -> dp.central true
run --dp.central true --dp.central_quantile 0.5 --dp.local true -> dp.central_quantile dp.local
run --dp.central true --federation.weighting samples -> dp.central federation.weighting
run --dp.central true --model.batch_norm true -> BatchNorm federation.buffers keep
run --dp.central true --dp.delta 0.1 -> dp.delta 1/N 0.1 10
run --dp.central true --federation.max_norm 1 -> dp.central federation.max_norm clipped
run --federation.sampling poisson --straggler.q 0.3 -> federation.sampling straggler.rule
run --out '' -> --out file '' | run --out {long} -> --out 4096 5000 | run --out a{nul}b -> --out control a\x00b
run --out=~nosuchuser/x -> --out home | run --out good.yaml/x --preset smoke -> good.yaml written
run --algorithm fed{escape}avg -> --algorithm control \x1b | run --tracking.group {surrogate} -> control \udc80
run --storage-name lab -> storage_name --storage | table1 --storage folder --storage-name a/b -> storage_name 'a/b'
run --storage s4://bucket/lab -> storage s3://BUCKET/PREFIX | run --storage s3://key:secret@b/lab -> credentials
run --config nowhere.yaml -> nowhere.yaml cannot | run --config {tmp}/folder -> folder no file
run --config loop -> loop symbolic | run --config list.yaml -> list.yaml keys | run --config deep.yaml -> deeply
run --config nested.yaml -> 'partition.alpha' (line 1) | run --config section.yaml -> 'partition.alpha'
run --config large.yaml -> 1,000,000
run --replay runs/none --round 1 --client 0 -> runs/none config.yaml | run --client 3 --round 1 -> --round --replay
run --replay nowhere --config good.yaml -> --replay --client.lr
table1 --sharing.setting real -> sharing.setting --settings | table1 --settings real,fake -> sharing.setting 'fake'
table1 --targets 0 -> --targets (0, 1] | table1 --targets 0.8,101 -> --targets 101 | table1 --targets= -> --targets ''
table1 --targets 0.9,0.90 -> --targets different '0.9,0.90' | table1 --targets 80% -> --targets '80%'
table1 --federations 10:1,10:1.0 -> different | table1 --setting shuffled_synthetic --generator= -> generator.name none
table1 --preset authors --federations 20:1 -> Table 1 cifar100 20:1 | table1 --config good.yaml -> seed --seeds
tune -> --space missing alpha | tune --space 'p=uniform(0,1)' -> sharing.p real
tune --space alpha=0.1,0.10 -> different '0.1,0.10' | tune --partiton iid -> '--partition'?
tune --space 'lr=normal(0,1)' -> 'normal' | tune --space 'lr=loguniform(0,1)' -> loguniform 1e-300 (0,1)
tune --space 'seed=uniform(0,1)' -> seed randint int | tune --space tracking.wandb=off -> tracking.wandb no result
methods --algorithms fedadam --fedadam.server_lr 1,2 -> tune --space fedadam.server_lr=1,2
tune --sharing shuffled_synthetic --space generator.channels=8 -> generator.channels list
tune --space lr=0.1 --space client.lr=0.2 -> client.lr twice | tune --space seed=1,2 --seeds 0 -> --seeds --space
tune --space lr=0.1 --lr 0.2 -> client.lr --space 0.2 | tune --space sigma=1,2 -> sigma --dp.local
tune --space lr=0.1 --metric zeta_ht_sq -> 'zeta_hat_sq' | tune --space lr=0.1 --metric epsilon -> epsilon --dp.local
tune --space lr=0.1 --metric test/top3 -> test/top3 --mode | tune --space dp.local=maybe -> dp.local truth 'maybe'
tune --space lr=0.1 --search optuna --scheduler asha -> optuna fifo | tune --config space.yaml -> client.lr 'fast'
tune --space lr=0.1 --jobs 0 -> --jobs 0 | tune --space lr=0.1 --time-budget -1 -> --time-budget '-1' 2h
tune --space lr=0.1 --scheduler asah -> 'asah' 'asha'? | table1 --time-budget soon -> --time-budget 'soon'
tune --space lr=0.1 --scheduler median --rounds 1 -> median federation.rounds evaluate.every
replicate --on-cores 4 -> --on-cores --dry-run | referee fedprox --constants mu -> name=value 'mu'
compare folder -> folder run | compare folder --z p -> --z --facet | dashboard folder --project me/mine -> 'me/mine'
report folder --out report.pdf -> HTML | watch folder --port 65536 -> --port 65535 65536
gc http://lab/runs -> 'http:' 's3://' | gc folder --removed -> '--removed' '--remove'
status folder -> folder sweep | stop folder -> folder sweep | logs sweep fedavg-real-a0.01 -> 'fedavg-real-a0.1'
stop sweep -> no running sweep | status -> folder | logs sweep a b -> run | status missing -> missing sweep
logs sweep fedavg-real-a0.1 -> messages.log
"""
"""Command -> words of its sentence, separated by spaces. Commands of one script may share a line."""


@pytest.mark.parametrize("line", [row for line in REFUSED.splitlines() for row in line.split(" | ") if row])
def test_a_refused_command_names_what_is_wrong(line: str, refusal: Callable[[str], str]) -> None:
    command, _, words = line.partition(" -> ")
    sentence = refusal(command)
    assert [word for word in words.split() if word not in sentence] == [], sentence
