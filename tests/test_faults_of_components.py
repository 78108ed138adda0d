"""User-defined components whose results are wrong in one place: a run is whole, or ends with one sentence.

test_boundaries.py has what they may raise, and results that are wrong as a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from forked import SIZES, SMALL, Script, call, camp, examine, ran, warm_up, words
from hypothesis import strategies as st

SOURCE = (
    Path(__file__).with_name("right_parts.py").read_text(encoding="utf-8")
    + '''

import sys
from dataclasses import fields, is_dataclass, replace


class Stage(Plain):
    def check(self, fields): pass
    def check_dealt(self, dealt): pass


class Shaped(Maker):
    def check_shape(self, shape, data): pass


class Judged(Net):
    def validation_step(self, batch, batch_idx):
        return {"accuracy": (self(batch[0]).argmax(1) == batch[1]).float().mean()}


class Started(Watch):
    def __init__(self, folder, config): pass


class Table:
    n_classes = 3
    def __len__(self): return 60
    def __getitem__(self, i):
        if i >= 60: raise IndexError(i)
        return torch.full((1, 8, 8), i, dtype=torch.uint8), i % 3


def table(seed):
    return np.random.default_rng(seed).integers(0, 255, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3


def spoilt(r, way, bad):
    """The right result ``r`` with one thing in it replaced, dropped, doubled or of another type."""
    if is_dataclass(r) and not isinstance(r, type):
        return replace(r, **{fields(r)[way % len(fields(r))].name: bad})
    if isinstance(r, torch.Tensor):
        return [lambda: r[:-1], r.double, lambda: r * float("nan"), lambda: r.unsqueeze(0), r.tolist, r.sum, r.detach,
                lambda: r.to("meta"), lambda: r.to(torch.int64)][way % 9]()
    if isinstance(r, dict) and r:
        key = list(r)[way % len(r)]
        return [{**r, key: bad}, {**r, 3: bad}, {**r, "x": bad}, {k: v for k, v in r.items() if k != key}][way % 4]
    if isinstance(r, tuple) and r:
        return tuple(bad if i == way % len(r) else one for i, one in enumerate(r))
    if isinstance(r, list) and r:
        return [[bad, *r[1:]], r[:-1], r + r, iter(r)][way % 4]
    return bad
'''
)

BAD = (
    "None", "{}", "[]", "()", "3", "-1", "0", "10**400", "0.5", "float('nan')", "float('inf')", "1j", "'x'", "b'x'",
    "object()", "lambda: 1", "type", "torch.zeros(3)", "torch.zeros(0)", "np.array(['a'])", "[3]", "{'a': 'b'}",
    "{3: 4.0}", "[None]", "{'a': None}", "torch.zeros(3, device='meta')", "np.zeros((2, 0))", "'x' * 10**6", "'a\\x1b'",
    "{'a': torch.zeros(3)}", "np.array([0.5])", "range(10**12)", "[-1]", "[99]", "{0: 2.0}", "{'round': 1.0}",
)  # fmt: skip
"""In place of another value."""

SHAPES = (
    "del {0}.{1}", "{0}.{1} = None", "{0}.{1} = 3", "{0}.{1} = lambda self: None", "{0}.{1} = lambda *a, **k: None",
    "{0}.{1} = staticmethod(len)", "{0}.{1} = property(lambda self: 1 / 0)", "{0}.{1} = type('C', (), {{}})",
    "async def f(*a, **k): return None\n{0}.{1} = f", "def f(*a, **k): yield None\n{0}.{1} = f",
)  # fmt: skip
"""What may stand in the place of a method."""


@dataclass(frozen=True)
class Seam:
    """A kind of component. methods: those that a run calls; others: those that it may not call."""

    option: str
    name: str
    methods: tuple[str, ...]
    with_it: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()


PLAIN = {name: value for name, value in SMALL.items() if name != "model.channels"}
GENERATES = {"sharing.setting": "shuffled_synthetic", "sharing.p": "0.5"}
SEAMS = (
    Seam("algorithm", "Method", ("start", "down", "client", "merge")),
    Seam("algorithm", "Chooses", ("participants",)),
    Seam("algorithm", "Shares", ("share",)),
    Seam("sharing.setting", "Stage", ("make", "release", "assign", "check", "check_dealt")),
    Seam("generator.name", "Shaped", ("fit", "sample", "check_shape"), GENERATES),
    Seam("straggler.rule", "Late", ("__call__",)),
    Seam("model.name", "Judged", ("__init__", "forward", "training_step", "validation_step", "configure_optimizers")),
    Seam("tracking.tracker", "Started", (), {}, ("__init__", "log", "finish")),
    Seam("measure.measure", "Look", ("__call__",), {"measure.every": "1"}),
    Seam("data.name", "Table", ("__len__", "__getitem__")),
    Seam("partition.name", "cut", ("",)),
    Seam("data.name", "table", ("",)),
)  # fmt: skip


@st.composite
def faults(draw: st.DrawFn) -> tuple[Seam, str]:
    """A component, and lines that spoil it."""
    seam = draw(st.sampled_from(SEAMS))
    method = draw(st.sampled_from([*seam.methods, *seam.others]))
    if method and draw(st.booleans()):
        return seam, draw(st.sampled_from(SHAPES)).format(seam.name, method)
    owner = f"{seam.name}.{method}" if method else seam.name
    when = "if a[-2] != 2: return right(*a, **k)" if method == "client" and draw(st.booleans()) else "pass"
    return seam, (
        f"right = {owner}\nimport functools\n@functools.wraps(right)\ndef wrong(*a, **k):\n    {when}\n"
        f"    return spoilt(right(*a, **k), {draw(st.integers(0, 35))}, {draw(st.sampled_from(BAD))})\n"
        f"{owner} = wrong\n"
    )


def run_with(seams: Sequence[Seam], lines: str, script: Script, root: Path) -> int:
    """Run with these components, spoilt by lines of code; return the exit code."""
    fields = {**PLAIN, "model.name": "linear"}
    for seam in seams:
        fields |= {**seam.with_it, seam.option: f"part.py:{seam.name}"}
    with camp(root) as here:
        (here / "part.py").write_text(f"{SOURCE}\n{lines}", encoding="utf-8")
        ended = ran(here, lambda: call(script, *words(fields)))
        if ended.code == 0:
            assert len((here / "out" / "rounds.jsonl").read_text().splitlines()) == 3, lines
            assert (here / "out" / "summary.json").exists(), lines
    return ended.code


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Script:
    warm_up()
    return sweeps("run").run


ALONE = ("Chooses", "Shares", "Shaped", "table")
"""Components that exclude another one of ``SEAMS``."""


@pytest.mark.parametrize("name", ["all", *ALONE])
@pytest.mark.long
def test_the_right_components_run(name: str, script: Script, tmp_path: Path) -> None:
    """Otherwise the campaign would look at refusals only."""
    seams = [seam for seam in SEAMS if (seam.name not in ALONE if name == "all" else seam.name == name)]
    assert run_with(seams, "", script, tmp_path) == 0


@SIZES
def test_a_wrong_component_ends_a_run_with_one_sentence(many: bool, script: Script, tmp_path: Path) -> None:
    examine(lambda fault: run_with([fault[0]], fault[1], script, tmp_path), faults(), 10, many)
