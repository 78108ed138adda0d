"""Results that a sweep keeps beside the facts they were made from."""

import re
from pathlib import Path

import pytest

from fedcommons.errors import UserError
from fedcommons.sweeping import kept

FACTS = {"seed": 3, "channels": (8, 16), "rate": 0.1}


def test_what_was_kept_is_read_again_if_all_facts_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert kept.read(file, FACTS, "audit") is None
    kept.write(file, FACTS, "audit", {"auc": 0.75})
    assert kept.read(file, FACTS, "audit") == {"auc": 0.75}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({**FACTS, "seed": 4}, "is of seed = 3, and now it is 4; name another --out."),
        ({**FACTS, "more": 1}, "is of more = its default, and now it is 1; name another --out."),
        ({"seed": 3, "rate": 0.1}, "is of channels = [8, 16], and now it is its default; name another --out."),
    ],
)
def test_other_facts_are_refused(facts: dict, said: str, tmp_path: Path) -> None:
    """Also where a fact was added or left out."""
    kept.write(tmp_path / "one.json", FACTS, "audit", {})
    with pytest.raises(UserError, match=re.escape(said)):
        kept.read(tmp_path / "one.json", facts, "audit")


@pytest.mark.parametrize("content", ["", "[]", '{"facts": {}}', '{"facts": 1, "audit": {}}', "[" * 9999, "NaN"])
def test_a_damaged_file_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(UserError, match=r"remove it or name another --out\.") as error:
        kept.read(tmp_path / "one.json", {}, "audit")
    assert "\n" not in str(error.value)
