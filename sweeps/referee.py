"""Check a method against the contract of all methods and the author's claims; each check gives a one-sentence verdict.

python sweeps/referee.py my_lab.py:FedAvgM
python sweeps/referee.py my_lab.py:MyProx --constants mu=0.1 --special-case "mu=0 is fedavg" --down 1 --up 1
python sweeps/referee.py my_lab.py:Drift --exact          # claim: it reaches the optimum although clients differ
python sweeps/referee.py my_lab.py:FedAvg --rate          # claim: its error on quadratics is within Corollary I's bound
python sweeps/referee.py my_lab.py:Noisy --private        # claim: its privacy guarantee holds
python sweeps/referee.py their.py:FlowerClient --strategy their.py:Server --special-case "is fedavg"  # Flower client

Claims: --special-case "mu=0 is fedavg" claims that with these constants the method equals another method. The case
"beta=0.9 is fedavgm" claims that with momentum 0.9 it equals FedAvgM; "beta=0 is fedavg" does not test the momentum.
--exact claims that the method converges to the minimiser of the clients' mean loss, however much the clients differ;
--rate, that its error on quadratics is below FedAvg's bound. --down 1 and --up 1 state the number of models that travel
to and from a client in a round. --private claims that the method's declared releases (protection of its messages) are
true.
"""

import shlex
from ast import literal_eval
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from inspect import isclass, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets, registry
from fedcommons.config.dotted import part_of
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import sweep, sweep_folder

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from fedcommons import Algorithm, Experiment, Verdict

NOTHING: Mapping[str, Any] = MappingProxyType({})

ROW = {"partition.alpha": 0.01, "sharing.setting": "real", "measure.every": 0, "tracking.wandb": "off"}
"""Fields of the runs of ``row`` that differ from preset small (digits, ten clients, a Dirichlet partition)."""


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="referee.py METHOD [options]")
    size = Annotated[float | None, "[0, 1e6]"]
    parser.add_options((
        ("constants", str, "", 'constants of the method, such as "mu=0.1 layers=*"'),
        ("special-case", str | None, None, 'constants with which it equals another method: "mu=0 is fedavg"'),
        ("strategy", str | None, None, "server of a client of Flower's form, such as their.py:Server"),
        ("fit-config", str, "", 'config of a client with Flower\'s API: "lr=rate local-epochs=epochs proximal_mu=0.1"'),
        ("down", size, None, "claim: bytes that a client receives in a round, in multiples of the model's bytes"),
        ("up", size, None, "claim: bytes that a client sends in a round, in multiples of the model's bytes"),
        ("out", str, "runs/referee", "folder for referee.md and referee.html"),
        ("exact", bool, False, "claim: it reaches the minimiser of all clients' losses, however they differ"),
        ("rate", bool, False, "claim: it converges as FedAvg: on quadratics within Corollary I's bound"),
        ("private", bool, False,
         "claim: with DP-SGD all that clients send has a privacy guarantee, which tests do not refute"),
        ("no-row", bool, False, "do not run the method and FedAvg on table 1, which takes a minute"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    if len(options.words) != 1:
        raise UserError("name a method: referee.py METHOD [options], such as fedprox or my_lab.py:FedAvgM")
    (options.method,) = options.words
    return options


def valued(constants: str) -> dict[str, str]:
    """Split ``name=value`` pairs, separated by spaces; return each value as unparsed text, by name."""
    try:
        pairs = [part.partition("=") for part in shlex.split(constants)]
    except ValueError as error:
        raise UserError(f"constants cannot be read: {error}, in {constants!r}.") from None
    for name, is_there, value in pairs:
        if not name or not is_there:
            raise UserError(f"constants must be name=value, separated by spaces, got {name + is_there + value!r}.")
    return {name: value for name, _, value in pairs}


def build_experiment(method: str, constants: Mapping[str, str], fields: Mapping[str, Any] = NOTHING) -> "Experiment":
    """Return the experiment with this method on digits, preset small; constants are parsed as on a command line."""
    words = [f"--{registry.section('algorithm', method)}.{name}={value}" for name, value in constants.items()]
    argv = ["--algorithm", method, *words]
    parser = parse.parser("", argv, {**presets.preset("small", "digits"), **fields})
    return parse.experiment(parse.parse(parser, argv))


def is_theirs(method: str) -> bool:
    """Return whether the method is a client of another framework.

    Such a client is a class without any method of ``Algorithm``, or a function with the parameter ``module``.
    """
    candidate = registry.find("algorithm", method)
    if isclass(candidate):
        return not any(hasattr(candidate, name) for name in registry.KINDS["algorithm"].has)
    with suppress(ValueError, TypeError):  # some callables have no signature
        return "module" in signature(candidate).parameters
    return False


def theirs(of: str = "", strategy: str = "", constants: str = "", config: str = "") -> "Algorithm":
    """Build a method from another framework's client; a run names it as ``--algorithm sweeps/referee.py:theirs``.

    of: name of the client. strategy: name of the server's strategy; empty: none. constants, config: pairs
    ``name=value``.
    """
    from fedcommons import adapted

    server = registry.find("algorithm", strategy) if strategy else None
    return adapted(registry.find("algorithm", of), server, literals(constants), literals(config))


def literals(pairs: str) -> dict[str, Any]:
    """Return the values of pairs ``name=value``; a value that is no Python literal is a string."""
    values: dict[str, Any] = {}
    for name, value in valued(pairs).items():
        try:
            values[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


def build_method(method: str, constants: str, strategy: str | None = None, config: str = "") -> "Algorithm":
    if is_theirs(method):
        return theirs(method, strategy or "", constants, config)
    if strategy or config:
        option = "--strategy" if strategy else "--fit-config"
        raise UserError(f"{option} needs a client of Flower's form, and {method} is a method of fedcommons.")
    return part_of(build_experiment(method, valued(constants)), "algorithm")


def special_case(options: parse.Options) -> "tuple[Algorithm, Algorithm] | None":
    """Build the method with the constants of ``--special-case``, and the method that it must then equal."""
    if options.special_case is None:
        return None
    constants, _, other = f" {options.special_case}".partition(" is ")
    if not other:
        raise UserError(f'--special-case must be "name=value is METHOD", got {options.special_case!r}.')
    both = f"{options.constants} {constants}"  # of two values of a constant, the later value counts
    first = build_method(options.method, both, options.strategy, options.fit_config)
    return first, build_method(other.strip(), "")


def row(options: parse.Options, out: Path, display: Display) -> "Verdict":
    """Run the method and FedAvg on the data set digits; return both accuracies as a verdict without pass or fail."""
    from fedcommons import Verdict, run

    results, fields = [], ROW
    method, constants = options.method, valued(options.constants)
    if is_theirs(method):  # adapted servers weight clients by numbers of examples, so FedAvg must too
        fields = {**ROW, "federation.weighting": "samples"}
        constants = {"of": method, "strategy": options.strategy or "", "constants": options.constants}
        constants |= {"config": options.fit_config}
        method = f"{Path(__file__)}:{theirs.__name__}"
    for name, part, part_constants in ((options.method, method, constants), ("fedavg", "fedavg", {})):
        config = build_experiment(part, part_constants, fields)
        try:
            summary = run(config, out / sweep.cell(config, {}).name, say=display.say).summary
        except (UserError, ClientError) as error:
            results.append(f"{registry.label(name)}: {sentence(error)}")
            continue
        reached, rounds = summary["rounds_to_target"], summary["rounds"]
        when = "never" if reached is None else f"in round {reached}"
        results.append(
            f"{registry.label(name)}: {100 * summary['last_accuracy']:.1f} % after {rounds} rounds, 80 % {when}"
        )
    return Verdict("table 1, digits, alpha 0.01, one seed", None, "; ".join(results))


def referee(argv: Sequence[str]) -> int:
    options = arguments(argv)
    registry.find("algorithm", options.method)
    with Display() as display:
        display.load_libraries()
        from fedcommons import Claims
        from fedcommons import referee as judge

        method = build_method(options.method, options.constants, options.strategy, options.fit_config)
        values = options.exact, options.down, options.up, options.private, options.rate
        claims = Claims(special_case(options), *values)
        name, verdicts = registry.label(options.method), []
        with sweep_folder.open_folder(out := Path(options.out)):
            for verdict in judge(method, claims):
                verdicts.append(verdict)
                display.say(f"{verdict.word}  {verdict.check}: {verdict.text}")
            write(out, name, verdicts)
            if not options.no_row:
                verdicts.append(row(options, out, display))
                display.say(f"-  {verdicts[-1].check}: {verdicts[-1].text}")
                write(out, name, verdicts)
            failed = sum(verdict.passed is False for verdict in verdicts)
            display.say(f"{failed} of {len(verdicts)} checks failed. All in {out}: referee.md, referee.html.")
    return int(failed > 0)


def write(out: Path, name: str, verdicts: "Sequence[Verdict]") -> None:
    """Write the page as Markdown and as HTML."""
    write_text(out / "referee.md", markdown(name, verdicts))
    write_text(out / "referee.html", page(name, verdicts))


def markdown(name: str, verdicts: "Sequence[Verdict]") -> str:
    """Return the page as Markdown, with one line per verdict."""
    failed = sum(v.passed is False for v in verdicts)
    head = f"# {name}: {failed} of {len(verdicts)} checks failed" if failed else f"# {name}: no check failed"
    lines = [[v.check, v.word, escape(v.text, quote=False).replace("|", "\\|")] for v in verdicts]
    return f"{head}\n\n{tables.markdown(['check', 'verdict', 'what was seen'], lines)}"


def page(name: str, verdicts: "Sequence[Verdict]") -> str:
    """Return the page as HTML, with the content of ``referee.md``."""
    lines = "".join(
        f'<tr class="{v.word}"><td>{escape(v.check)}</td><td>{v.word}</td><td>{escape(v.text)}</td></tr>\n'
        for v in verdicts
    )
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em .6em;vertical-align:top}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title>\n'
        f"<style>{style}.FAIL{{background:#fdd}}</style>\n<h1>{escape(name)}, judged</h1>\n"
        f"<table>\n{lines}</table></html>\n"
    )


if __name__ == "__main__":
    parse.main(referee, resumes=False)
