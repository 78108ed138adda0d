"""Words that people bring from papers and other programs: each leads to the right option, and none to a wrong one."""

import re

import pytest

from fedcommons.config import cli, hints, parts, presets
from fedcommons.config.flat import fields_for, own_fields
from fedcommons.config.parts import KINDS
from fedcommons.errors import UserError, nearest

MEANT = {
    "--mu=0.1": "--fedprox.mu with --algorithm fedprox or --moon.mu with --algorithm moon.",
    "--C=0.1": "use --federation.participation.",
    "--temperature=1": "--moon.temperature with --algorithm moon or --dense.temperature with --algorithm dense or",
    "--gpus=1": "CUDA_VISIBLE_DEVICES",
    "--epsilon=10": "dp.target_epsilon",
    "--momentum=0.9": "did you mean '--client.momentum'?",
}


@pytest.mark.parametrize("word", MEANT)
def test_a_word_from_elsewhere_names_the_right_option(word: str) -> None:
    with pytest.raises(UserError, match=re.escape(MEANT[word])):
        cli.parse(cli.parser("a test", [word], presets.preset("small", "digits")), [word])


@pytest.mark.parametrize("kind", hints.ELSEWHERE)
def test_a_name_that_is_known_elsewhere_gets_no_wrong_guess(kind: str) -> None:
    names = [name for name in hints.ELSEWHERE[kind].split() if name not in KINDS[kind].known]
    assert names
    for name in names:
        with pytest.raises(UserError, match=f"not in the package.*my_{kind}.py:Name") as error:
            parts.find(kind, name)
        assert "did you mean" not in str(error.value)


NEAREST = {
    "fashion-mnist": "; did you mean 'fmnist'?",
    "dirichlet_p": "; did you mean 'dirichlet_plain'?",
    "dirichlet": "; did you mean 'dirichlet_classes' or 'dirichlet_clients' or 'dirichlet_clients_all' or "
    "'dirichlet_niid' or 'dirichlet_plain'?",
    "zzz": ".",
}


@pytest.mark.parametrize("name", NEAREST)
def test_capitals_do_not_count_and_up_to_five_names_that_begin_so_are_listed(name: str) -> None:
    assert nearest(name, [one for kind in KINDS.values() for one in kind.known]) == NEAREST[name]


def test_a_dotted_name_is_compared_by_its_last_component_first() -> None:
    assert (
        nearest("--alpha", ["--data.alphabet", "--partition.alpha", "--alps"]) == "; did you mean '--partition.alpha'?"
    )
    assert nearest("ab", [f"abc{i}" for i in range(6)]).count("'") == 2  # six names begin so: one only


def test_no_hint_names_an_option_that_is_not_there() -> None:
    every = fields_for({kind: list(k.known) for kind, k in KINDS.items() if k.known}).keys() | own_fields().keys()
    there = {*every, *cli.SHORT_NAMES, "out", "seeds", "log-file", "log-level", "num-actors"}
    for sentence in hints.SENTENCES.values():
        assert {one for one in re.findall(r"--([\w.-]+\w)", sentence)} <= there
    for field, words in hints.FIELDS.items():
        assert field in there or all(hints.sentence_for(word) for word in words.split()), field
