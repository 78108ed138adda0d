"""Parts of one's own that do something wrong: kind x method x what it does, and files that are no parts."""

import os
import random
import re
from collections.abc import Mapping
from pathlib import Path

from faults import cases
from faults.cases import Case
from faults.processes import Ended
from faults.right import HEAD, KINDS, Right
from faults.runs import Script
from faults.verdicts import Fault, last, shown

import fedcommons as fc

TINY = {
    "preset": "smoke", "data.limit": "40", "client.epochs": "1", "federation.rounds": "2", "tracking.wandb": "off",
    "measure.every": "0", "artifacts": "store", "out": "out",
}  # fmt: skip

LONGEST = 200
"""Characters of a sentence about somebody's own part."""

RESULTS = (
    "None", "{}", "[]", "()", "3", "-1", "0", "10**400", "0.5", "float('nan')", "1j", "'x'", "b'x'", "''", "True",
    "object()", "lambda: 1", "type", "torch.zeros(3)", "torch.zeros(0)", "np.array(['a'])", "np.array([None, {}])",
    "[1, 2]", "{'a': 1}", "{1: 2}", "(1, 2)", "(right(), right())", "[right()]", "iter([1])", "...", "NotImplemented",
    "Exception('x')", "torch.zeros(3).to_sparse()", "torch.zeros(3, device='meta')", "np.zeros((2, 0))", "sys",
    "type('Empty', (), {})()", "[[]]", "{'model': None}", "'x' * 10**6",
)  # fmt: skip
"""What any method may give instead of what it should; ``right()`` is the right thing."""

RAISED = (
    "raise ValueError('no')", "raise ValueError('a\\nb\\n' * 50)", "raise ValueError('x' * 10**6)",
    "raise ValueError('\\x1b[31mred\\x1b[0m')", "raise KeyError('control')", "raise KeyError", "raise StopIteration(3)",
    "raise SystemExit", "sys.exit(0)", "sys.exit(3)", "sys.exit('bye')", "sys.exit(None)", "raise MemoryError",
    "return (lambda f: f(f))(lambda f: f(f))", "raise GeneratorExit", "raise BaseException('x')",
    "raise UserError('this is not defined here.')", "raise OSError(28, 'No space left on device')",
    "raise BrokenPipeError", "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})",
    "raise type('Numb', (Exception,), {'__str__': lambda s: 3})", "raise ValueError('\\ud800')", "raise ValueError",
    "raise AssertionError", "raise NotImplementedError", "raise ImportError('x')", "import nosuchmodule",
    "raise LookupError('x')", "raise torch.OutOfMemoryError('x')", "raise Exception(object())",
    "raise TypeError('x', 1)",
    "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])",
    "raise RuntimeError('{}%s{0!r}')", "raise FileNotFoundError('gone.txt')", "raise PermissionError(13, 'no', 'f')",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')", "raise EOFError", "1 / 0", "assert False",
    "raise Warning('x')", "raise DeprecationWarning('old')", "raise TimeoutError", "raise KeyboardInterrupt('x')",
    "exit(0)", "quit()", "sys.exit(False)", "sys.exit([0])",
)  # fmt: skip
"""What any method may raise."""

TAKES_NO_OTHER = {
    *((kind, method) for kind in ("algorithm", "sharing", "generator", "partition",
    "data") for method in KINDS[kind].used),
    ("shares", "share"), ("model", "configure_optimizers"), ("model", "forward"), ("network", "forward"),
}  # fmt: skip
"""Kinds and methods of which none of ``RESULTS`` is right."""

SHAPES = (
    "del {owner}.{method}", "{owner}.{method} = None", "{owner}.{method} = 3", "{owner}.{method} = 'text'",
    "{owner}.{method} = lambda self: None", "{owner}.{method} = lambda *a, **k: None",
    "{owner}.{method} = staticmethod(len)",
    "{owner}.{method} = property(lambda self: 1 / 0)", "{owner}.{method} = print",
    "{owner}.{method} = property(lambda self: sys.exit(0))", "{owner}.{method} = type('C', (), {{}})",
    "async def f(*a, **k): return None\n{owner}.{method} = f", "def f(*a, **k): yield None\n{owner}.{method} = f",
)  # fmt: skip
"""What may stand in a method's place."""


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number."""
    rng = random.Random(f"own {seed} {number}")
    way = rng.choices(("result", "raised", "shape", "deep", "module", "name"), (26, 26, 8, 26, 8, 8))[0]
    if way == "name":
        return _named(rng, scripts)
    if way == "module":
        return _module(rng, scripts)
    kind = rng.choice([k for k, right in KINDS.items() if right.deep or way != "deep"])
    right = KINDS[kind]
    method = rng.choice([*right.deep] if way == "deep" else [*right.used, *right.unused])
    if way == "shape" and not method:
        way = "raised"
    if way == "shape":
        done = rng.choice(SHAPES).format(owner="Mine", method=method)
        return _case(rng, scripts, right, f"{kind}: {done}", HEAD + right.source + "\n" + done + "\n", False)
    seldom = rng.random() < 0.25 and kind == "algorithm" and method == "client"
    if way == "raised":
        done = rng.choice(RAISED)
    else:
        done = f"return {rng.choice(right.deep[method] if way == 'deep' else RESULTS)}"
    source = HEAD + right.source + _wrapped(method, done, seldom)
    what = f"{kind}.{method or 'call'}: {done}{' in round 2' * seldom}"
    must = way == "raised" and (method in right.used or method.startswith("check"))
    must = must or (way == "result" and (kind, method) in TAKES_NO_OTHER and "right()" not in done)
    return _case(rng, scripts, right, what, source, must)


def _wrapped(method: str, done: str, seldom: bool) -> str:
    """Code that puts the wrong thing around a method; "": around the part itself, a function."""
    owner = f"Mine.{method}" if method else "Mine"
    when = "    if a[-2] != 2: return right()\n" if seldom else ""
    uses = re.search(r"\b(r|dealt)\b", done)
    before = "    r = right()\n    dealt = a[1] if len(a) > 1 else None\n" if uses else ""
    keeps = "import functools\n" if not method else ""
    decorate = "@functools.wraps(_right)\n" if not method else ""
    return (
        f"\n{keeps}_right = {owner}\n{decorate}def _wrong(*a, **k):\n    right = lambda: _right(*a, **k)\n"
        f"{when}{before}    {done}\n{owner} = _wrong\n"
    )


def _case(rng: random.Random, scripts: Mapping[str, Script], right: Right, what: str, source: str, must: bool) -> Case:
    """A run with it, or the promises of a method, or a dry run; must: it cannot end well."""
    fields = {**TINY, **right.with_it, right.option: "part.py:Mine"}
    argv = [t for name, value in fields.items() for t in (f"--{name}", value)]
    draw = rng.random()

    def write(here: Path) -> None:
        (here / "part.py").write_text(source)

    def judge(here: Path, ended: Ended) -> list[Fault]:
        if "--dry-run" in argv:  # which need not call it
            return []
        if named and right.option == "tracking.tracker" and "raise " in what and "Mine" not in ended.out + ended.err:
            return [Fault("silent", "a tracker's error is not told", last(ended.out))]
        return [Fault("silent", "taken", last(ended.out))] if must else cases.whole(here, ended)

    own_words = "UserError" in what or "nan" in what  # what diverges is told as that
    named = "" if own_words else "part|Mine|mine|own"
    if right.option == "algorithm" and draw < 0.15:
        return Case(f"check_algorithm: {what}", cases.api(_check), write, named="")
    if draw > 0.93:
        argv.append("--dry-run")
        return Case(f"dry run: {what}", cases.line(scripts["run"], *argv), write, judge, longest=LONGEST, named=named)
    return Case(f"run: {what}", cases.line(scripts["run"], *argv), write, judge, longest=LONGEST, named=named)


def _check() -> object:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("part", "part.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # it never came to us
        raise fc.UserError(f"the test's own import failed: {type(error).__name__}") from None
    try:
        return fc.check_algorithm(module.Mine())
    except (AssertionError, TypeError) as error:  # its way to say that a promise is broken
        if isinstance(error, TypeError) and "Mine()" not in str(error):
            raise
        raise fc.UserError(f"check_algorithm says: {shown(str(error), 300)}") from None


SOURCES = (
    "", "\ufeffclass Mine: pass\n", "class Mine(:\n", "import sys; sys.exit(0)\n", "raise ValueError('x')\n",
    "raise SystemExit\n", "1 / 0\n", "Mine = 3\n", "Mine = None\n", "Mine = 'text'\n", "Mine = dict\n", "import Mine\n",
    "import sys as Mine\n", "Mine = lambda: None\n", "Mine = type\n", "class Mine: pass\n", "Mine = print\n",
    "class Mine:\n    def __init__(self, *a, **k): sys.exit(0)\n", "import part\nclass Mine: pass\n",
    "from part import Mine\n",
    "class M(type):\n    def __call__(c, *a, **k): raise ValueError('x')\nclass Mine(metaclass=M): pass\n",
    "class M(type):\n    def __getattribute__(c, n): raise ValueError('x')\nclass Mine(metaclass=M): pass\n",
    "def __getattr__(name): raise ValueError('x')\n", "def __getattr__(name): return 3\n", "x = '\ud800'\n",
    "def Mine(x, /, y, *, z): pass\n", "def Mine(*a, **k): return None\n", "class Mine:\n    __slots__ = 3\n",
    "from typing import *\nclass Mine:\n    def __init__(self, a: Annotated[float, '[1, 0)'] = 0.5): pass\n",
    "from typing import *\nclass Mine:\n    def __init__(self, a: Annotated[float, object()] = 0.5): pass\n",
    "from typing import *\nclass Mine:\n    def __init__(self, a: Annotated[float, '(nonsense'] = 0.5): pass\n",
    "from typing import *\nclass Mine:\n    def __init__(self, a: Annotated[float, '[0, 1]'] = 7.0): pass\n",
    "class Mine:\n    def __init__(self, a: int = 'x'): pass\n",
    "class Mine:\n    def __init__(self, a: 'no type' = 1): pass\n",
    "class Mine:\n    def __init__(self, a: 1 / 1 = 1): pass\n",
    "class Mine:\n    def __init__(self, a=object()): pass\n",
    "class Mine:\n    def __init__(self, name: str = 'x', seed: int = 3): pass\n", "class Mine(Unknown): pass\n",
    "class Mine:\n    def __init__(self, a: list[dict[str, int]] = []): pass\n",
    "class Mine:\n    def __init__(self, é: int = 1): pass\n",
    "class Mine:\n    __doc__ = 3\n", "class Mine:\n    __signature__ = 3\n",
    "class Mine:\n    def __new__(c, *a, **k): return None\n",
    "class Mine:\n    def __repr__(s): 1 / 0\n    def __init__(self, a: int = 1): self.start = 3\n",
    "import torch\nclass Mine(torch.nn.Module):\n    def __init__(self): pass\n",
    "while True: pass\n" if 0 else "pass\n",
    "from __future__ import annotations\nclass Mine:\n    def __init__(self, a: Nope = 1): pass\n",
    "import os; os.abort\n",
    "class Mine:\n    def __init__(self, a: float = float('nan')): pass\n", "(" * 500 + "\n",
    "class Mine:\n\tx = 1\n        y = 2\n",
    "class Mine:\n    def __init__(self, a: float = 1e400, b: int = 10**400): pass\n", "from . import x\n",
    "from .. import x\n",
    "import grp2, numpy.nosuch\nclass Mine: pass\n", "import helper\nclass Mine: pass\n", "x = 1\n" * 200_000,
)  # fmt: skip
"""Files that hold no part."""

BYTES = (b"\0", b"class Mine: pass\n\0", b"\xff\xfe", "class Mine: pass".encode("utf-16"),
b"# coding: nonsense\nclass Mine: pass\n",
         b"# coding: latin-1\nx = '\xe9'\n", b"x = '\xe9'\n", b"\x1b[31m", b"MZ" * 5000)  # fmt: skip


def _module(rng: random.Random, scripts: Mapping[str, Script]) -> Case:
    """A file that is no module, or one that holds something else."""
    right = KINDS[rng.choice(list(KINDS))]
    content = rng.choice([*SOURCES, *BYTES])
    fields = {**TINY, **right.with_it, right.option: "part.py:Mine"}
    argv = [t for name, value in fields.items() for t in (f"--{name}", value)]
    way = rng.choice((*["run"] * 5, "--help", "--dry-run", "--mine.a=2"))
    argv += [way] * (way != "run")

    def write(here: Path) -> None:
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        (here / "part.py").write_bytes(raw)
        (here / "helper.py").write_text("import part\n1 / 0\n")

    def judge(here: Path, ended: Ended) -> list[Fault]:
        return [] if way in ("--help", "--dry-run") else cases.whole(here, ended)

    what = f"{right.option} from {shown(repr(content), 90)} {way}"
    return Case(what, cases.line(scripts["run"], *argv), write, judge, longest=300)


NAMES = (
    "builtins:dict", "builtins:exit", "builtins:print", "builtins:eval", "builtins:object", "builtins:type",
    "os:system",
    "os:environ", "sys:exit", "sys:modules", "math:pi", "json:dumps", "json:nope", "nope:Mine", "part.py",
    "part.py:", ":Mine", ":", "part.py:Mine:Mine", "part.py:3", "part.py:Mine.x", "part.py:Mine.client",
    "part.py:mine", "part.py:Mi ne",
    "part.py:Min\x1b[31m", "nofile.py:Mine", "folder.py:Mine", "loop.py:Mine", "fifo.py:Mine", "/dev/zero:X",
    "/dev/stdin:X", "zero.py:X", "dangling.py:Mine", "../outside/notes.txt:X", "part:Mine", "./part.py:Mine",
    "part.PY:Mine",
    "fedcommons:run", "fedcommons.algorithms.fedavg:FedAvg", "fedcommons.config.cli:main", "torch:Tensor",
    "torch.nn:Linear",
    "collections:OrderedDict", "antigravity:x", "this:d", "__main__:Mine", "part.py:__init__", "part.py:__name__",
    "a.b.c:D",
    "part.py:" + "M" * 5000, "x" * 5000 + ".py:M", "~nosuchuser/part.py:M", "part.py::Mine", "http://x/y.py:M",
    "part.py:Mine,part.py:Mine",
    "signal:raise_signal", "subprocess:run", "os.path:join", "pickle:loads", "typing:Any", "enum:Enum", "abc:ABC",
    "unittest.mock:Mock",
    "unittest.mock:MagicMock", "types:SimpleNamespace", "builtins:None", "builtins:True", "builtins:int",
    "builtins:__import__",
    "sparse.py:Mine", "\udcff.py:X", "part.py:Mine\n", " part.py:Mine", "part.py:Mine ", "wrong/part.py:X", "grp.py:X",
)  # fmt: skip
"""Names of parts that nobody should take, or that are odd."""


def _named(rng: random.Random, scripts: Mapping[str, Script]) -> Case:
    kind = rng.choice(list(KINDS))
    right, name = KINDS[kind], rng.choice(NAMES)
    script = rng.choice(("run", "run", "run", "table1", "tune"))
    fields = {**TINY, **right.with_it, right.option: name}
    argv = [t for field, value in fields.items() for t in (f"--{field}", value)]
    if script != "run":
        argv = ["--preset", "smoke", "--dry-run", f"--{right.option}", name, "--out", "out", "--data.limit", "40"]
        argv += ["--space", "alpha=0.1,1"] if script == "tune" else []

    def write(here: Path) -> None:
        (here / "part.py").write_text(HEAD + right.source)
        (here / "folder.py").mkdir()
        os.symlink("loop.py", here / "loop.py")
        os.symlink("nowhere", here / "dangling.py")
        os.symlink("/dev/zero", here / "zero.py")
        os.mkfifo(here / "fifo.py")
        with open(here / "sparse.py", "wb") as file:
            file.truncate(20 * 2**30)
        (here / "grp.py").unlink()  # it is named here, and may be run

    def judge(here: Path, ended: Ended) -> list[Fault]:
        if ended.out.rstrip().endswith("would start Ray") or "--dry-run" in argv:
            return []
        return cases.whole(here, ended)

    return Case(
        f"{script} {right.option} {shown(repr(name))}", cases.line(scripts[script], *argv), write, judge, longest=300
    )
