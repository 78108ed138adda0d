"""A W&B workspace for runs that W&B has or will have: the panels by which they are compared.

python sweeps/dashboard.py runs/table1 runs/mine                            # writes runs/dashboard.json
python sweeps/dashboard.py runs/table1 --entity ME --project fedcommons     # makes it on W&B's server
python sweeps/dashboard.py --entity ME --project fedcommons                 # the same with all panels, without folders
"""

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from fedcommons.config import cli
from fedcommons.errors import UserError, shown
from fedcommons.files import write_text
from fedcommons.paths import user_path

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    from fedcommons.reports.workspace import Logged

NAME = "fedcommons: which commons?"


def arguments(argv: Sequence[str]):
    """The folders, then the options."""
    named = list(takewhile(lambda word: not word.startswith("-"), argv))
    title = (__doc__ or "").partition("\n")[0]
    parser = cli.Parser(description=title, usage="dashboard.py [DIR ...] [options]")
    text = "W&B user or team; with it the workspace is made on W&B's server, which needs a login"
    parser.add_argument("--entity", type=str | None, default=None, help=text)
    parser.add_argument("--project", type=str, default="fedcommons", help="W&B project of the runs")
    parser.add_argument("--name", type=str, default=NAME, help="name of the workspace")
    parser.add_argument("--out", type=str, default="runs/dashboard.json", help="file for it, without --entity")
    options = cli.parse(parser, argv[len(named) :])
    if not named and options.entity is None:
        raise UserError("name at least one folder with runs, DIR [DIR ...], or --entity ME for what W&B has.")
    for option in ("entity", "project"):
        if options[option] is not None and not re.fullmatch(r"[^/\\#?%:]{1,128}", options[option]):
            raise UserError(
                f"--{option} is a name of 1 to 128 characters without / \\ # ? % :, got {shown(options[option])}."
            )
    if not re.fullmatch(r"[ -~]{1,128}", options.name):  # W&B takes no emoji
        raise UserError(f"--name has 1 to 128 characters of ASCII, got {shown(options.name)}.")
    if not find_spec("wandb_workspaces"):
        raise UserError("dashboards need the package wandb-workspaces: pip install 'fedcommons[dashboard]'.")
    options.folders = [user_path("DIR", name) for name in named]
    return options


def known(folders: Sequence[Path]) -> tuple["Logged", str]:
    """What the runs in these folders have at W&B, and how many they are, in words; without folders everything."""
    from fedcommons.reports.frames import load_runs
    from fedcommons.reports.workspace import EVERYTHING, logged

    if not folders:
        return EVERYTHING, "for all runs of the project"
    runs = load_runs(*folders)
    if runs.empty:
        raise UserError(f"no run in {', '.join(map(str, folders))} can be read.")
    paths = [Path(run) for run in runs["run"]]
    if off := [path for path in paths if not (path / "wandb-id.txt").exists()]:
        print(f"{len(off)} of {len(paths)} runs were played without W&B, which does not have them, as {off[0]}.")
    return logged(paths, print), f"over {len(paths)} runs"


def dashboard(argv: Sequence[str]) -> int:
    from fedcommons.reports.workspace import workspace
    from fedcommons.tracking.wandb_tracker import logged_in

    options = arguments(argv)
    if options.entity and not logged_in():
        raise UserError("--entity needs a login of W&B: set WANDB_API_KEY or run `wandb login`.")
    names, over = known(options.folders)
    made = workspace(options.entity or "ENTITY", options.project, options.name, names)
    said = f"{len(made.sections)} sections, {sum(len(section.panels) for section in made.sections)} panels {over}"
    if options.entity:
        try:
            made.save()
        except Exception as error:  # of W&B's own and of many libraries: no network, no such project, no permission
            raise UserError(f"W&B did not take the workspace: {' '.join(str(error).split())}") from None
        print(f"{said}: {made.url}")
        return 0
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
    print(f"{said}: {out}. After `wandb login`, and `wandb sync` of runs that were kept offline, this makes it:")
    given = ["--project", options.project, *([] if options.name == NAME else ["--name", options.name])]
    print(shlex.join(["python", "sweeps/dashboard.py", *map(str, options.folders), *given, "--entity", "YOURS"]))
    return 0


if __name__ == "__main__":
    cli.main(dashboard)
