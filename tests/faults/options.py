"""What the scripts' parsers know, and values for it: good ones, ones at a limit, and ones that nobody should accept."""

import math
import random
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from fedcommons.config import cli, presets
from fedcommons.config.cli import Parser
from fedcommons.config.flat import fields_for
from fedcommons.config.parts import KINDS
from fedcommons.config.reading import NULLS
from fedcommons.core.weighting import WEIGHTINGS

SWEEPS = Path(__file__).parents[2] / "sweeps"

_KNOWN = {kind: tuple(k.known) for kind, k in KINDS.items()}

FIELDS = fields_for(_KNOWN)
"""All fields of all parts of the package."""

UNSURE = object()
"""The value of a text that may or may not be taken."""

WRONG = object()
"""The value of a text that nothing may take: it must be refused."""


@dataclass(frozen=True)
class Option:
    """An option of a script; name: without dashes in front; hint: the type of its values, None for a flag."""

    name: str
    hint: Any

    @property
    def field(self) -> str:
        """As the parsed options and the fields of an experiment have it."""
        return self.name.replace("-", "_")

    @property
    def kind(self) -> Any:
        """The type, None left out."""
        return next((k for k in get_args(self.hint) if k is not type(None)), self.hint) if self.nullable else self.hint

    @property
    def nullable(self) -> bool:
        return type(None) in get_args(self.hint)


class _Found(Exception):
    pass


def scripts() -> dict[str, Callable[[Sequence[str]], int]]:
    """What each script of sweeps/ hands to ``cli.main``, by the script's name."""
    found: dict[str, Callable[[Sequence[str]], int]] = {}
    for path in sorted(SWEEPS.glob("*.py")):
        with mock.patch.object(cli, "main", lambda function, name=path.stem: found.update({name: function})):
            runpy.run_path(str(path), run_name="__main__")
    return found


def of(script: Callable[[Sequence[str]], int], argv: Sequence[str] = ()) -> list[Option]:
    """The options of the parser that the script makes for ``argv``, sections left out."""

    def keep(parser: Parser, argv: Sequence[str]) -> None:
        raise _Found(parser)

    with mock.patch.object(cli, "parse", keep):
        try:
            script(list(argv))
        except _Found as found:
            parser: Parser = found.args[0]
            own = [
                Option(parser.written[name].removeprefix("--"), None if one.is_flag else one.field.hint)
                for name, one in parser.options.items()
            ]
            return [*own, *([Option("config", str), Option("print_config", None)] if parser.fields else [])]
    raise AssertionError("the script parsed nothing")


NAMES: Mapping[str, Sequence[str]] = {
    "data.name": _KNOWN["data"], "dataset": _KNOWN["data"], "partition.name": _KNOWN["partition"],
    "sharing.setting": _KNOWN["sharing"], "settings": (*_KNOWN["sharing"], "real,shuffled_real"),
    "model.name": _KNOWN["model"], "generator.name": _KNOWN["generator"], "algorithm": _KNOWN["algorithm"],
    "algorithms": (*_KNOWN["algorithm"], "fedavg,moon"), "federation.weighting": tuple(WEIGHTINGS),
    "federation.executor": ("serial",), "federation.buffers": ("average", "keep"),
    "data.validation_from": ("random", "last"), "generator.schedule": ("linear", "squaredcos_cap_v2"),
    "straggler.rule": _KNOWN["straggler"], "straggler.partial": ("method", "take", "drop"),
    "generator.sampler": ("ddpm", "ddim"), "client.optimizer": ("sgd", "adam"), "tracking.wandb": ("off",),
    "wandb": ("off",), "preset": presets.PRESETS, "models": ("server", "clients"), "scheduler": ("fifo", "asha"),
    "metric": ("rounds_to_target", "best_accuracy", "last_accuracy"), "fedpvr.layers": ("network.last", "network.*"),
    "seeds": ("0", "0,1", "3,1"), "alphas": ("0.1", "0.01,0.1", "1,10"), "federations": ("4:1", "4:1,4:0.5"),
    "lrs": ("0.1", "0.05,0.1"), "p": ("0,0.5", "0.25", "0,0.1,0.5"), "check-p": ("0.25", "0.1,0.5"),
    "epochs": ("1", "1,2"), "noise": ("0", "0,0.5"), "generator-epochs": ("1", "1,2", ""),
    "tracking.tracker": ("null", "~"), "measure.measure": ("null", "~"),
    "space": ("alpha=0.01,0.1", "p=uniform(0,0.5)", "lr=loguniform(0.01,0.1)", "client.epochs=randint(1,3)"),
}  # fmt: skip
"""Good values of the options that are names or lists in a text."""

COSTLY = ("federation.rounds", "client.epochs", "generator.epochs", "rounds", "probe-rounds", "central-epochs")
"""Numbers that may be as large as one has the time for."""

PATHS = ("artifacts", "data.dir", "out", "from", "data-dir", "replay")

SMALL_INTS = ("1", "2", "3", "4", "5", "8", "16", "+2")
INTS = ("0", "-1", "-0", "1e3", "2.0", "0b1", "1_0", "٣", "true", "nan", "inf", "", " ", "1,2", "null", "9" * 30,
        str(2**31), str(2**63 - 1), str(2**63), "1" + "0" * 12, "9" * 5000)  # fmt: skip
SMALL_FLOATS = ("0.5", "1e-3", "0.25", "1", ".1", "0.05", "1e-1")
FLOATS = ("0", "-0.0", "1.0", "-1", "1e-320", "5e-324", "1e-300", "1e308", "1e400", "-1e400", "inf", "-inf", "nan",
          "NaN", "1e30", "0.999999999", "1e-9", "", " ", "abc", "1,5", "½", "1e", "0x10", "null", "true", "9" * 5000,
          "1e" + "9" * 400, "0." + "1" * 5000)  # fmt: skip
BOOLS = ("true", "false", "yes", "1", "0", "maybe", "null", "", "True", "TRUE", "[true]")
TEXTS = (
    "", " ", "\t", "a\nb", "naïve", "日本", "\udcff", "x" * 5000, "null", "~", "-", "--", "{}", "[]", "%s%n", "../..",
    "\x1b[31m", "a,,b", ",", "real,real", "nan", "inf", "-1", "1e400", "0", "9" * 5000, "None",
)  # fmt: skip
TUPLES = (
    "[8,16]", "[16,32]", "[]", "[16", "[8]", "[8,8,8]", "[0,0]", "[-8,16]", "[nan,1]", "[7,9]", "null", "8,16", "",
    "[[8],[8]]", "[1000000000,1000000000]", "[800000,800000]", "['a','b']", "[8.5,16]", "[8,16],",
)  # fmt: skip
SPACES = (
    "alpha", "alpha=", "=0.1", "alpha=0.1,0.1", "alhpa=0.1", "p=uniform(0,inf)", "p=uniform(nan,1)",
    "lr=loguniform(0,1)", "client.epochs=randint(0.2,0.7)", "client.epochs=randint(0,1e30)", "p=uniform(0.5)",
    "p=uniform(1,0)", "seed=0,x", "p=uniform(0,0.5", "model.channels=[8,8]", "artifacts=a,b", "p=normal(0,1)",
    "lr=nan", "lr=loguniform(1e-400,1)", "seed=" + "9" * 5000, "client.epochs=uniform(1,2)", "alpha=0.1=0.2",
    "client.lr=1e400", "data.augment=maybe", "p=uniform(0,1e400)", "seed=randint(0,5)", "lr=loguniform(1,1e308)",
)  # fmt: skip
SPACES_NOT_TO_TAKE = {s for s in SPACES if not s.startswith(("seed=randint", "lr=loguniform(1,"))}
PLACES = (
    "loop", "loop/x", "file.txt", "file.txt/x", "n" * 300, "/".join(["d"] * 2500), "~nosuchuser", "~nosuchuser/x",
    "~", "~/new", "", ".", "..", "/dev/null", "/dev/full", "/proc/self/x", "/sys/x", "users", "users/inner", "new",
    "deep/er/new", "sp ace", "日本", "\udcff", "nul", "dangling", "whole", "whole/checkpoints", "a\nb", "-", "null",
    "x" * 5000,
)  # fmt: skip


def draw(rng: random.Random, option: Option, odd: bool) -> str:
    """A value for this option: a good one, or with ``odd`` any."""
    kind, good = option.kind, NAMES.get(option.name)
    if option.name in PATHS:
        return rng.choice(PLACES) if odd else "new"
    if option.name == "space" and odd:
        return rng.choice(SPACES)
    if kind is int:
        return rng.choice(INTS if odd else SMALL_INTS)
    if kind is float:
        return rng.choice(FLOATS if odd else SMALL_FLOATS)
    if kind is bool:
        return rng.choice(BOOLS if odd else BOOLS[:2])
    if kind is str:
        if good and odd and rng.random() < 0.4:
            return misspelt(rng, rng.choice([g for g in good if g] or ["x"]))
        return rng.choice(TEXTS if odd or not good else good)
    return rng.choice(TUPLES if odd else TUPLES[:2])


def misspelt(rng: random.Random, name: str) -> str:
    """The name with a letter dropped, doubled, swapped or in another case."""
    i = rng.randrange(len(name))
    changed = (
        name[:i] + name[i + 1 :],
        name[: i + 1] + name[i:],
        name[:i] + name[i:][1::-1] + name[i + 2 :],
        name[:i] + name[i].swapcase() + name[i + 1 :],
        name + "x",
    )
    return rng.choice(changed)


def meaning(option: Option, text: str) -> Any:
    """The value that ``text`` asks for; UNSURE, or WRONG where it must be refused."""
    kind = option.kind
    if option.nullable and text in NULLS:
        return None
    if option.name in PATHS:
        return UNSURE
    if option.name == "space":
        return WRONG if text in SPACES_NOT_TO_TAKE else UNSURE
    if kind is bool:
        return {"true": True, "false": False}.get(text, UNSURE if text in ("True", "TRUE", "yes", "1", "0") else WRONG)
    if kind is int:
        if re.fullmatch(r"[+-]?\d{1,40}", text, re.ASCII):
            return int(text)
        return UNSURE if text in ("1e3", "2.0", "0b1", "1_0", "٣") else WRONG
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            return UNSURE if text in ("0x10", "½") else WRONG
        return WRONG if math.isnan(value) else value
    if kind is str:
        known = NAMES.get(option.name)
        closed = known and "," not in "".join(known) and option.name not in ("fedpvr.layers", "p", "seeds", "alphas")
        if known and closed and text not in known and option.name in ("algorithm", "dataset", "preset", *_NAMED):
            return WRONG
        return text if text and text.isprintable() and text.strip() == text else UNSURE
    found = re.fullmatch(r"\[(-?\d+(?:,-?\d+)*)\]", text)
    return [int(n) for n in found[1].split(",")] if found else UNSURE


_ENDS = (".name", ".setting", ".schedule", ".sampler", ".optimizer", ".tracker", ".measure")
_NAMED = [name for name in NAMES if name.endswith(_ENDS)]
