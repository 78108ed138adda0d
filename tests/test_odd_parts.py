"""Names, files and words that are odd where a part of one's own is expected: one sentence each, fit for a screen."""

from pathlib import Path

import pytest

from fedcommons import Experiment, UserError, experiment, run
from fedcommons.errors import leaving_errors, sentence

QUICK = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "measure.every": 0, "wandb": "off"}


def asked(field: str, name: str) -> Experiment:
    return experiment("smoke", values={**QUICK, field: name})


@pytest.mark.parametrize("name", ["builtins:dict", "builtins:exit", "sys:modules", "sys:exit", "builtins:None"])
@pytest.mark.parametrize("field", ["algorithm", "sharing.setting", "partition.name", "straggler.rule", "data.name"])
def test_a_name_in_a_module_that_is_no_file_is_refused(field: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run(asked(field, name), tmp_path / "run", say=lambda text: None)
    assert len(str(refused.value)) <= 300
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("annotation", ["1 / 1", "'no type'", "[int]", "print", "lambda: 1"])
def test_an_annotation_that_is_no_type_is_told(
    annotation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(f"def mine(n_clients, labels, a: {annotation} = 1):\n    return [[0], [1]]\n")
    with pytest.raises(UserError, match=r"odd\.py.*the type of a must be a type|odd\.py.*SyntaxError"):
        run(asked("partition.name", "odd.py:mine"), tmp_path / "run", say=lambda text: None)


def test_a_file_without_an_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open("endless.py", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"more than 16,777,216 bytes"):
        asked("algorithm", "endless.py:Mine")


def test_what_an_error_says_is_fit_for_a_screen_and_for_a_file(tmp_path: Path) -> None:
    error = ValueError("\x1b[31mred\n\ud800 \u202etxt")
    assert sentence(error) == "ValueError: \\x1b[31mred \\ud800 \\u202etxt"
    with pytest.raises(ValueError, match="red"), leaving_errors(tmp_path):
        raise error
    assert (tmp_path / "error.txt").read_text().startswith("ValueError: \\x1b[31mred \\ud800 \\u202etxt\n\nTraceback")
