"""The pages that a newcomer reads first: their commands are ones, and the claims can be counted."""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli
from fedcommons.errors import UserError

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/howto.md", "docs/claims.md", "docs/results/README.md")
CLAIMS = (ROOT / "docs" / "claims.md").read_text()
VERDICTS = ("holds", "on all seeds", "in part", "not here", "not tried")


def rows(text: str, *head: str) -> Iterator[list[str]]:
    """The lines of all tables with this head, cell by cell."""
    for table in re.findall(rf"^\| {re.escape(' | '.join(head))} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == len(head), line
            yield cells


def claims() -> Iterator[tuple[str, list[str]]]:
    """Each claim with the paper under whose heading it stands."""
    for section in CLAIMS.split("\n## ")[1:]:
        paper = section.partition("\n")[0]
        for row in rows(section, "claim", "in the paper", "verdict", "effect here", "data", "page", "command"):
            yield paper, row


@pytest.mark.parametrize(("paper", "row"), [pytest.param(*claim, id=claim[1][0][:60]) for claim in claims()])
def test_a_claim_has_a_verdict_an_effect_over_seeds_a_page_and_a_command(paper: str, row: list[str]) -> None:
    _, _, verdict, effect, _, page, command = row
    assert verdict in VERDICTS
    assert (effect == "-") == (verdict == "not tried")
    assert not (verdict in VERDICTS[:2] and re.search(r"\b[12] seeds?$", effect)), (
        "fewer than three seeds are no result"
    )
    intervals = re.findall(r"\[(-?[\d.,]+), (-?[\d.,]+)\]", effect)
    contains_zero = [float(low.replace(",", "")) <= 0 <= float(high.replace(",", "")) for low, high in intervals]
    assert not (verdict == "holds" and any(contains_zero))
    assert not (verdict == "on all seeds" and contains_zero and not any(contains_zero))
    if verdict != "not tried":
        assert re.search(r"(\b\d+ seeds?|[\d,]+ (repetitions|draws|problems|combinations)|nothing is random)$", effect)
    link = re.fullmatch(r"\[page\]\((.+)\)", page)
    assert page == "-" or (link and (ROOT / "docs" / link[1]).exists())
    assert page != "-" or verdict == "not tried" or "--from" in command


@pytest.mark.parametrize("page", sorted({row[5] for _, row in claims() if "results/" in row[5]}))
def test_a_page_of_claims_has_its_numbers_in_a_csv(page: str) -> None:
    """In one of its name, or in one that it links."""
    path = ROOT / "docs" / page.removeprefix("[page](").removesuffix(")")
    linked = re.findall(r"\]\((\w+\.csv)\)", path.read_text(encoding="utf-8"))
    assert [*path.parent.glob(f"{path.stem}*.csv"), *(name for name in linked if (path.parent / name).is_file())]


def test_the_counts_are_those_of_the_tables() -> None:
    found = [(paper, row[4], row[2]) for paper, row in claims()]
    assert len(found) > 100
    counts = list(rows(CLAIMS, "paper", *VERDICTS))
    for name, *numbers in counts:
        paper, _, data = re.sub(r"\[(.*)\]\(.*\)", r"\1", name).partition(", on ")
        is_on = re.compile(
            rf"(?<![-\w]){re.escape(data)}(?![-\w])" if data else ""
        )  # neither CIFAR-100 nor Fashion-MNIST
        of = Counter(verdict for p, d, verdict in found if p == paper and is_on.search(d))
        assert [of[verdict] for verdict in VERDICTS] == list(map(int, numbers)), name
    assert {paper for paper, _, _ in found} == {re.sub(r"\[(.*)\]\(.*\)", r"\1", row[0]) for row in counts} - {
        name for name, *_ in counts if ", on " in name
    }


def commands() -> list[tuple[str, str]]:
    """Each command of a sweep, in a code span or a line of a block, and its page."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()]
        for command in (*spans, *lines):
            if match := re.match(r"(?:\$ )?(python sweeps/[a-z]\w*\.py.*?)(?:\s+#.*)?$", command):
                found.setdefault(match[1], page)
    return list(found.items())


@pytest.mark.parametrize(("command", "page"), [pytest.param(*one, id=one[0][7:80]) for one in commands()])
def test_a_command_is_one_that_its_sweep_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, page: str
) -> None:
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    examples = ("own_method", "own_tracker", "own_measure")
    (tmp_path / "my_lab.py").write_text("\n".join((ROOT / f"examples/{name}.py").read_text() for name in examples))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(tmp_path)
    python, script, *words = shlex.split(command)
    assert python == "python"
    if "--replay" in words:  # no other option goes with it
        assert cli.named(words) <= {"replay", "round", "client", "pdb"}
    elif "fedavgg" in words:  # the page shows how it is refused
        with pytest.raises(UserError, match="did you mean 'fedavg'"):
            sweeps(Path(script).stem).arguments(words)
    else:
        sweeps(Path(script).stem).arguments(words)


def test_every_result_page_is_in_the_index() -> None:
    pages = {path.name for path in (ROOT / "docs" / "results").glob("*.md")} - {"README.md", "pages.md"}
    named = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/results/README.md").read_text()))
    assert named == pages
