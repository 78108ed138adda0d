"""A W&B workspace for runs that W&B has or will have: the panels by which they are compared.

python sweeps/dashboard.py runs/table1 runs/mine                            # writes runs/dashboard.json
python sweeps/dashboard.py runs/table1 --entity ME --project fedcommons     # makes it on W&B's server
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from fedcommons.config import cli
from fedcommons.errors import UserError
from fedcommons.files import write_text
from fedcommons.paths import user_path
from fedcommons.reports.frames import load_runs

NAME = "fedcommons: which commons?"


def arguments(argv: Sequence[str]):
    """The folders, then the options."""
    named = list(takewhile(lambda word: not word.startswith("-"), argv))
    title = (__doc__ or "").partition("\n")[0]
    parser = cli.Parser(description=title, usage="dashboard.py DIR [DIR ...] [options]")
    text = "W&B user or team; with it the workspace is made on W&B's server, which needs a login"
    parser.add_argument("--entity", type=str | None, default=None, help=text)
    parser.add_argument("--project", type=str, default="fedcommons", help="W&B project of the runs")
    parser.add_argument("--name", type=str, default=NAME, help="name of the workspace")
    parser.add_argument("--out", type=str, default="runs/dashboard.json", help="file for it, without --entity")
    options = cli.parse(parser, argv[len(named) :])
    if not named:
        raise UserError("name at least one folder with runs: dashboard.py DIR [DIR ...]")
    if not find_spec("wandb_workspaces"):
        raise UserError("dashboards need the package wandb-workspaces: pip install 'fedcommons[dashboard]'.")
    options.folders = [user_path("DIR", name) for name in named]
    return options


def dashboard(argv: Sequence[str]) -> int:
    from fedcommons.reports.workspace import logged, workspace
    from fedcommons.tracking.wandb_tracker import logged_in

    options = arguments(argv)
    if options.entity and not logged_in():
        raise UserError("--entity needs a login of W&B: set WANDB_API_KEY or run `wandb login`.")
    folders = [Path(run) for run in load_runs(*options.folders)["run"]]
    made = workspace(options.entity or "ENTITY", options.project, options.name, *logged(folders))
    panels = sum(len(section.panels) for section in made.sections)
    said = f"{len(made.sections)} sections, {panels} panels over {len(folders)} runs"
    if options.entity:
        made.save()
        print(f"{said}: {made.url}")
        return 0
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
    again = " ".join(["python sweeps/dashboard.py", *map(str, options.folders), f"--project {options.project}"])
    print(f"{said}: {out}. After `wandb login`, and `wandb sync` of runs that were kept offline, this makes it:")
    print(f"{again} --entity YOURS")
    return 0


if __name__ == "__main__":
    cli.main(dashboard)
