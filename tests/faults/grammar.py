"""Random command lines, each keyed by (seed, number): a script, options of its parser, files and variables."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from faults import options, places, yamls
from faults.options import UNSURE, WRONG, Option
from faults.places import GENERATES, PLACES_OF_OTHERS, RUNS, TINY

from fedcommons.config.flat import IGNORED_BY_RESULTS

Knows = Mapping[str, Sequence[Option]]
"""The options of every script."""


@dataclass(frozen=True)
class Piece:
    """A part of a line that can be left out.

    asked: field or option to the value that it must have in the end; wrong: why the line must be refused, if so;
    make: makes what must be in the line's folder first, and says what; environment: variables.
    """

    tokens: Sequence[str] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""
    make: Callable[[Path, Path], str | None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A command line. result: the run of ``RUNS`` whose outputs it must have if it ends; reads: it changes no file."""

    kind: str
    script: str
    base: Mapping[str, str]
    pieces: Sequence[Piece]
    result: str = ""
    reads: bool = False

    @property
    def argv(self) -> list[str]:
        given = {t.partition("=")[0] for p in self.pieces for t in p.tokens}
        base = [t for name, value in self.base.items() if f"--{name}" not in given for t in (f"--{name}", value)]
        return [*base, *(t for p in self.pieces for t in p.tokens)]

    @property
    def asked(self) -> dict[str, Any]:
        known = {**self.base}
        of_base = {n: v for n, v in known.items() if n in ("preset", "out")}
        return {**of_base, **{name: value for p in self.pieces for name, value in p.asked.items()}}

    @property
    def wrong(self) -> str:
        return "; ".join(p.wrong for p in self.pieces if p.wrong)

    @property
    def environment(self) -> dict[str, str]:
        return {k: v for p in self.pieces for k, v in p.environment.items()}

    def __str__(self) -> str:
        variables = [f"{k}={quote(shown(v))} " for k, v in self.environment.items()]
        fixed = " ..." if self.base else ""  # the small settings
        return "".join(
            [*variables, f"{self.script}.py{fixed}", *(f" {quote(shown(t))}" for p in self.pieces for t in p.tokens)]
        )


def shown(text: str, most: int = 60) -> str:
    """The text, its middle left out where it is longer than ``most`` characters."""
    short = text if len(text) <= most else f"{text[: most // 3]}...{text[-most // 3 :]}[{len(text)}]"
    return short if short.isprintable() else ascii(short)


def make(seed: int, number: int, knows: Knows) -> Line:
    """The line of this number."""
    rng = random.Random(f"faults {seed} {number}")  # Python's own: the lines stay when the product's seeds change
    kind = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    line = KINDS[kind][0](rng, knows)
    if rng.random() < 0.07:
        line = replace(line, pieces=[*line.pieces, _variable(rng)])
    return line


def _variable(rng: random.Random) -> Piece:
    name = rng.choice(("FEDCOMMONS_DATA", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "HOME", "COLUMNS",
                       "RAY_ADDRESS", "WANDB_MODE", "PYTHONHASHSEED", "OMP_NUM_THREADS"))  # fmt: skip
    odd = {
        "FEDCOMMONS_DATA": ("loop", "file.txt", "~nosuchuser", "", "n" * 300),
        "HOME": ("/nowhere", "loop", "", "file.txt"),
        "RAY_ADDRESS": ("", "127.0.0.1:1", "auto", "nonsense"),
    }
    return Piece(
        environment={name: rng.choice(odd.get(name, ("abc", "", "-1", "0", "1.5", "9" * 30, "2", " ", "1,2")))}
    )


def _given(rng: random.Random, option: Option, odd: bool) -> Piece:
    """An option with a value."""
    if option.hint is None:
        return Piece((f"--{option.name}",))
    text = options.draw(rng, option, odd)
    value = options.meaning(option, text)
    tokens = (f"--{option.name}={text}",) if rng.random() < 0.2 or text.startswith("-") else (f"--{option.name}", text)
    asked = {} if value is UNSURE or value is WRONG else {option.field: value}
    return Piece(tokens, asked, f"{option.name} {shown(text)}" if value is WRONG else "")


def _some(rng: random.Random, known: Sequence[Option], odd: int, good: int) -> list[Piece]:
    """Different options, some with any values and some with good ones."""
    able = [
        o for o in known if o.name not in ("config", "print_config", "resume", "download", "data.download", "replay")
    ]
    chosen = rng.sample(able, min(len(able), odd + good))
    return [_given(rng, o, i < odd) for i, o in enumerate(chosen)]


def odd(rng: random.Random, knows: Knows) -> Line:
    """One or two values of any kind."""
    return Line("odd", "run", TINY, _some(rng, knows["run"], rng.choice((1, 1, 1, 2)), rng.randrange(3)))


METHODS = (
    {"algorithm": "fedmix"}, {"algorithm": "moon"}, {"algorithm": "feddyn"}, {"algorithm": "fednova"},
    {"algorithm": "fedpvr"}, {"dp.local": "true"}, {"model.batch_norm": "true"}, {"straggler.q": "0.5"},
    {"sharing.setting": "shuffled_real", "sharing.p": "0.4"}, {**GENERATES, "sharing.setting": "local_synthetic"},
    {"model.name": "linear"}, {"partition.name": "dirichlet_niid", "partition.alpha": "5"},
    {"measure.samples": "16"},
)  # fmt: skip


def good(rng: random.Random, knows: Knows) -> Line:
    """Good values only, which mostly run to the end."""
    known = {o.name: o for o in knows["run"]}
    method = rng.choice(METHODS)
    fixed = [_fixed(known[name], text) for name, text in method.items()]
    able = [
        o
        for o in knows["run"]
        if o.name not in (*method, "preset", "partition.n_clients", "data.name", "partition.name")
    ]
    return Line("good", "run", TINY, [*fixed, *_some(rng, able, 0, rng.choice((1, 2, 4)))])


def _fixed(option: Option, text: str) -> Piece:
    return Piece((f"--{option.name}", text), {option.field: options.meaning(option, text)})


def extreme(rng: random.Random, knows: Knows) -> Line:
    """Values that the fields allow, at the end of what numbers can be: the results are finite or it is said why not."""
    numbers = [o for o in knows["run"] if o.kind is float]
    chosen = [Option("client.lr", float)] * (rng.random() < 0.4) + rng.sample(numbers, 1)
    texts = ("1e30", "1e308", "1e-300", "5e-324", "1e5", "1e-30", "100", "1e10", "1e38")
    pieces = [_fixed(o, rng.choice(texts)) for o in chosen]
    known = {o.name: o for o in knows["run"]}
    return Line("extreme", "run", TINY, [*pieces, *(_fixed(known[n], t) for n, t in rng.choice(METHODS).items())])


def config(rng: random.Random, knows: Knows) -> Line:
    """A config file, whole or damaged, or a place where there is none."""
    script = rng.choice(("run", "run", "run", "run", "table1", "tune"))
    base = BASES[script]
    if rng.random() < 0.12:
        place = rng.choice([p for p in options.PLACES if p not in ("/dev/full", "-", "/dev/null", "--")])
        return Line("config", script, base, [Piece((f"--config={place}",), wrong=f"--config {shown(place)}")])
    plain = [
        o
        for o in knows["run"]
        if o.kind in (int, float, bool) and o.name in options.FIELDS and o.name not in options.COSTLY
    ]
    drawn = [(o.field, options.meaning(o, options.draw(rng, o, False))) for o in rng.sample(plain, rng.randrange(4))]
    fields = {name: value for name, value in drawn if value is not WRONG and value is not UNSURE}
    content, asked, wrong = yamls.damaged(fields, rng)

    said = f"{wrong}: {shown(content.decode(errors='replace')[-200:])}"

    def write(folder: Path, templates: Path) -> str:
        (folder / "c.yaml").write_bytes(content)
        (folder / "other.yaml").write_text("seed: 7\n")
        return said

    tokens = ("--config=c.yaml",) if rng.random() < 0.3 else ("--config", "c.yaml")
    return Line("config", script, base, [Piece(tokens, asked, said if wrong else "", write)])


def spelling(rng: random.Random, knows: Knows) -> Line:
    """Options that do not exist, stand twice, or lack their value."""
    script = rng.choice(("run", "run", "table1", "tune", "quadratics", "mnist_softmax", "advise"))
    known = [o for o in knows[script] if o.hint is not None and o.name not in ("config", "print_config", "space")]
    names, o, other = {o.name for o in knows[script]}, rng.choice(known), rng.choice(known)
    text = options.draw(rng, o, False)
    wrong = options.misspelt(rng, o.name)
    near = o.name[: rng.randrange(len(o.name))]
    ways: Sequence[tuple[tuple[str, ...], Mapping[str, Any], bool]] = (
        ((f"--{wrong}", text), {}, wrong.replace("-", "_") not in {n.replace("-", "_") for n in names}),
        ((f"--{near}", text), {}, near not in names and not any(n.startswith(f"{near}.") for n in names)),
        ((f"--{o.name}", options.draw(rng, o, True), f"--{o.name}", text), _asks(o, text), False),
        ((f"--{o.name}",), {}, True),
        ((f"--{o.name}", f"--{other.name}", options.draw(rng, other, False)), {}, True),
        ((f"--{o.name}", text, "more"), {}, True),
        ((f"-{o.name}", text), {}, True),
        ((f"—{o.name}", text), {}, True),
        ((f"--{o.name.replace('_', '-')}", text), _asks(o, text), False),
        ((f"--{o.name}.x", text), {}, True),
        ((f"--{o.name}+", text), {}, False),
        ((o.name, text), {}, True),
        ((f"{o.name}={text}",), {}, True),
        (("--",), {}, False), (("--", "more"), {}, True), (("more",), {}, True), (("",), {}, True),
        (("--=1",), {}, True),
        (("--resume=maybe",), {}, True), (("--resume", "true"), {}, False), (("--no-resume",), {}, True),
        (("@file.txt",), {}, True), (("-h",), {}, False), (("--help",), {}, False), (("--help", "more"), {}, False),
    )  # fmt: skip
    sections = (
        (("--straggler", '{"q": 0.25}'), {"straggler.q": 0.25}, False),
        (("--straggler={q: 0.25}",), {"straggler.q": 0.25}, False),
        (("--straggler", '{"q": "x"}'), {}, True), (("--straggler", "3"), {}, True), (("--straggler", "{"), {}, True),
        (("--straggler", "[1]"), {}, True), (("--straggler", '{"r": 1}'), {}, True), (("--straggler.", "1"), {}, True),
        (("--straggler", "other.yaml"), {}, True), (("--.q", "1"), {}, True), (("--straggler", ""), {}, True),
        (("--print_config",), {}, False), (("--print_config=x",), {}, True), (("--print_config", "x"), {}, True),
        (("--straggler", "null"), {}, False),
        (("--straggler.q", "0.1", "--straggler", '{"q": 0.25}'), {"straggler.q": 0.25}, False),
    )  # fmt: skip
    fields = any("." in o.name for o in known)
    tokens, asked, refused = rng.choice((*ways, *sections) if fields and rng.random() < 0.5 else ways)
    asked = {n: v for n, v in asked.items() if v is not UNSURE and v is not WRONG}
    return Line("spelling", script, BASES[script], [Piece(tokens, asked, "spelling" if refused else "")])


def _asks(option: Option, text: str) -> dict[str, Any]:
    return {option.field: options.meaning(option, text)}


def folder(rng: random.Random, knows: Knows) -> Line:
    """Runs that are there already, whole or damaged or of others; places where no run can be."""
    name = rng.choice(list(RUNS))
    base = {**TINY, **RUNS[name], "out": "run"}
    finished, seed = rng.random() < 0.5, rng.randrange(10**9)

    def copied(folder: Path, templates: Path) -> None:
        places.copy_run(folder / "run", templates / name, templates / "store", finished=finished)
        places.decoys(
            folder / "run", ["notes.txt", ".draft.tmp", "checkpoints/mine.txt", "memory/photo.jpg", "deep/.x.1.tmp"]
        )

    def broken(folder: Path, templates: Path) -> str:
        again = random.Random(seed)  # so that the damage is the same when the line is made again
        damages = [places.damage_run(folder / "run", again) for _ in range(again.choice((1, 1, 2)))]
        return f"{name}{'' if finished else ' cut'}: {' and '.join(damages)}"

    whole, resumed = Piece(make=copied), Piece(("--resume",))
    way = rng.choice(
        ("damaged",) * 6 + ("place", "place", "others", "whole", "new", "other", "free", "replay", "replay damaged")
    )
    if way == "place":
        place = rng.choice(options.PLACES)
        wrong = "others' files" if place in PLACES_OF_OTHERS else ""
        return Line(
            way, "run", TINY, [Piece((f"--out={place}",), {"out": place}, wrong), *([resumed] * rng.randrange(2))]
        )
    if way == "others":
        return Line(
            way,
            "run",
            TINY,
            [Piece((f"--out={rng.choice(PLACES_OF_OTHERS)}",), wrong="others' files"), *([resumed] * rng.randrange(2))],
        )
    if way == "new":
        return Line(way, "run", base, [whole, Piece(wrong="a run is there already")])
    if way in ("other", "free"):
        plain = [o for o in knows["run"] if o.kind in (int, float) and o.name in options.FIELDS]
        o = rng.choice([o for o in plain if (o.name in IGNORED_BY_RESULTS) == (way == "free")])
        text = options.draw(rng, o, False)
        return Line(way, "run", base, [whole, resumed, Piece((f"--{o.name}", text), _asks(o, text))], name)
    if way.startswith("replay"):
        tokens = (
            "--replay",
            "run",
            "--round",
            rng.choice(("1", "2", "3")),
            "--client",
            rng.choice(("0", "1", "2", "3")),
        )
        known = {"round": Option("round", int), "client": Option("client", int)}
        if way == "replay damaged":
            return Line(way, "run", {}, [whole, Piece(make=broken), Piece(tokens)], reads=True)
        o = rng.choice((*known.values(), Option("replay", str)))
        return Line(
            way, "run", {}, [whole, Piece(tokens), Piece((f"--{o.name}={options.draw(rng, o, True)}",))], reads=True
        )
    pieces = [whole, resumed, *([Piece(make=broken)] if way == "damaged" else [])]
    return Line(way, "run", base, pieces, name)


def images(rng: random.Random, knows: Knows) -> Line:
    """Images in MNIST's format, damaged, or places where there are none."""
    base = {**TINY, "data.name": "mnist", "model.name": "linear", "data.dir": "images"}
    script = rng.choice(("run", "run", "run", "mnist_softmax"))
    if script == "mnist_softmax":
        base = {**BASES[script], "dataset": "mnist", "data-dir": "images"}
    if rng.random() < 0.15:
        option = "data.dir" if script == "run" else "data-dir"
        place = rng.choice([p for p in options.PLACES if p])
        return Line("images", script, base, [Piece((f"--{option}={place}",), wrong=f"no images in {shown(place)}")])
    whole = Piece(make=lambda folder, templates: places.write_images(folder / "images"))
    if rng.random() < 0.1:
        return Line("images", script, base, [whole])
    way = rng.randrange(10**9)
    broken = Piece(
        make=lambda folder, templates: places.damage_images(folder / "images", random.Random(way)),
        wrong="damaged images",
    )
    return Line("images", script, base, [whole, broken])


def store(rng: random.Random, knows: Knows) -> Line:
    """A store of generators and synthetic images, damaged."""
    way = rng.randrange(10**9)
    whole = Piece(make=lambda folder, templates: places.copy(templates / "store", folder / "store"))
    broken = Piece(make=lambda folder, templates: places.damage_store(folder / "store", random.Random(way)))
    return Line("store", "run", {**TINY, **RUNS["pool"]}, [whole, broken], "pool")


def table_input(rng: random.Random, knows: Knows) -> Line:
    """What communication_saved reads, damaged."""
    way = rng.randrange(10**9)

    def csv(folder: Path, templates: Path) -> str:
        places.write_csv(folder / "rounds.csv")
        return places.damage_csv(folder / "rounds.csv", random.Random(way))

    def sweep(folder: Path, templates: Path) -> str:
        return places.write_sweep(folder / "sweep", folder / "whole", random.Random(way))

    draw = rng.random()
    if draw < 0.2:
        place = rng.choice(options.PLACES)
        return Line(
            "table",
            "communication_saved",
            {"out": "out"},
            [Piece((f"--from={place}",), wrong=f"--from {shown(place)}")],
        )
    name, make = ("rounds.csv", csv) if draw < 0.6 else ("sweep", sweep)
    return Line(
        "table",
        "communication_saved",
        {"out": rng.choice(("out", "out", "users"))},
        [Piece(("--from", name), make=make)],
    )


GRID = {n: v for n, v in TINY.items() if n != "tracking.wandb"} | {"wandb": "off", "federation.rounds": "1"}
BASES: Mapping[str, Mapping[str, str]] = {
    "run": TINY, "table1": GRID, "figure3": GRID, "convergence_parameters": GRID,
    "advise": {**GRID, "probe-rounds": "1"}, "tune": {**TINY, "space": "alpha=0.1,1"},
    "quadratics": {"preset": "smoke", "out": "out"}, "mnist_softmax": {"preset": "smoke", "out": "out"},
    "communication_saved": {"from": "rounds.csv", "out": "out"},
}  # fmt: skip


def sweep(rng: random.Random, knows: Knows) -> Line:
    """A sweep, up to where Ray would start; a script of its own, to the end."""
    script = rng.choice([s for s in BASES if s not in ("run", "communication_saved")])
    pieces = _some(rng, knows[script], rng.choice((0, 1, 1, 1, 2)), rng.randrange(3))
    own = [o for o in knows[script] if "." not in o.name and o.name not in options.FIELDS and o.hint is not None]
    if rng.random() < 0.5:  # else the many fields would leave no room for the script's own options
        pieces.append(
            _given(rng, rng.choice([o for o in own if o.name not in ("config", "print_config")]), rng.random() < 0.7)
        )
    if rng.random() < 0.4 and any(o.name == "dry-run" for o in knows[script]):
        pieces.append(Piece(("--dry-run",)))
    return Line("sweep", script, BASES[script], pieces)


KINDS: Mapping[str, tuple[Callable[[random.Random, Knows], Line], int]] = {
    "odd": (odd, 24), "good": (good, 10), "extreme": (extreme, 6), "config": (config, 17), "spelling": (spelling, 9),
    "folder": (folder, 15), "images": (images, 7), "store": (store, 3), "table": (table_input, 4), "sweep": (sweep, 20),
}  # fmt: skip
