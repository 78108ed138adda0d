"""Mutants (small changes) of the package's source for mutation.py: random samples, changed and instrumented sources.

A mutant changes one expression or statement of one file: a number, a comparison, a boolean, an arithmetic operator, a
returned value, a deleted statement or two swapped arguments (operators of cosmic-ray). Strings, annotations,
decorators, error messages and logging are not changed.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "algorithms", "core", "data", "federation", "privacy", "sharing", "generators", "convergence", "runs", "tune",
    "audits", "config", "cli", "reports", "storage", "runtime", "tracking", "testing",
)  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def mutants(source: str) -> Iterator[dict[str, Any]]:
    """Yield all mutants of a module: kind, place (line, column, end) and new text."""
    tree = ast.parse(source)
    skipped = set[int]()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.AnnAssign() | ast.arg():
                parts = [node.annotation]
            case ast.FunctionDef():
                parts = [node.returns, *node.decorator_list]
            case ast.ClassDef():
                parts = [*node.decorator_list]
            case ast.Raise():
                parts = [node.exc, node.cause]  # the statement itself may be deleted
            case ast.JoinedStr():
                parts = [node]
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                parts = [node]
            case ast.Call() if ast.unparse(node.func).startswith(("logging", "warnings", "TypeVar")):
                parts = [node]
        for part in filter(None, parts):
            skipped |= {id(inner) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt) and id(node) not in skipped:
            for kind, new in _changes(node):
                yield {
                    "kind": kind, "line": node.lineno, "column": node.col_offset, "end_line": node.end_lineno,
                    "end_column": node.end_col_offset, "new": new,
                }  # fmt: skip


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "boolean", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "number", repr(value + 1)
            if value:
                yield "number", f"({-value!r})"
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp():
            yield "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "boolean" if isinstance(node.op, ast.Not) else "arithmetic", f"({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", "return None"
        case ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Expr(value=ast.Call()):
            yield "deleted statement", "pass"
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(a, ast.Starred) for a in node.args):
            if ast.unparse(first) != ast.unparse(second):
                yield "swapped arguments", _with(node, args=[second, first, *rest])


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
        for x in ast.walk(node)
    )


def _with(node: ast.expr, **parts: object) -> str:
    """Return the source text of an expression whose AST fields ``parts`` are replaced."""
    old = {name: getattr(node, name) for name in parts}
    vars(node).update(parts)
    text = f"({ast.unparse(node)})"
    vars(node).update(old)
    return text


def _place(source: bytes, mutant: Mapping[str, Any]) -> tuple[int, int]:
    """Return the byte offsets of the start and the end of the text that the mutant replaces."""
    lines = source.splitlines(keepends=True)
    before = sum(map(len, lines[: mutant["line"] - 1])), sum(map(len, lines[: mutant["end_line"] - 1]))
    return before[0] + mutant["column"], before[1] + mutant["end_column"]


def mutated(source: str, mutant: Mapping[str, Any]) -> str:
    """Return the source text with the change of this mutant."""
    whole = source.encode()
    start, stop = _place(whole, mutant)
    return (whole[:start] + mutant["new"].encode() + whole[stop:]).decode()


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def sample(root: Path, seed: int, each: int) -> list[dict[str, Any]]:
    """Draw ``each`` mutants of each package, uniformly over all mutants of the package."""
    result: list[dict[str, Any]] = []
    for package in PACKAGES:
        sources = {
            str(path.relative_to(root)): path.read_text("utf-8")
            for path in sorted((root / "platform" / "fedcommons" / package).rglob("*.py"))
        }
        all_of_them = [{"package": package, "file": file, **m} for file, text in sources.items() for m in mutants(text)]
        random.Random(f"{seed} {package}").shuffle(all_of_them)
        good = (m for m in all_of_them if _compiles(mutated(sources[m["file"]], m)))
        for _, mutant in zip(range(each), good, strict=False):
            whole = sources[mutant["file"]].encode()
            start, stop = _place(whole, mutant)
            result.append({**mutant, "of": len(all_of_them), "old": whole[start:stop].decode()[:200]})
    return [{"number": number, **mutant} for number, mutant in enumerate(result)]


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """Return the first statement of a function after the docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1] if is_docstring and len(function.body) > 1 else first


def probed(source: str, mutants_here: Sequence[Mapping[str, Any]]) -> str:
    """Return the source with a probe (a call that records the running test) before the statement of each mutant.

    A mutant outside all functions, or in a default value, gets a probe in each function of the module, as importing the
    module does not use the mutant.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    probes = defaultdict[int, list[tuple[int, int]]](list)

    def may_stand_before(statement: ast.stmt) -> bool:
        before = lines[statement.lineno - 1][: statement.col_offset]
        return not before.strip() and not lines[statement.lineno - 1].lstrip().startswith(
            ("elif", "except", "else", "case")
        )

    def put(statement: ast.stmt, number: int) -> None:
        decorators = getattr(statement, "decorator_list", [])
        probes[(decorators or [statement])[0].lineno].append((statement.col_offset, number))

    for mutant in mutants_here:
        start, stop = (mutant["line"], mutant["column"]), (mutant["end_line"], mutant["end_column"])
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt)
            and (node.lineno, node.col_offset) <= start
            and (node.end_lineno or 0, node.end_col_offset or 0) >= stop
        ]
        inner = next((f for f in reversed(functions) if f in around and any(s in around for s in f.body)), None)
        inside = sorted((s for s in around if inner and s.lineno > inner.lineno), key=lambda s: -s.lineno)
        before = next(filter(may_stand_before, inside), None)
        for statement in [before] if before else [_body(f) for f in functions if inner in (None, f)]:
            if may_stand_before(statement):
                put(statement, mutant["number"])
    text = "".join(
        "".join(f"{' ' * column}__import__('mutation_probe').hit({n})\n" for column, n in probes[at]) + line
        for at, line in enumerate(lines, 1)
    )
    compile(text, "probed", "exec")
    return text
