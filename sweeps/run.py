"""Run one experiment and print a line per round, or run one client of a run again.

python sweeps/run.py --preset small --sharing.setting shuffled_synthetic --partition.alpha 0.01
python sweeps/run.py --config FILE.yaml --out runs/mine --resume
python sweeps/run.py --replay runs/mine --round 7 --client 3
"""

import json
import pdb
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display, create_display
from fedcommons.cli.run_output import Rounds, ending
from fedcommons.config import presets
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import KINDS
from fedcommons.config.validate import validate
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import exports
from fedcommons.tracking.run_folder import is_run, read_heterogeneity, read_rounds, require_new
from papers.fedssyn import authors


def arguments(argv: Sequence[str]) -> parse.Options:
    chosen = ("preset", "small"), ("data.name", "digits"), ("generator.name", "ddpm")
    defaults = presets.preset(*(parse.early(argv, *option) for option in chosen))
    parser = parse.parser(__doc__, argv, defaults)
    parser.add_argument("--preset", default="small", type=str, help=", ".join(presets.PRESETS))
    parser.add_argument("--out", default="runs/run", type=str, help="run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and what it would cost, and stop")
    parser.add_argument("--json", action="store_true", help="print only the summary, as JSON, to stdout")
    parser.add_argument("--export", default=None, type=str | None, help="onnx: write the model to model.onnx too")
    parse.add_screen(parser)
    return parse.parse(parser, argv)


def run(argv: Sequence[str]) -> int:
    named = parse.named(argv)
    if "replay" in named:
        return play_again(argv)
    if "round" in named:
        raise UserError("--round goes with --replay RUN_DIR and --client I.")
    options = arguments(argv)
    config = authors.settled(options.preset, parse.experiment(options), options.asked)
    if options.export is not None:
        exports.require(options.export)
    with create_display(options, to_stderr=options.json) as display:
        validate(config)
        if options.dry_run:
            return dry_run(config, Path(options.out), display)
        summary = play(config, options, display)
    if options.export:
        from fedcommons.tune.api import Result

        Result(Path(options.out), config, summary).export(options.export)
    if options.json:
        print(json.dumps(summary))
    return 0


def play(config: Experiment, options: parse.Options, display: Display) -> Mapping[str, Any]:
    """Run the experiment, or its remaining rounds, print the results and return the summary."""
    out = Path(options.out)
    require_new(out, options.resume)
    if options.resume and not is_run(out) and config.storage is None:
        display.say(f"Nothing to resume in {out}: the run starts from the beginning.")
    display.load_libraries(with_wandb=config.tracking.wandb != "off")
    from fedcommons.runs import experiment  # this and torch take seconds to import, and --help needs neither
    from fedcommons.tune.gpu_share import with_share

    show = Rounds(display, config.federation.rounds)
    on_step = partial(display.step, ends=False)
    summary = experiment.run(
        config, out, resume=options.resume, say=display.say, on_round=show, on_step=on_step, with_share=with_share
    )
    from fedcommons.reports import plots

    plots.partition_of(out)
    metrics = read_heterogeneity(out)
    for line in ending(summary, read_rounds(out), options.elapsed(), out, display.width, metrics):
        display.say(line)
    return summary


def dry_run(config: Experiment, out: Path, display: Display) -> int:
    """Print the rounds, clients and predicted cost of a run without running it; return the exit code 0."""
    display.load_libraries(with_wandb=config.tracking.wandb != "off")
    from fedcommons.tune.dry_run import print_costs
    from fedcommons.tune.sweep import Trial

    rounds, clients = config.federation.rounds, config.partition.n_clients
    display.say(f"{out}: {rounds} rounds of {clients} clients")
    print_costs([Trial(out.name, config)], out.parent, display, in_ray=False)
    return 0


def play_again(argv: Sequence[str]) -> int:
    choosing = [kind.field for kind in KINDS.values()]
    names = {SHORT_NAMES.get(name, name) for name in parse.named(argv)}
    if other := sorted(names - {"replay", "round", "client", "pdb", "help", "data.dir", *choosing}):
        raise UserError(
            "--replay takes only --round, --client, --pdb, --data.dir and the run's user-defined components, as all "
            f"other values are those of the run; got --{other[0]}."
        )
    parser = parse.Parser(description="Run one client of one round of a run again.")
    parser.add_argument("--replay", type=str, help="run folder")
    parser.add_argument("--round", type=int, help="R, counted from 1")
    parser.add_argument("--client", type=int, help="I, counted from 0")
    parser.add_argument("--pdb", action="store_true", help="open the debugger where the client fails")
    for field in choosing:
        parser.add_argument(
            f"--{field}", type=str, help="the user-defined component of the run, whose code is executed"
        )
    parser.add_argument("--data.dir", type=str, help="the data folder of the run, which is read")
    options = parse.parse(parser, argv)
    if options.round is None or options.client is None:
        raise UserError("--replay needs --round R and --client I.")
    from fedcommons.runs import replay

    try:
        named_parts = [options[field] for field in (*choosing, "data.dir")]
        print(replay.replay(Path(options.replay), options.round, options.client, named=named_parts))
    except ClientError as error:
        if options.pdb and error.__cause__:
            pdb.post_mortem(error.__cause__.__traceback__)
        raise
    return 0


if __name__ == "__main__":
    parse.main(run)
