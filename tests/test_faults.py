"""Whatever options and configs ask for, a command does its work or ends with one sentence, and changes no other file.

``FEDCOMMONS_EXAMPLES=2000 pytest -m slow tests/test_faults*.py`` runs the campaign, and each test run a slice.
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
from forked import SIZES, SMALL, Ended, Script, call, camp, examine, files, ran, warm_up, words
from hypothesis import strategies as st

from fedcommons.config import parts
from fedcommons.config.fields import Field
from fedcommons.config.flat import own_fields
from fedcommons.config.parts import KINDS
from fedcommons.errors import UserError

GENERATES = {"sharing.setting": "shuffled_synthetic", "generator.epochs": "1", "generator.channels": "[8,8]",
             "generator.sampling_steps": "2"}  # fmt: skip
PATHS = ("artifacts", "storage", "data.dir", "data.file", "model.weights", "tracking.project", "tracking.group")


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Script:
    warm_up()
    return sweeps("run").run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@dataclass(frozen=True)
class Choice:
    """A config field, and the options that select its component."""

    options: Mapping[str, str]
    name: str
    field: Field


def choices() -> list[Choice]:
    """All fields of all components of the package."""
    generates = {"sharing.setting": "shuffled_synthetic"}
    found = [Choice(generates if n.startswith("generator.") else {}, n, f) for n, f in own_fields().items()]
    for kind, known in KINDS.items():
        for part in known.known:
            options = {known.field: part, **(generates if kind == "generator" else {})}
            section, constants = parts.section(kind, part), parts.constants(kind, part)
            found += [Choice(options, f"{section}.{name}", field) for name, field in constants.items()]
    return found


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
         "nan", "a\0b", "9" * 5000, "‮txt", "part.py:Mine", "builtins:exit", "os:system", "/dev/zero:X")  # fmt: skip


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
        return inner.filter(lambda one: "9" * 9 not in one[0]).map(lambda one: (f"[{one[0]},{one[0]}]", one[1]))
    return st.sampled_from(TEXTS).filter(lambda text: "\0" not in text).map(lambda text: (text, None))


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


@SIZES
def test_a_value_is_accepted_or_refused_by_its_range(many: bool, script: Script, root: Path) -> None:
    examine(lambda case: check_option(case, script, root), ASKED, 12, many)


TOGETHER: tuple[Mapping[str, str], ...] = (
    {"algorithm": "fedmix"}, {"algorithm": "moon"}, {"algorithm": "feddyn"}, {"algorithm": "fednova"},
    {"algorithm": "fedpvr"}, {"algorithm": "scaffold", "federation.memory_mb": "0.001"}, {"dp.local": "true"},
    {"model.batch_norm": "true"}, {"straggler.q": "0.5"}, {"model.name": "linear"}, {"model.name": "vae"},
    {"sharing.setting": "shuffled_real", "sharing.p": "0.4"}, {"sharing.setting": "raw_copies", "sharing.c": "0.2"},
    {**GENERATES, "sharing.p": "0.3"}, {"partition.name": "dirichlet_niid", "partition.alpha": "1e-300"},
    {"partition.name": "iid"}, {"measure.every": "1", "measure.samples": "16"}, {"partition.n_clients": "10000000"},
    {"partition.n_clients": "40"}, {"dp.noise": "secret"}, {"client.optimizer": "adam", "client.momentum": "0.9"},
    {"federation.buffers": "keep"}, {"data.limit": "1"}, {"data.limit": "5"}, {"data.validation": "0.5"},
    {"client.lr": "1e38"}, {"client.weight_decay": "1e38"}, {"federation.max_norm": "1e-300"}, {"target": "1"},
    {"straggler.partial": "take"}, {"straggler.rule": "deadline"}, {"federation.weighting": "samples"},
    {"client.batch_size": "1000000000"}, {"seed": "4611686018427387904"}, {"federation.participation": "0.01"},
)  # fmt: skip
"""Options that may contradict each other, or ask for more than there is."""


@st.composite
def requests(draw: st.DrawFn) -> dict[str, str]:
    """Some of ``TOGETHER``, and some fields with values that they accept."""
    asked: dict[str, str] = {}
    for some in draw(st.lists(st.sampled_from(TOGETHER), min_size=0, max_size=2)):
        asked |= some
    for choice in draw(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=2)):
        kind, low = choice.field.kinds[0], choice.field.allowed[1:].partition(",")[0]
        if choice.name in PATHS or choice.name.startswith(("tracking.", "federation.executor")):
            continue
        if kind is int:  # small ones: a large number of steps or rounds takes as long as it says
            text = str(int(float(low or 0)) + draw(st.integers(0, 3)))
        elif kind in (bool, float) or "|" in choice.field.allowed:
            text, is_right = draw(values(choice.field))
            if is_right is not True:
                continue
        else:
            continue
        asked |= {**choice.options, choice.name: text}
    return asked


def check_run(asked: Mapping[str, str], script: Script, root: Path) -> None:
    fields = {**SMALL, **asked}
    if fields.get("model.name", "cnn") != "cnn":
        del fields["model.channels"]
    with camp(root) as here:
        (here / "notes.txt").write_text("mine")
        ended = ran(here, lambda: call(script, *words(fields)), seconds=60)
        assert (here / "notes.txt").read_text() == "mine"
        if ended.code == 0:
            require_whole(here / "out", ended, asked)


def require_whole(out: Path, ended: Ended, asked: Mapping[str, str]) -> None:
    """All rounds, a summary of them, the options that were asked for, and a word on each number that is not finite."""
    lines = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert [line["round"] for line in lines] == list(range(summary["rounds"] + 1))
    if "test/accuracy" in lines[-1]:
        assert summary["last_accuracy"] == lines[-1]["test/accuracy"]
    for name, text in asked.items():
        has = yaml.safe_load((out / "config.yaml").read_text())
        for part in name.split("."):
            has = has.get(part, {})
        if isinstance(has, int | float) and not isinstance(has, bool):
            assert float(has) == float(text), name
    lost = {k for line in lines for k, v in line.items() if v is None or (isinstance(v, float) and not isfinite(v))}
    assert not lost or "finite" in ended.out + ended.err or "no accuracy" in ended.out + ended.err, lost


@SIZES
def test_a_run_is_whole_or_refused(many: bool, script: Script, root: Path) -> None:
    examine(lambda case: check_run(case, script, root), requests(), 5, many)


@st.composite
def misspelt(draw: st.DrawFn) -> str:
    """An option of which no field has the name."""
    name = draw(st.sampled_from(sorted(own_fields())))
    i, letter = draw(st.integers(0, len(name) - 1)), draw(st.sampled_from("xQ.3"))
    wrong = draw(st.sampled_from([name[:i] + letter + name[i:], name[:i] + name[i].swapcase() + name[i + 1 :] + "q"]))
    return draw(st.sampled_from([f"--{wrong}=1", f"-{name}=1", f"—{name}=1", f"{name}=1", f"--{name}.x=1", "more"]))


PLACES = ("loop", "loop/x", "file.txt", "file.txt/x", "n" * 300, "/".join(["d"] * 2500), "~nosuchuser/x", "~", "",
          ".", "..", "/dev/null", "/dev/full", "/proc/self/x", "users", "users/inner", "new", "deep/er/new", "日本",
          "\udcff", "dangling", "a\nb", "fifo", "-", "/dev/zero", "sparse", "itself", "../outside")  # fmt: skip
WHERE = ("out", "artifacts", "data.dir", "config", "replay", "storage")
PLACED = st.tuples(st.sampled_from(WHERE), st.sampled_from(PLACES))


def check_place(asked: tuple[str, str] | str, script: Script, root: Path) -> None:
    """Whatever stands where an option points to, nothing that was there is changed."""
    with camp(root) as here:
        (here / "users" / "inner").mkdir(parents=True)
        for name in ("file.txt", "users/notes.txt", "users/checkpoints/mine.txt", "users/rounds.jsonl", ".draft.tmp"):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text("mine")
        (here / "itself").write_text("config: itself\n")
        (here / "loop").symlink_to("loop")
        (here / "dangling").symlink_to("nowhere/at/all")
        os.mkfifo(here / "fifo")
        with open(here / "sparse", "wb") as file:
            file.truncate(20 * 2**30)
        before = files(here)
        fields = dict(SMALL) if isinstance(asked, str) else {**SMALL, asked[0]: asked[1]}
        more = [asked] if isinstance(asked, str) else []
        ended = ran(here, lambda: call(script, *words(fields), *more))
        after = files(here)
        assert {name: after.get(name) for name in before if not (here / name).is_dir()} == {
            name: facts for name, facts in before.items() if not (here / name).is_dir()
        }
        if isinstance(asked, str):
            assert ended.code == 2
            assert not (here / "out").exists()
        elif asked[0] == "out" and asked[1] in ("new", "deep/er/new", "日本"):
            assert ended.code == 0, ended.err
            require_whole(here / asked[1], ended, {})


@SIZES
def test_a_wrong_option_or_place_changes_nothing(many: bool, script: Script, root: Path) -> None:
    examine(lambda case: check_place(case, script, root), misspelt() | PLACED, 10, many)


BASE: Mapping[str, Any] = {
    "seed": 1, "algorithm": "fedavg", "preset": "smoke", "client": {"lr": 0.1, "epochs": 1}, "data": {"limit": 40},
    "federation": {"rounds": 1}, "tracking": {"wandb": "off"}, "straggler": {"q": 0.0}, "measure": {"every": 0},
    "out": "out", "dp": {"local": False}, "model": {"channels": [2, 4]},
}  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(
    [10**30, "\x1b[31m", "x" * 5000, "../outside", "part.py:Mine", "9" * 5000])  # fmt: skip
NESTED = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=6
)
TAGS = ("!!python/object/apply:os.system ['touch ../pwned']", "!!python/name:os.system", "!!python/tuple [1]",
        "!!binary '*'", "!!set {1}", "!!int x", "!!float .inf", "!mine 1", "!!timestamp x", "<<", "2020-13-45", "&a *a",
        "*nowhere", "{<<: *x}", "&a [*a]", "1:30:00x", "'", "|9\n x", "%", "@x", ": ", "{", "]", "---", "\t", "10e400",
        "0777", "1__0", "~", "１")  # fmt: skip


def bomb(width: int, depth: int) -> str:
    """Aliases of aliases: few bytes, and very many values."""
    lines = ["a0: &a0 [x]\n"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]\n" for i in range(1, depth)]
    return f"{''.join(lines)}seed: *a{depth - 1}\n"


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    """A config file with another value somewhere, an odd tag, changed bytes, or very many values."""
    key = draw(st.sampled_from(sorted(BASE)))
    text = yaml.safe_dump(dict(BASE))
    way = draw(st.sampled_from(["value", "inner", "key", "tag", "bytes", "cut", "deep", "bomb", "long", "binary"]))
    if way in ("value", "inner"):
        inner = way == "inner" and isinstance(BASE[key], dict)
        value = {**BASE[key], draw(st.sampled_from(sorted(BASE[key]))): draw(NESTED)} if inner else draw(NESTED)
        return yaml.safe_dump({**BASE, key: value}, allow_unicode=draw(st.booleans())).encode()
    if way == "key":
        return yaml.safe_dump({**BASE, draw(LEAVES): draw(NESTED)}).encode()
    if way == "tag":
        return f"{text}{key}: {draw(st.sampled_from(TAGS))}\n".encode()
    content, i = text.encode(), draw(st.integers(0, len(text)))
    if way == "bytes":
        return (
            content[:i] + draw(st.binary(max_size=5) | st.sampled_from([b"\0", b"\xef\xbb\xbf", b"\x85"])) + content[i:]
        )
    if way == "cut":
        return content[:i] + content[i + draw(st.integers(1, 50)) :]
    if way == "deep":
        return text.encode() + draw(st.sampled_from([b"x: [", b"- ", b"? ", b"{a: "])) * draw(
            st.sampled_from([50, 9000])
        )
    if way == "bomb":
        return (text + bomb(*draw(st.sampled_from([(2, 30), (9, 9), (100, 3), (3, 60)])))).encode()
    if way == "long":
        return text.encode() + draw(st.sampled_from([b"# comment\n", b"\n", b"- 1\n", b"x"])) * 300_000
    return draw(st.binary(max_size=200))


def check_config(content: bytes, script: Script, root: Path) -> None:
    with camp(root) as here:
        (here / "c.yaml").write_bytes(content)
        ended = ran(here, lambda: call(script, "--config=c.yaml", "--print_config"), gigabytes=1.5)
        assert [path.name for path in here.iterdir()] == ["c.yaml"]
        assert ended.code == 2 or isinstance(yaml.safe_load(ended.out), dict)


@SIZES
def test_a_config_file_is_read_or_refused(many: bool, script: Script, root: Path) -> None:
    examine(lambda case: check_config(case, script, root), configs(), 12, many)
