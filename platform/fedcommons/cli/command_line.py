"""Write the command line that runs an experiment."""

from collections.abc import Collection
from shlex import quote

from fedcommons.cli.parser import written
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import KINDS

SHARING = KINDS["sharing"].field


def command_line(config: Experiment, preset: str, stated: Collection[str] = ()) -> str:
    """Return the command-line options with which ``run.py`` runs this experiment.

    These are the sharing strategy, the fields that differ from the preset, and the fields ``stated``. Fields that the
    user set or swept belong in ``stated``, as preset ``authors`` has different values for each configuration.
    """
    named = {KINDS[kind].field: name for kind, name in config.chosen.items()}
    usual = presets.preset(preset, config.data.name, named.get("generator.name", "ddpm"))
    of_preset, of_parts = choose(usual).flat, choose({**usual, **named}).flat
    arguments = {"preset": preset, "data.name": config.data.name}
    arguments |= {field: name for field, name in named.items() if field == SHARING or of_preset.get(field) != name}
    for name, value in config.flat.items():
        is_usual = name in of_parts and of_parts[name] == value and name not in stated
        if name not in named and not is_usual and not name.startswith(("source.", "tracking.")):
            arguments[name] = value
    return " ".join(f"--{name} {quote(written(value))}" for name, value in arguments.items())
