"""Whatever options ask for, a command does its work or ends with one sentence, and changes no other file.

``FEDCOMMONS_EXAMPLES=2000 pytest -m slow tests/config/test_faults.py`` runs the campaign, and each test run a slice.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, isnan, nextafter
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args

import pytest
import yaml
from forked import SIZES, SMALL, Ended, Script, call, camp, examine, files, ran, warm_up, words, write_mine
from hypothesis import strategies as st

from fedcommons.config import registry
from fedcommons.config.dotted import common_fields
from fedcommons.config.fields import Field
from fedcommons.config.registry import KINDS
from fedcommons.errors import UserError


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Script:
    warm_up()
    return sweeps("run").run


@dataclass(frozen=True)
class Choice:
    """A config field, and the options that select its component."""

    options: Mapping[str, str]
    name: str
    field: Field


def choices() -> list[Choice]:
    """Return all fields of all components of the package."""
    generates = {"sharing.setting": "shuffled_synthetic"}
    result = [Choice(generates if n.startswith("generator.") else {}, n, f) for n, f in common_fields().items()]
    for kind, spec in KINDS.items():
        for part in spec.components:
            options = {spec.field: part, **(generates if kind == "generator" else {})}
            section, constants = registry.section(kind, part), registry.constants(kind, part)
            result += [Choice(options, f"{section}.{name}", field) for name, field in constants.items()]
    return result


CHOICES = choices()

Value = tuple[str, bool | None]
"""A text, and whether it must be accepted; None: either."""


def range_of(field: Field) -> tuple[str, float, float]:
    interval = field.allowed.partition(" or ")[0]
    low, high = map(float, interval[1:-1].split(",")) if interval else (-inf, inf)
    return interval, low, high


def judged(field: Field, value: float) -> Value:
    interval, low, high = range_of(field)
    if not interval or value in (inf, -inf):
        return repr(value), None
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    return repr(value), above and below and not isnan(value)


def limits_of(field: Field, kind: type) -> list[float]:
    """Return the limits of a range and the adjacent numbers, inside and outside of it."""
    limits: list[float] = []
    for bound in range_of(field)[1:]:
        if isfinite(bound):
            around = (int(bound) - 1, int(bound), int(bound) + 1)
            limits += around if kind is int else (nextafter(bound, -inf), bound, nextafter(bound, inf))
    return limits


def test_every_range_holds_at_its_limits() -> None:
    count = 0
    for choice in CHOICES:
        kind = choice.field.kinds[0]
        for value in limits_of(choice.field, kind) if kind in (int, float) and "|" not in choice.field.allowed else []:
            count += 1
            if judged(choice.field, value)[1]:
                choice.field.check(choice.name, value)
            else:
                with pytest.raises(UserError, match=re.escape(choice.name)):
                    choice.field.check(choice.name, value)
    assert count > 500


def numbers(field: Field, kind: type) -> st.SearchStrategy[Value]:
    """Numbers inside the range, at its limits, next to them and outside, and texts that are no numbers."""
    limits = limits_of(field, kind)
    plain: st.SearchStrategy[float] = st.integers() if kind is int else st.floats() | st.floats(0, 1)
    values = (st.sampled_from(limits) | plain if limits else plain).map(lambda value: judged(field, value))
    no_numbers = ["x", "1,5", "1e", "½x", "null", "[", "--", "9" * 5000]
    wrong = False if not {NoneType, str} & {*field.kinds} and " or " not in field.allowed else None
    return values | st.sampled_from([(text, None if "9" in text else wrong) for text in no_numbers])


TEXTS = ("", " ", "a\nb", "naïve", "日本", "\udcff", "x" * 5000, "null", "--", "{}", "%s%n", "../..", "\x1b[31m", ",",
         "nan", "9" * 5000, "‮txt", "part.py:Mine", "builtins:exit", "os:system", "/dev/zero:X")  # fmt: skip


def values(field: Field) -> st.SearchStrategy[Value]:
    kind = field.kinds[0]
    if kind is bool:
        wrong = None if NoneType in field.kinds else False
        return st.sampled_from([("true", True), ("false", True), ("maybe", False), ("2", False), ("null", wrong)])
    if "|" in field.allowed:
        names = [name.strip() for name in field.allowed.split("|")]
        return st.sampled_from([(n, True) for n in names] + [(f"{n}x", False) for n in names])
    if kind in (int, float):
        return numbers(field, kind)
    if kind is tuple:
        inner = numbers(field, get_args(field.hint)[0])
        return inner.filter(lambda pair: "9" * 9 not in pair[0]).map(lambda pair: (f"[{pair[0]},{pair[0]}]", pair[1]))
    return st.sampled_from(TEXTS).map(lambda text: (text, None))


ASKED = st.sampled_from(CHOICES).flatmap(lambda choice: values(choice.field).map(lambda value: (choice, value)))


def check_option(asked: tuple[Choice, Value], script: Script, root: Path) -> None:
    """A value in the range is accepted and printed, another one is refused by the name of its field."""
    choice, (text, is_right) = asked
    option = f"--{choice.name}={text}"
    with camp(root) as here:
        ended = ran(here, lambda: call(script, "--preset=smoke", *words(choice.options), option, "--print_config"))
        assert not list(here.iterdir())
    if ended.code:
        assert ended.code == 2
        assert is_right is not True, ended.err
        assert is_right is None or choice.name.rpartition(".")[2] in ended.sentence
        return
    assert is_right is not False, f"{option} was accepted"
    if is_right:
        has = yaml.safe_load(ended.out)
        for name in choice.name.split("."):
            has = has[name]
        assert has == (float(text) if isinstance(has, float) else yaml.safe_load(text))


PLAIN = [
    choice for choice in CHOICES
    if (choice.field.kinds[0] in (bool, int, float) or "|" in choice.field.allowed)
    and not choice.name.startswith(("tracking.", "federation.executor"))
]  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> dict[str, str]:
    """Some fields with values that they accept, and the components that have these fields."""
    asked: dict[str, str] = {}
    for choice in draw(st.lists(st.sampled_from(PLAIN), max_size=3)):
        if choice.field.kinds[0] is int:  # small ones: a large number of steps or rounds takes as long as it says
            low = int(float(choice.field.allowed[1:].partition(",")[0] or 0))
            asked |= {**choice.options, choice.name: str(low + draw(st.integers(0, 3)))}
        else:
            text, is_right = draw(values(choice.field))
            asked |= {**choice.options, choice.name: text} if is_right else {}
    return asked


def check_run(asked: Mapping[str, str], script: Script, root: Path) -> None:
    fields = {**SMALL, **asked}
    if fields.get("model.name", "cnn") != "cnn":
        del fields["model.channels"]
    with camp(root) as here:
        (here / "notes.txt").write_text("mine")
        ended = ran(here, lambda: call(script, *words(fields)), seconds=60)
        assert (here / "notes.txt").read_text() == "mine"
        assert asked or ended.code == 0, ended.err
        if ended.code == 0:
            require_whole(here / "out", ended)


def require_whole(out: Path, ended: Ended) -> None:
    """All rounds, a summary of them, and a word on each number that is not finite."""
    lines = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert [line["round"] for line in lines] == list(range(summary["rounds"] + 1))
    if "test/accuracy" in lines[-1]:
        assert summary["last_accuracy"] == lines[-1]["test/accuracy"]
    lost = {k for line in lines for k, v in line.items() if v is None or (isinstance(v, float) and not isfinite(v))}
    assert not lost or "finite" in ended.out + ended.err or "no accuracy" in ended.out + ended.err, lost


PLACES = ("loop", "loop/x", "file.txt", "file.txt/x", "n" * 300, "/".join(["d"] * 2500), "~nosuchuser/x", "~", "",
          ".", "..", "/dev/null", "/dev/full", "/proc/self/x", "users", "users/inner", "new", "deep/er/new", "日本",
          "\udcff", "dangling", "a\nb", "fifo", "-", "/dev/zero", "sparse", "itself", "../../outside")  # fmt: skip
WHERE = ("out", "artifacts", "data.dir", "config", "replay", "storage")
PLACED = st.tuples(st.sampled_from(WHERE), st.sampled_from(PLACES))


def check_place(asked: tuple[str, str], script: Script, root: Path) -> None:
    """Whatever stands where an option points to, nothing that was there is changed."""
    with camp(root) as parent:
        (here := parent / "inside").mkdir()  # a storage may be the folder above
        write_mine(here, "users/inner/x", "file.txt", "users/notes.txt", "users/checkpoints/mine.txt",
                   "users/rounds.jsonl", ".draft.tmp")  # fmt: skip
        (here / "itself").write_text("config: itself\n")
        (here / "loop").symlink_to("loop")
        (here / "dangling").symlink_to("nowhere/at/all")
        os.mkfifo(here / "fifo")
        with open(here / "sparse", "wb") as file:
            file.truncate(20 * 2**30)
        before = {name: facts for name, facts in files(here).items() if not (here / name).is_dir()}
        ended = ran(here, lambda: call(script, *words({**SMALL, **dict([asked])})))
        after = files(here)
        assert {name: after.get(name) for name in before} == before
        if asked[0] == "out" and asked[1] in ("new", "deep/er/new", "日本"):
            assert ended.code == 0, ended.err
            require_whole(here / asked[1], ended)


CAMPAIGNS: Mapping[str, tuple[Callable[[Any, Script, Path], None], st.SearchStrategy[Any], int]] = {
    "values": (check_option, ASKED, 16), "runs": (check_run, requests(), 5), "places": (check_place, PLACED, 10),
}  # fmt: skip


@SIZES
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_command_does_its_work_or_is_refused(campaign: str, many: bool, script: Script, tmp_path: Path) -> None:
    check, cases, few = CAMPAIGNS[campaign]
    examine(lambda case: check(case, script, tmp_path), cases, few, many)
