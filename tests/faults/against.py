"""Command lines whose options contradict each other, or ask for what no machine and no method can do."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from faults import options
from faults.grammar import BASES, GRID, METHODS, Knows, Line, Piece, shown
from faults.options import UNSURE, WRONG
from faults.places import GENERATES, TINY

SYNTHETIC = {**GENERATES, "sharing.setting": "shuffled_synthetic"}

TOGETHER: Sequence[tuple[Mapping[str, str], bool]] = (
    ({"partition.n_clients": "50"}, False), ({"partition.n_clients": "41"}, False),
    ({"partition.n_clients": "10000000"}, True),
    ({"partition.n_clients": "40", "partition.name": "iid"}, False), ({"federation.participation": "0.01"}, False),
    ({"federation.executor": "serial", "federation.actors": "3"}, False), ({"federation.blocks": "100"}, False),
    ({"federation.blocks": "1000000000"}, False), ({"algorithm": "fedprox", "scaffold.x": "1"}, True),
    ({"fedprox.mu": "1"}, True),
    ({"moon.mu": "1", "algorithm": "fedavg"}, True), ({"generator.epochs": "1"}, True),
    ({"generator.name": "private_ddpm"}, True),
    ({**SYNTHETIC, "generator.target_epsilon": "1e300"}, True), ({**SYNTHETIC, "generator.name": "private_ddpm",
    "generator.target_epsilon": "1e300"}, False),
    ({**SYNTHETIC, "generator.name": "private_ddpm", "generator.target_epsilon": "1e-300"}, True), ({**SYNTHETIC,
    "generator.clip": "1e300"}, False),
    ({**SYNTHETIC, "generator.name": "private_ddpm", "generator.clip": "1e300", "generator.target_epsilon": "10"},
    False),
    ({**SYNTHETIC, "generator.label_noise": "1e300"}, False), ({**SYNTHETIC, "generator.label_noise": "2",
    "generator.name": "private_ddpm"}, False),
    ({**SYNTHETIC, "generator.name": "private_ddpm", "generator.target_epsilon": "10", "generator.noise": "2"}, False),
    ({**SYNTHETIC, "sharing.rho": "0"}, False), ({**SYNTHETIC, "generator.rho": "1e-9"}, False), ({**SYNTHETIC,
    "sharing.p": "1"}, False),
    ({"sharing.setting": "real", "sharing.p": "0.5"}, False), ({"sharing.setting": "shuffled_real", "sharing.p": "0"},
    False),
    ({"sharing.setting": "raw_copies", "sharing.c": "0.2", "sharing.d": "9"}, False),
    ({"sharing.setting": "raw_copies", "sharing.d": "0"}, True),
    ({"dp.sigma": "1"}, True), ({"dp.clip": "2"}, True), ({"dp.local": "true", "dp.clip": "1e300"}, False),
    ({"dp.local": "true", "dp.delta": "0.5"}, False),
    ({"dp.local": "true", "dp.delta": "1e-300"}, False), ({"dp.local": "true", "dp.sigma": "1e-300"}, False),
    ({"dp.local": "true", "dp.sigma": "0"}, False),
    ({"dp.local": "true", "model.batch_norm": "true"}, False), ({"dp.local": "true",
    "client.batch_size": "1000000000"}, False),
    ({"dp.local": "true", "algorithm": "feddm"}, False), ({"dp.local": "true", "algorithm": "scaffold",
    "dp.noise": "secret"}, False),
    ({"dp.noise": "secret"}, False), ({"dp.local": "true", "dp.noise": "hidden"}, True), ({"dp.local": "true",
    "federation.weighting": "samples"}, False),
    ({"straggler.q": "1"}, True), ({"straggler.q": "0.999999"}, False), ({"straggler.rule": "deadline"}, False),
    ({"straggler.rule": "fastest", "straggler.q": "0.5"}, False),
    ({"straggler.rule": "groups", "straggler.q": "0.3"}, False), ({"straggler.partial": "take",
    "algorithm": "scaffold", "straggler.q": "0.5"}, False),
    ({"straggler.rule": "slow", "deadline.x": "1"}, True), ({"model.name": "vae"}, False), ({"model.name": "vae",
    "algorithm": "fedvae"}, False),
    ({"algorithm": "fedvae"}, True), ({"algorithm": "feddpms"}, False), ({"algorithm": "moon", "model.name": "linear"},
    False), ({"algorithm": "fedmix", "dp.local": "true"}, False),
    ({"algorithm": "gradient_coding"}, False), ({"algorithm": "gradient_coding", "sharing.setting": "raw_copies"},
    False), ({"algorithm": "fednova", "client.optimizer": "adam"}, False),
    ({"algorithm": "scaffold", "client.optimizer": "adam"}, False), ({"algorithm": "scaffold",
    "client.momentum": "0.9"}, False), ({"client.optimizer": "adam", "client.momentum": "0.9"}, False),
    ({"client.batch_size": "1000000000"}, False), ({"client.batch_size": "1", "model.batch_norm": "true"}, False),
    ({"federation.buffers": "keep"}, False),
    ({"model.batch_norm": "true", "federation.buffers": "keep", "algorithm": "scaffold"}, False),
    ({"model.channels": "[1,1]", "model.batch_norm": "true"}, False),
    ({"model.name": "linear", "model.channels": "[8,16]"}, True), ({"model.name": "linear",
    "model.batch_norm": "true"}, True), ({"data.name": "digits", "data.dir": "new"}, False),
    ({"data.name": "digits", "data.download": "true"}, False), ({"data.name": "mnist"}, True), ({"data.limit": "1"},
    False), ({"data.limit": "4"}, False), ({"data.limit": "5"}, False),
    ({"data.limit": "1000000000"}, False), ({"data.validation": "0.999"}, False), ({"data.validation": "1"}, True),
    ({"data.validation": "0.5", "data.limit": "4"}, False),
    ({"data.validation_from": "last"}, False), ({"partition.name": "dirichlet_niid", "partition.alpha": "1e-300"},
    False), ({"partition.alpha": "1e300"}, False),
    ({"partition.alpha": "5e-324"}, False), ({"partition.name": "iid", "partition.alpha": "0.1"}, False),
    ({"measure.every": "1", "measure.samples": "1"}, False),
    ({"measure.every": "0", "measure.samples": "5"}, False), ({"measure.measure": "nope"}, True),
    ({"tracking.tracker": "nope"}, True), ({"federation.checkpoint_every": "1000000000"}, False),
    ({"federation.memory_mb": "0"}, False), ({"federation.memory_mb": "1e300", "algorithm": "scaffold"}, False),
    ({"federation.max_norm": "1e-300"}, False),
    ({"federation.max_norm": "1e300"}, False), ({"federation.rounds": "1", "measure.every": "1000000000"}, False),
    ({"target": "1"}, False), ({"target": "2"}, True), ({"target": "-1"}, True),
    ({"sharing.audit": "true"}, False), ({**SYNTHETIC, "sharing.audit": "true"}, False), ({**SYNTHETIC,
    "sharing.withhold": "0.5"}, False), ({"sharing.withhold": "0.5"}, False),
    ({"client.lr": "1e300"}, False), ({"client.weight_decay": "1e300"}, False), ({"client.epochs": "1000000000000"},
    False), ({"federation.rounds": "1000000000000"}, False),
    ({"federation.executor": "ray_actors", "federation.actors": "100000"}, False),
    ({"federation.gpus_per_actor": "0.5"}, False), ({"federation.gpus_per_actor": "-1"}, True),
    ({"seed": "340282366920938463463374607431768211456"}, False), ({"client.onednn": "true", "algorithm": "moon"},
    False), ({"preset": "paper"}, False), ({"preset": "authors", "data.name": "digits"}, False),
)  # fmt: skip
"""Fields that do not go together, or hardly, and whether they must be refused."""

NUMBERS = ("１", "٣", "1_0", "1_0.5", "1e20", "10" * 10, "1e9", "0x10", " 3", "3 ", "+3", "-3", "3.", "1e-400", "1e400",
"nan", "inf", "-0", "০.৫",
           "½", "1,", ",1", "1,1", "1, 2", "1;2", "1:2", "10**3", "1/2", "a", "", "1e1000000000", "0", "9" * 25, "1E2",
           "1d2", "infinity", "²")  # fmt: skip
"""Numbers as they may be written, in lists too."""

LISTS: Mapping[str, Sequence[str]] = {
    "feddm": ("study-alpha", "alphas", "seeds"), "audit_pool": ("shadows", "p", "canaries", "seeds"),
    "private_sizes": ("p", "epsilons", "seeds", "sizes"),
    "table1": ("alphas", "seeds", "federations"), "figure3": ("alphas", "seeds", "checkpoints"), "tune": ("seeds",
    "samples", "on-cores"), "private_fedssyn": ("epsilons", "checkpoints"),
    "disclosure": ("seeds", "p", "c"), "convergence_parameters": ("p", "epochs", "noise", "generator-epochs"),
    "feddpms": ("seeds", "alphas"), "gradient_coding": ("repetitions", "seeds", "q"),
    "quadratics": ("seeds", "rounds"), "mnist_softmax": ("rounds", "lrs", "seeds"), "advise": ("probe-rounds",
    "check-p", "p"), "run": ("client.lr", "seed", "partition.n_clients"),
}  # fmt: skip
"""Options of scripts that are numbers or lists of numbers. What a script does not have must be refused as well."""

REFUSED_SPACES = ("algorithm=fedavg,nope", "fedprox.mu=0,1", "sharing.setting=real,nope",
"target=0.1,2", "partition.n_clients=2,10000000", "out=a,b", "preset=smoke,small",
                  "tracking.wandb=off,online", "straggler.q=0.1,1", "straggler.q=uniform(0,2)",
                  "client.lr=loguniform(1,0.1)", "dp.sigma=1,2")  # fmt: skip


def make(seed: int, number: int, knows: Knows) -> Line:
    """The line of this number."""
    rng = random.Random(f"against {seed} {number}")
    way = rng.choices((_together, _numbers, _many, _space), (35, 35, 20, 10))[0]
    return way(rng, knows)


def _piece(name: str, text: str, refused: bool = False, asked: Mapping[str, Any] | None = None) -> Piece:
    tokens = (f"--{name}={text}",) if text.startswith("-") else (f"--{name}", text)
    return Piece(tokens, asked or {}, f"{name} {shown(text)}" if refused else "")


def _together(rng: random.Random, knows: Knows) -> Line:
    """Fields that do not go together."""
    fields, must = rng.choice(TOGETHER)
    more: Mapping[str, str] = rng.choice(METHODS) if rng.random() < 0.3 else {}
    pieces = [_piece(name, text) for name, text in {**more, **fields}.items()]
    costly = {n: int(t) for n, t in fields.items() if n in options.COSTLY and t.isdigit() and len(t) > 3}
    if must and not more:
        pieces.append(Piece(wrong=str(dict(fields))))
    if costly:
        pieces.append(Piece(asked=costly))
    if rng.random() < 0.15:
        pieces.append(Piece(("--dry-run",)))
    return Line("against", "run", TINY, pieces)


def _numbers(rng: random.Random, knows: Knows) -> Line:
    """One number, as it may be written."""
    script = rng.choice([*LISTS])
    name, text = rng.choice(LISTS[script]), rng.choice(NUMBERS)
    if rng.random() < 0.3:
        text = f"{rng.choice(('1', '0.5', '2'))},{text}"
    pieces = [_piece(name, text)]
    if any(o.name == "dry-run" for o in knows[script]) and rng.random() < 0.8:
        pieces.append(Piece(("--dry-run",)))
    return Line("numbers", script, _base(script, knows), pieces)


def _base(script: str, knows: Knows) -> Mapping[str, str]:
    names = {o.name for o in knows[script]}
    base = BASES.get(script, {n: v for n, v in GRID.items() if n in names or n in ("preset", "out")})
    return {**base, "preset": "smoke"} if "preset" in names else {n: v for n, v in base.items() if n in names}


def _many(rng: random.Random, knows: Knows) -> Line:
    """Several options with good values, of any parts: many of them contradict each other."""
    able = [
        o
        for o in knows["run"]
        if o.hint is not None and o.name not in ("config", "out", "replay", "preset", "data.name", "data.download")
    ]
    pieces = []
    for o in rng.sample(able, rng.randrange(3, 8)):
        text = options.draw(rng, o, False)
        value = options.meaning(o, text)
        pieces.append(_piece(o.name, text, asked={} if value is UNSURE or value is WRONG else {o.field: value}))
    pieces += [
        _piece(name, text)
        for name, text in rng.choice(METHODS).items()
        if name not in {o.tokens[0][2:] for o in pieces}
    ]
    return Line("many", "run", TINY, pieces)


def _space(rng: random.Random, knows: Knows) -> Line:
    space = rng.choice(REFUSED_SPACES)
    return Line(
        "space",
        "tune",
        {**TINY, "sharing.setting": "real"},
        [Piece(("--space", space), wrong=f"--space {space}"), *([Piece(("--dry-run",))] * rng.randrange(2))],
    )
