"""What a refused command prints: one sentence for each kind of check. ``make snapshots`` writes new sentences here.

The other checks, without their sentences, are in test_refused_words.py.
"""

from collections.abc import Callable

import pytest
from inline_snapshot import snapshot

pytest_plugins = "command_lines"

SENTENCES = {
    "run --seeed=1": snapshot("unknown option '--seeed'; did you mean '--seed'? See --help."),
    "run --zzzzzz 1": snapshot("unknown option '--zzzzzz'. See --help."),
    "run --learning-rate 0.1": snapshot("unknown option '--learning-rate': use --client.lr."),
    "run seed=1": snapshot("an option is --NAME VALUE or --NAME=VALUE, got 'seed=1'."),
    "run --client.lr --resume": snapshot("--client.lr needs a value."),
    "run --resume maybe": snapshot("--resume takes true or false, got 'maybe'."),
    "run --seed x": snapshot("seed takes int, got 'x'."),
    "run --seed -1": snapshot("seed must lie in [0, 4611686018427387904], got -1."),
    "run --seed 0x10": snapshot("--seed takes decimal numbers, got '0x10'."),
    "run --client.lr 0": snapshot("client.lr must lie in (0, 1e38], got 0."),
    "run --target 80%": snapshot(
        "target must be a test accuracy in (0, 1], or a metric and a bound, such as 'loss <= 0.3', got '80%'."
    ),
    "run --dp.local maybe": snapshot("dp.local takes bool, got 'maybe'."),
    "run --model.projection none": snapshot("model.projection takes int or null, got 'none'."),
    "run --model.channels 8,16": snapshot("model.channels takes a list such as [16,32], got '8,16'."),
    "run --model.channels '[8, x]'": snapshot("model.channels takes int, got 'x'."),
    "run --client.optimizer adamw": snapshot(
        "unknown client.optimizer 'adamw'; did you mean 'adam'? Known: adam, sgd."
    ),
    "run --federation.executor ray_actors --federation.actors 9": snapshot(
        "federation.actors = 9 must be at most federation.blocks = 4: an actor more would have no block to work on."
    ),
    "run --client.optimizer adam --client.momentum 0.5": snapshot(
        "client.momentum must be 0 with client.optimizer adam, got 0.5."
    ),
    "run --federation.participation 0.01": snapshot(
        "federation.participation C = 0.01 of 10 clients is less than one client; it must be at least 0.1."
    ),
    "run --algorithm fedavgg": snapshot("unknown algorithm 'fedavgg'; did you mean 'fedavg'? See --help."),
    "run --preset smal": snapshot("unknown preset 'smal'; did you mean 'small'? Known: authors, paper, small, smoke."),
    "run --model my_lab.py:Smal": snapshot(
        "model.name 'my_lab.py:Smal': my_lab.py has no 'Smal'; did you mean 'Small'?"
    ),
    "run --model nothing.py:Small": snapshot("'nothing.py:Small': there is no file {tmp}/nothing.py."),
    "run --model bad.py:Net": snapshot(
        "model.name 'bad.py:Net': importing bad.py failed: ZeroDivisionError: division by zero (bad.py, line 1 in "
        "<module>)"
    ),
    "run --model lacking.py:Net": snapshot(
        "model.name 'lacking.py:Net': {tmp}/lacking.py (line 1) imports no_such_package_of_mine, and there is no "
        "such module."
    ),
    "run --partition my_lab.py:greedy": snapshot(
        "partition.name 'my_lab.py:greedy': it asks for wanted, which has no default and is not handed over (that "
        "is: factors, groups, labels, n_classes, n_clients, rng, rows, seed)."
    ),
    "run --algorithm my_lab.py:Client": snapshot(
        "algorithm my_lab.py:Client needs another name: client is a section of every experiment."
    ),
    "run --dp true": snapshot("--dp is a section: name one of its fields, such as dp.at_once."),
    "run --feddyn.alpha 0.1": snapshot("feddyn.alpha needs --algorithm feddyn, and algorithm is fedavg."),
    "run --p 0.3": snapshot(
        "sharing.p needs --sharing.setting shuffled_synthetic or local_synthetic or shuffled_real or "
        "server_synthetic, and sharing.setting is real."
    ),
    "run --sigma 0.3": snapshot("dp.noise_multiplier changes nothing without --dp.local true."),
    "run --out=~nosuchuser/x": snapshot("--out cannot be '~nosuchuser/x' (Could not determine home directory)."),
    "run --out a{nul}b": snapshot("--out must be text without control characters, got 'a\\x00b'."),
    "run --storage s4://bucket/lab": snapshot(
        "storage must be s3://BUCKET/PREFIX or a folder, got 's4:'; did you mean 's3://'?"
    ),
    "run --storage s3://key:secret@bucket/lab": snapshot(
        "storage must be a URL without user, password and options: credentials are found where AWS's tools find "
        "them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    ),
    "run --config nowhere.yaml": snapshot("--config: nowhere.yaml cannot be read (No such file or directory)."),
    "run --config dup.yaml": snapshot("--config: dup.yaml has seed twice."),
    "run --config list.yaml": snapshot("--config: list.yaml must hold keys and values."),
    "run --config tab.yaml": snapshot(
        "--config: tab.yaml is not YAML: while scanning for the next token found character '\\t' that cannot start "
        'any token in "<unicode string>", line 2, column 1: lr: 0.1 ^.'
    ),
    "run --config bytes.yaml": snapshot(
        "--config: bytes.yaml is not YAML: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte."
    ),
    "run --config deep.yaml": snapshot("--config: deep.yaml is nested too deeply."),
    "run --config nested.yaml": snapshot(
        "--config: nested.yaml: 'partition.alpha' must be a value or a list of values (line 1)."
    ),
    "run --config section.yaml": snapshot(
        "unknown config key 'partitions.alpha'; did you mean 'partition.alpha'? See --help."
    ),
    "run --config large.yaml": snapshot("--config: large.yaml has more than 1,000,000 bytes."),
    "run --config time.yaml": snapshot("client.epochs takes decimal numbers, got '1:30'."),
    "run --config yes.yaml": snapshot("resume takes true or false, got 'yes'."),
    "run --replay runs/none": snapshot("--replay needs --round R and --client I."),
    "run --algorithm scaffold --client.momentum 0.9": snapshot(
        "client.momentum must be 0 for scaffold, whose control (x - y_i)/(K eta) is a mean of gradients for plain "
        "SGD only, got 0.9; use momentum 0 or scaffold.option 1."
    ),
    "run --algorithm feddm --client.clip_norm 1": snapshot(
        "client.clip_norm changes nothing for feddm, whose clients make no local steps."
    ),
    "run --sharing shuffled_synthetic --generator private_ddpm": snapshot(
        "give either generator.target_epsilon or generator.noise_multiplier, not neither."
    ),
    "run --sharing shuffled_real": snapshot(
        "sharing.p must be set for setting shuffled_real: the share of real data that is swapped."
    ),
    "tune": snapshot("--space is missing: name at least one field to sweep, such as --space alpha=0.01,0.1."),
    "tune --space alpha": snapshot(
        "--space takes NAME=VALUES such as alpha=0.01,0.1 or p=uniform(0,0.5), got 'alpha'."
    ),
    "tune --space alpha=0.1,0.10": snapshot(
        "--space partition.alpha takes different values separated by commas, got '0.1,0.10'."
    ),
    "tune --space 'lr=loguniform(0,1)'": snapshot(
        "--space client.lr: loguniform takes (LOW,HIGH) with 0 < LOW < HIGH, from 1e-300 to 1e300, got (0,1)."
    ),
    "tune --space lr=0.1 --lr 0.2": snapshot("client.lr is set by the sweep's own option: use --space instead of 0.2."),
    "tune --space lr=0.1 --metric epsilon": snapshot("--metric epsilon needs --dp.local true."),
    "table1 --federations 10:x": snapshot("--federations takes pairs N:C such as 10:0.4, got '10:x'."),
    "table1 --preset authors --federations 20:1": snapshot(
        "preset authors knows the cells of Table 1 only: cifar10 or cifar100; fedavg, scaffold, fedpvr, fedprox or "
        "feddyn; N:C 10:1, 10:0.4, 40:0.2 or 100:0.1; alpha 0.01 or 0.1; got cifar10, fedavg, 20:1, 0.01."
    ),
    "compare folder": snapshot("folder holds no run."),
    "watch folder --port 65536": snapshot("--port lies in 0 ... 65535, got 65536."),
}


@pytest.mark.parametrize("line", SENTENCES)
def test_a_refused_command_prints_this_sentence(line: str, refusal: Callable[[str], str]) -> None:
    assert refusal(line) == SENTENCES[line]
