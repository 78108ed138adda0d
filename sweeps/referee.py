"""A referee of anybody's method: the contract's promises and its author's claims, each with a verdict in a sentence.

python sweeps/referee.py my_lab.py:FedAvgM
python sweeps/referee.py my_lab.py:MyProx --constants mu=0.1 --special-case "mu=0 is fedavg" --down 1 --up 1
python sweeps/referee.py my_lab.py:Drift --exact          # it reaches the optimum where clients differ
python sweeps/referee.py my_lab.py:Noisy --private        # its releases hold: neighbouring data, canaries
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml

from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import part_of
from fedcommons.errors import UserError
from fedcommons.files import write_text
from fedcommons.reports import tables
from fedcommons.sweeping import folders
from fedcommons.sweeping.display import Display

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from fedcommons import Algorithm, Verdict

ROW = {"partition.alpha": 0.01, "sharing.setting": "real", "measure.every": 0, "tracking.wandb": "off"}
"""The row of table 1: digits of preset small, ten clients, a Dirichlet partition."""


def arguments(argv: Sequence[str]) -> cli.Options:
    """The method, then the options."""
    named = [word for word in argv[:1] if not word.startswith("-")]
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], usage="referee.py METHOD [options]")
    size = Annotated[float | None, "[0, 1e6]"]
    for name, kind, default, text in (
        ("constants", str, "", "of the method, as mu=0.1,layers=*"),
        ("special-case", str | None, None, 'constants with which it is another method: "mu=0 is fedavg"'),
        ("down", size, None, "numbers that a client receives in a round, in sizes of the model"),
        ("up", size, None, "numbers that a client sends in a round, in sizes of the model"),
        ("out", str, "runs/referee", "folder for referee.md and referee.html"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    for name, text in (
        ("exact", "it reaches the minimiser of all clients' losses, however they differ"),
        ("private", "its releases hold under DP-SGD"),
        ("no-row", "no row of table 1 beside FedAvg's, which takes a minute"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = cli.parse(parser, argv[len(named) :])
    if not named:
        raise UserError("name a method: referee.py METHOD [options], such as fedprox or my_lab.py:FedAvgM")
    options.method = named[0]
    return options


def fields(method: str, constants: str) -> dict[str, object]:
    """An experiment's fields that choose this method with these constants."""
    found: dict[str, object] = {"algorithm": method}
    for part in filter(None, map(str.strip, constants.split(","))):
        name, _, value = part.partition("=")
        if not name or not value:
            raise UserError(f"constants are given as name=value, separated by commas, got {part!r}.")
        found[f"{parts.section('algorithm', method)}.{name.strip()}"] = yaml.safe_load(value)
    return found


def made(method: str, constants: str) -> "Algorithm":
    """The method with these constants."""
    return part_of(presets.experiment("small", values=fields(method, constants)), "algorithm")


def special_case(options: cli.Options) -> "tuple[Algorithm, Algorithm] | None":
    """The method with the constants of ``--special-case``, and the method that it then is."""
    if options.special_case is None:
        return None
    constants, _, other = options.special_case.partition(" is ")
    if not other:
        raise UserError(f'--special-case is given as "name=value is METHOD", got {options.special_case!r}.')
    return made(options.method, constants), made(other.strip(), "")


def row(options: cli.Options, out: Path, display: Display) -> "Verdict":
    """The method's row of table 1, and FedAvg's."""
    from fedcommons import Verdict, run

    said = []
    for name, constants in ((options.method, options.constants), ("fedavg", "")):
        values = {**ROW, **fields(name, constants)}
        result = run(presets.experiment("small", values=values), out / f"row-{parts.label(name)}", say=display.say)
        reached = result.summary["rounds_to_target"]
        accuracy, rounds = 100 * result.summary["last_accuracy"], result.summary["rounds"]
        when = "never" if reached is None else f"in round {reached}"
        said.append(f"{parts.label(name)}: {accuracy:.1f} % after {rounds} rounds, 80 % {when}")
    return Verdict("table 1, digits, alpha 0.01, one seed", None, "; ".join(said))


def referee(argv: Sequence[str]) -> int:
    options = arguments(argv)
    parts.find("algorithm", options.method)
    with Display() as display:
        display.say("Loading torch and the data ...")
        from fedcommons import Claims
        from fedcommons import referee as judge

        method = made(options.method, options.constants)
        claims = Claims(special_case(options), options.exact, options.down, options.up, options.private)
        with folders.open_folder(out := Path(options.out)):
            verdicts = []
            for verdict in judge(method, claims):
                verdicts.append(verdict)
                display.say(f"{verdict.word}  {verdict.check}: {verdict.said}")
            if not options.no_row:
                verdicts.append(row(options, out, display))
                display.say(f"-  {verdicts[-1].check}: {verdicts[-1].said}")
            write_text(out / "referee.md", markdown(parts.label(options.method), verdicts))
            write_text(out / "referee.html", page(parts.label(options.method), verdicts))
            failed = sum(verdict.passed is False for verdict in verdicts)
            display.say(f"{failed} of {len(verdicts)} checks failed. All in {out}: referee.md, referee.html.")
    return int(failed > 0)


def markdown(name: str, verdicts: "Sequence[Verdict]") -> str:
    """The page: a line a verdict."""
    failed = sum(one.passed is False for one in verdicts)
    head = f"# {name}: {failed} of {len(verdicts)} checks failed" if failed else f"# {name}: nothing was found"
    lines = [[one.check, one.word, one.said.replace("|", "\\|").replace("\n", " ")] for one in verdicts]
    return f"{head}\n\n{tables.markdown(['check', 'verdict', 'what was seen'], lines)}"


def page(name: str, verdicts: "Sequence[Verdict]") -> str:
    """The same as ``referee.md``, for a browser."""
    lines = "".join(
        f'<tr class="{one.word}"><td>{escape(one.check)}</td><td>{one.word}</td><td>{escape(one.said)}</td></tr>\n'
        for one in verdicts
    )
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em .6em;vertical-align:top}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title>\n'
        f"<style>{style}.FAIL{{background:#fdd}}</style>\n<h1>{escape(name)}, judged</h1>\n"
        f"<table>\n{lines}</table></html>\n"
    )


if __name__ == "__main__":
    cli.main(referee)
