"""Play pages: write their programs, run their commands in order, and compare or rewrite the output that they show.

python docs/played.py                          # every page of PAGES; exit code 1 if a page shows what does not come
python docs/played.py --write                  # put the output of today's code into the pages
python docs/played.py tutorials/tuning --write

A ```python block whose first line is `# NAME.py` is a file. A line of a ```bash block is a command, and a ```text block
directly below shows the command's output. A line `...` stands for lines that the page leaves out. A command succeeds,
except if the page shows a line that begins with `error:`. Commands of `make` are not played here: .ci/run runs them.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).resolve().parent
PAGES = (
    "start",
    "own_parts",
    *(f"tutorials/{name}" for name in ("own_data", "tuning", "privacy", "pandas", "synthetic_data")),
)
BLOCK = re.compile(r"^```bash\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<quote>.*?)^```\n)?", re.M | re.S)

Run = Callable[[str, Path], tuple[int, str]]
"""Runs a command in a folder and returns its exit code and its output."""


@dataclass(frozen=True)
class Command:
    """A command of a page. quote: the lines that the page shows as its output; None if it shows none."""

    line: str
    quote: tuple[str, ...] | None


def commands(text: str) -> list[Command]:
    """Return the commands of a page in order; the output below a block belongs to the block's last command."""
    result = list[Command]()
    for block in BLOCK.finditer(text):
        lines = block["commands"].splitlines()
        quote = None if block["quote"] is None else tuple(block["quote"].splitlines())
        result += [Command(line, None) for line in lines[:-1]] + [Command(lines[-1], quote)]
    return [command for command in result if not command.line.startswith("make ")]


def write_files(text: str, folder: Path) -> None:
    """Write the page's programs into the folder, beside links to sweeps/ and examples/ as in a clone."""
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, f"a python block of a played page begins with `# NAME.py`: {code[:80]}"
        (folder / name[1]).write_text(code, encoding="utf-8")
    for name in ("sweeps", "examples"):
        (folder / name).symlink_to(DOCS.parent / name)


def shell(line: str, folder: Path) -> tuple[int, str]:
    """Run a command as a user with an activated environment does; errors stand among the output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "COLUMNS": "120", "FEDCOMMONS_STATE": str(folder / "state")}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def word(line: str) -> str:
    """Return the first word of letters of a line; numbers may differ by machine."""
    return (re.findall(r"[^\W\d_]{3,}", line) or [""])[0]


def play(
    text: str, folder: Path, run: Run = shell, chosen: Callable[[str], object] = bool
) -> Iterator[tuple[Command, str, list[str]]]:
    """Run each chosen command of a page; yield the command, its output, and the facts of the page that do not hold."""
    write_files(text, folder)
    for command in (command for command in commands(text) if chosen(command.line)):
        code, output = run(command.line, folder)
        quote = command.quote or ()
        words = {word(line) for line in output.splitlines()}
        wrong = [f"no line begins as {line!r}" for line in quote if word(line) not in {"", *words}]
        if bool(code) != any(line.startswith("error: ") for line in quote):
            wrong.append(f"exit code {code}")
        yield command, output, wrong


def excerpt(quote: tuple[str, ...], output: str) -> list[str]:
    """Return as many first and last lines of the output as the page shows before and after its line `...`."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if "..." not in quote:
        return lines
    first, last = quote.index("..."), len(quote) - quote.index("...") - 1
    return [*lines[:first], "...", *lines[len(lines) - last :]]


def rewrite(text: str, outputs: dict[str, str]) -> str:
    """Return the page with these outputs, by command, in place of the old outputs."""

    def block(match: re.Match[str]) -> str:
        line = match["commands"].splitlines()[-1]
        if match["quote"] is None or line not in outputs:
            return match[0]
        new = excerpt(tuple(match["quote"].splitlines()), outputs[line])
        return f"```bash\n{match['commands']}```\n\n```text\n" + "\n".join(new) + "\n```\n"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="pages in docs/, without .md (default: all of PAGES)")
    parser.add_argument("--write", action="store_true", help="rewrite the output that the pages show")
    options = parser.parse_args()
    bad = 0
    for page in options.pages:
        path = DOCS / f"{page}.md"
        text, outputs = path.read_text(encoding="utf-8"), dict[str, str]()
        with TemporaryDirectory() as folder:
            for command, output, wrong in play(text, Path(folder)):
                has_failed = any(fact.startswith("exit") for fact in wrong)
                outputs |= {} if has_failed else {command.line: output}
                print(f"{page}: {command.line}: {'; '.join(wrong) or 'as shown'}", flush=True)
                if wrong:
                    print(output)
                bad += bool(wrong) and (has_failed or not options.write)
        if options.write:
            path.write_text(rewrite(text, outputs), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
