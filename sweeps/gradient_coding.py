"""Figures 1 to 3 of privacy-flexible federated learning: raw copies and gradient coding, stragglers, 1000 repetitions.

python sweeps/gradient_coding.py                                        # digits, 200 repetitions, two minutes
python sweeps/gradient_coding.py --preset smoke                         # the same code with smaller numbers
python sweeps/gradient_coding.py --preset authors --data-dir DIR        # MNIST as in the released code, a quarter hour
python sweeps/gradient_coding.py --preset authors --data-dir DIR --shares 0,0.2
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from fedcommons.config import cli
from fedcommons.config.experiment import Data
from fedcommons.errors import UserError, unknown
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.sweeping import folders
from fedcommons.sweeping.display import Display

if TYPE_CHECKING:  # torch takes seconds to import
    from papers.agc.gradient_coding import Played, Problem, Setting

PER_CLASS = 30  # images, section IV-A
CHUNK = 100  # repetitions of a job, a multiple of the study's BLOCK


@dataclass(frozen=True)
class Preset:
    """white: value of a white pixel; first: the first images of each class, else random ones; n_test: None for all.

    per_class: a share c of each class is not private, else of all images together.
    """

    dataset: str = "mnist"
    white: float = 1.0
    first: bool = False
    n_test: int | None = None
    per_class: bool = True
    repetitions: int = 1000
    rounds: int = 50


PRESETS = {
    "authors": Preset(white=255.0, first=True, n_test=500, per_class=False),  # the released code
    "paper": Preset(),
    "small": Preset("digits", repetitions=200),
    "smoke": Preset("digits", repetitions=4, rounds=6),
}
Curve = dict[str, Any]


def arguments(argv: Sequence[str]) -> Namespace:
    """The options, comma lists split; ``pairs``: (q, d); ``shares``: the c, with 0 among them."""
    preset = cli.early(argv, "preset", "small")
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    chosen = PRESETS[preset]
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], exit_on_error=False)
    for name, kind, default, text in (
        ("preset", str, preset, f"{', '.join(PRESETS)}: pixels, images, test images, and defaults of what follows"),
        ("dataset", str, chosen.dataset, "digits or mnist"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("shares", str, "0,0.1,0.2,0.3,0.4,0.5", "c, shares of images that are not private; 0 is always among them"),
        ("pairs", str, "0.3:2,0.5:3,0.7:4", "q:d, probability to straggle and number of copies, separated by commas"),
        ("sharing", str, "exact", "exact: to d other clients; binomial: to each of them with probability d/(N-1)"),
        ("repetitions", int, chosen.repetitions, "repetitions of each curve"),
        ("seed", int, 0, "seed of everything that is drawn"),
        ("workers", int | None, None, "processes, by Ray; default: all cores of Ray; 1: this process, without Ray"),
        ("out", str, "runs/gradient-coding", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--download", action="store_true", help="fetch the data set if it is not in the folder")
    parser.add_argument("--resume", action="store_true", help="keep the curves that are already in that folder")
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = cli.parse(parser, argv)
    if options.dataset not in ("digits", "mnist"):
        raise unknown("data set", options.dataset, ("digits", "mnist"))
    options.shares = sorted({0.0, *cli.split("--shares", options.shares, float)})
    options.pairs = [pair(text) for text in cli.split("--pairs", options.pairs)]
    for name, least in (("repetitions", 2), ("workers", 1)):
        if options[name] is not None and not least <= options[name] <= 1e6:
            raise UserError(f"--{name} must be in [{least}, 1e6], got {options[name]}.")
    return options


def pair(text: str) -> tuple[float, int]:
    """q and d of ``0.5:3``."""
    q, _, d = text.partition(":")
    try:
        return float(q), int(d)
    except ValueError:
        raise UserError(f"--pairs takes q:d, such as 0.5:3, separated by commas, got {text!r}.") from None


def settings(options: Namespace) -> "dict[str, Setting]":
    """The curves of figures 1 and 2 and the two of figure 3, and the name of the file of each."""
    from papers.agc.gradient_coding import PARTITIONS, Setting

    preset = PRESETS[options.preset]
    common = {"sharing": options.sharing, "per_class": preset.per_class, "rounds": preset.rounds}
    found = {
        f"{name}_q{q:g}_d{d}_c{c:g}": Setting(name, q, d, c, **common)
        for name, (q, d), c in product(PARTITIONS, options.pairs, options.shares)
    }
    slow = {**common, "lr": 0.01, "decay": 1.0}
    return {
        **found,
        "figure3_a": Setting("single_class", 0.0, 3, 0.0, **slow),
        "figure3_b": Setting("single_class", 0.5, 3, 0.2, **slow),
    }


def load_problem(options: Namespace) -> "Problem":
    """The images of the preset."""
    from fedcommons.data.datasets import load
    from papers.agc.gradient_coding import Problem, chosen

    preset = PRESETS[options.preset]
    dataset = load(Data(options.dataset, options.data_dir, options.download, validation=0))
    train = chosen(dataset, PER_CLASS, preset.first, options.seed)
    return Problem.of(train, dataset.test[slice(0, preset.n_test)], dataset.n_classes, preset.white)


def job(problem: "Problem", setting: "Setting", repetitions: range, seed: int) -> "Played":
    """Some repetitions of a curve, wherever it runs."""
    from fedcommons.core.worker import set_up_process
    from papers.agc.gradient_coding import play

    set_up_process()
    return play(problem, setting, repetitions, seed)


def play_all(problem: "Problem", wanted: "Mapping[str, Setting]", options: Namespace) -> "Iterator[tuple[str, Played]]":
    """The curves, each as soon as all its repetitions are there. The bits do not depend on the number of workers."""
    from papers.agc.gradient_coding import joined

    chunks = [range(options.repetitions)[i : i + CHUNK] for i in range(0, options.repetitions, CHUNK)]
    if options.workers == 1:
        for name, setting in wanted.items():
            yield name, joined([job(problem, setting, chunk, options.seed) for chunk in chunks])
        return
    import ray

    from fedcommons.federation import cluster

    cluster.connect(options.workers)
    data, remote = ray.put(problem), ray.remote(num_cpus=1)(job)
    sent = {
        name: [remote.remote(data, setting, chunk, options.seed) for chunk in chunks]
        for name, setting in wanted.items()
    }
    for name, references in sent.items():
        yield name, joined(ray.get(references))


def summed_up(setting: "Setting", played: "Played") -> Curve:
    """Means over repetitions and their standard errors."""
    curve: Curve = {"partition": setting.partition, "q": setting.q, "d": setting.d, "c": setting.c}
    for name, found in (
        ("accuracy", played.accuracy),
        ("second_moment", played.second_moment),
        ("same_class", played.same_class),
        ("cross_class", played.cross_class),
        ("norm_sq", played.same_class + played.cross_class),
    ):
        curve[name] = found.mean(0).tolist()
        curve[f"{name}_se"] = (found.std(0, ddof=1) / len(found) ** 0.5).tolist()
    return curve


def finished(file: Path, facts: Mapping[str, Any]) -> Curve | None:
    """The curve in ``file``, None if there is none.

    Raises:
        UserError: it was computed with other options.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    for name, value in facts.items():
        if (other := found["facts"][name]) != value:
            raise UserError(f"--resume: {file} is of {name} = {other}, and now it is {value}; name another --out.")
    return found["curve"]


def only(curve: Curve, *quantities: str) -> Curve:
    """The curve with these lists and their standard errors."""
    return {
        n: value for n, value in curve.items() if not isinstance(value, list) or n.removesuffix("_se") in quantities
    }


def report(curves: Sequence[Curve], problem: "Problem", options: Namespace) -> str:
    """The table, and what a reader must know."""
    from papers.agc import coding

    preset = PRESETS[options.preset]
    images = "the first" if preset.first else "random"
    share = f"int(c {PER_CLASS}) of each class" if preset.per_class else f"int(c {len(problem.y)}) of all"
    copied = "to d other clients" if options.sharing == "exact" else "to each other client with probability d/(N-1)"
    notes = f"""
1. {options.dataset}, preset {options.preset}: {images} {PER_CLASS} training images of each class, \
{len(problem.test_y)} test images, pixels in [0, {preset.white:g}]; {problem.n_classes} clients, of which \
Dirichlet(0.1) drops those that get no image. Start: PyTorch's default, anew in each repetition.
2. {options.repetitions} repetitions, seed {options.seed}; ± is the standard error of their mean. All curves use the \
same random numbers.
3. A client straggles in a round with probability q. Rate 0.1, times 0.97 after each round that somebody answers.
4. {share} are not private, drawn at random, and each is copied {copied}.
5. second moment after r rounds: E||g^||^2 of the estimate for the next one, over 15 draws of stragglers; 0 if nobody \
answers. It is of the mean gradient; that of the sum is {len(problem.y)}^2 times as large.
6. rounds to {coding.CLOSE:.0%} of iid: until the mean accuracy is that part of the last one of iid clients that \
share nothing, at the same q.
"""
    return coding.table(curves) + notes


def gradient_coding(argv: Sequence[str]) -> int:
    options = arguments(argv)
    print("Loading torch and the data ...", flush=True)
    from papers.agc.gradient_coding import check

    problem, wanted, out = load_problem(options), settings(options), Path(options.out)
    for setting in wanted.values():
        check(setting, problem.n_classes, problem.y.bincount().tolist())
    if options.dry_run:
        print(f"{out}: {len(wanted)} curves of {options.repetitions} repetitions to compute")
        return 0
    with folders.open_folder(out), Display() as display:
        (out / "curves").mkdir(exist_ok=True)
        files = {name: out / "curves" / f"{name}.json" for name in wanted}
        if not options.resume and any(file.exists() for file in files.values()):
            raise UserError(f"--out: {out} holds curves already; add --resume to keep them or name another folder.")
        of_all = {name: options[name] for name in ("preset", "dataset", "repetitions", "seed")}
        facts = {name: {**of_all, **asdict(setting)} for name, setting in wanted.items()}
        curves = {name: curve for name in wanted if (curve := finished(files[name], facts[name]))}
        left = {name: setting for name, setting in wanted.items() if name not in curves}
        for number, (name, played) in enumerate(play_all(problem, left, options), 1):
            curves[name] = summed_up(left[name], played)
            write_json(files[name], {"facts": facts[name], "curve": curves[name]})
            display.step("curves", number, len(left), name)
        write_all([{**curves[name], "lr": wanted[name].lr} for name in wanted], problem, options, display)
    return 0


def write_all(curves: Sequence[Curve], problem: "Problem", options: Namespace, display: Display) -> None:
    """The summary, the tables and the pictures; the last two curves are figure 3's."""
    from fedcommons.reports import plots
    from papers.agc import coding

    grid = [only(curve, "accuracy", "second_moment") for curve in curves[:-2]]
    figure3 = [only(curve, "same_class", "cross_class", "norm_sq") for curve in curves[-2:]]
    out, smoke = Path(options.out), options.preset == "smoke"
    text = report(grid, problem, options)
    facts = {name: options[name] for name in ("preset", "dataset", "repetitions", "seed", "sharing")}
    write_json(out / "summary.json", {"name": out.name, **facts, "curves": grid, "scalar_products": figure3})
    write_text(out / "gradient_coding.md", text)
    write_text(out / "gradient_coding.csv", tables.to_csv(coding.rows([*grid, *figure3], options.repetitions)))
    many = f"mean over {options.repetitions} repetitions, band: ± standard error"
    for file, partition in (("figure1", "dirichlet_plain"), ("figure2", "single_class"), ("iid", "iid")):
        title = f"{options.dataset} (preset {options.preset}), {coding.NAMES[partition]} clients: {many}"
        plots.save(coding.picture(grid, partition, title), out / f"{file}.png", 110, smoke)
    title = f"{options.dataset} (preset {options.preset}), single class, rate 0.01: {many}"
    plots.save(coding.products_picture(figure3, title), out / "figure3.png", 110, smoke)
    display.say(f"\n{text}\nAll in {out}: gradient_coding.md, .csv, figure1, 2, 3 and iid.png, summary.json.")


if __name__ == "__main__":
    cli.main(gradient_coding)
