"""Create a W&B workspace whose panels compare runs that are, or will be, stored at W&B.

python sweeps/dashboard.py runs/table1 runs/mine                            # writes runs/dashboard.json
python sweeps/dashboard.py runs/table1 --entity ME --project fedcommons     # creates it on W&B's server
python sweeps/dashboard.py --entity ME --project fedcommons                 # the same with all panels, without folders
"""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.errors import UserError, quote
from fedcommons.storage.atomic_files import write_text
from fedcommons.storage.paths import user_path
from fedcommons.tracking.run_folder import read_config
from fedcommons.tracking.wandb_tracker import NAME_AT_WANDB

NAME, PROJECT = "fedcommons: which commons?", "fedcommons"


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="dashboard.py [DIR ...] [options]")
    parser.add_options((
        ("entity", str | None, None,
         "W&B user or team; with it the workspace is created on W&B's server, which needs a login"),
        ("project", str | None, None, "W&B project; default: that of the first run, or fedcommons"),
        ("name", str, NAME, "name of the workspace"),
        ("out", str, "runs/dashboard.json", "file of the workspace, without --entity"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    if not options.words and options.entity is None:
        raise UserError(
            "name at least one folder with runs, DIR [DIR ...], or --entity ME for all runs of the project at W&B."
        )
    for option in ("entity", "project"):
        if options[option] is not None and not re.fullmatch(NAME_AT_WANDB, options[option]):
            raise UserError(
                f"--{option} is a name of 1 to 128 characters without / \\ # ? % :, got {quote(options[option])}."
            )
    if not re.fullmatch(r"[ -~]{1,128}", options.name):  # printable ASCII, as W&B refuses emoji
        raise UserError(f"--name has 1 to 128 characters of ASCII, got {quote(options.name)}.")
    if not find_spec("wandb_workspaces"):
        raise UserError("dashboards need the package wandb-workspaces: pip install 'fedcommons[dashboard]'.")
    options.folders = [user_path("DIR", name) for name in options.words]
    return options


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """Return the paths of all readable runs below ``folders``; print how many of these runs are not stored at W&B."""
    from fedcommons.reports.frames import load_runs

    runs = load_runs(*folders)
    if runs.empty:
        raise UserError(f"no run in {', '.join(map(str, folders))} can be read.")
    paths = [Path(run) for run in runs["run"]]
    if off := [path for path in paths if not (path / "wandb-id.txt").exists()]:
        print(f"{len(off)} of {len(paths)} runs, such as {off[0]}, ran without W&B, so W&B does not have them.")
    return paths


def project_of(run: Path) -> str:
    """Return the W&B project that a run's config.yaml names, or ``PROJECT`` if the file names no valid project."""
    with suppress(UserError):  # config.yaml may come from another version of fedcommons
        if re.fullmatch(NAME_AT_WANDB, project := read_config(run).tracking.project):
            return project
    return PROJECT


def dashboard(argv: Sequence[str]) -> int:
    from fedcommons.reports.workspace import EVERYTHING, logged, workspace
    from fedcommons.tracking.wandb_tracker import logged_in

    options = arguments(argv)
    if options.entity and not logged_in():
        raise UserError("--entity needs a login of W&B: set WANDB_API_KEY or run `wandb login`.")
    runs = runs_in(options.folders) if options.folders else []
    project = options.project or (project_of(runs[0]) if runs else PROJECT)
    names = logged(runs, print) if runs else EVERYTHING
    board = workspace(options.entity or "ENTITY", project, options.name, names)
    panels = sum(len(section.panels) for section in board.sections)
    over = f"{len(runs)} run{'s' if len(runs) > 1 else ''}" if runs else "all runs"
    message = f"{len(board.sections)} sections, {panels} panels over {over} of project {project}"
    if options.entity:
        try:
            board.save()
        except Exception as error:  # W&B raises errors of many types, for example without network or permission
            raise UserError(f"the workspace was not saved at W&B: {' '.join(str(error).split())}") from None
        print(f"{message}: {board.url}")
        return 0
    out = Path(options.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, board._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written ({error.strerror}).") from None
    print(f"{message}: {out}. After `wandb login`, and `wandb sync` of offline runs, this command creates it:")
    flags = ["--project", project, *([] if options.name == NAME else ["--name", options.name])]
    print(shlex.join(["python", "sweeps/dashboard.py", *map(str, options.folders), *flags, "--entity", "YOURS"]))
    return 0


if __name__ == "__main__":
    parse.main(dashboard, resumes=False)
