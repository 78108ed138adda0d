"""``fedcommons.testing`` as others use it: for any object with the four functions, and for the method of examples/."""

import ast
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedcommons import testing
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.errors import UserError
from fedcommons.federation.rounds import drawn
from fedcommons.testing import check_algorithm, digits
from fedcommons.testing.absent import LATE

ROOT = Path(__file__).parent.parent
FEDAVG = FedAvg()


def _plain(**other: Any) -> Any:
    """FedAvg as an object that is no dataclass."""
    functions = {name: getattr(FEDAVG, name) for name in ("start", "down", "client", "merge")}
    return SimpleNamespace(**functions | other)


def test_an_algorithm_need_not_be_a_dataclass() -> None:
    check_algorithm(
        _plain(),
        only=[
            "two_rounds_keep_names_shapes_and_types",
            "same_seed_same_bits_other_seed_other_bits",
            "late_clients_by_any_rule_break_no_promise",
            "its_work_can_be_priced",
        ],
    )


def test_an_algorithm_that_raises_is_told_what() -> None:
    def merge(*args: object) -> None:
        raise ZeroDivisionError("of no avail")

    with pytest.raises(
        AssertionError, match=r"- the_loss_falls: it failed: .*merge, round 1: ZeroDivisionError: of no avail"
    ) as caught:
        check_algorithm(_plain(merge=merge))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("only", [("the_loss_fals",), "the_loss_fals"])
def test_a_check_that_does_not_exist_is_told_with_the_nearest_name(only: str | tuple[str]) -> None:
    with pytest.raises(UserError, match=r"^unknown check 'the_loss_fals'; did you mean 'the_loss_falls'\?"):
        check_algorithm(_plain(), only=only)


def test_no_check_rests_on_an_assert_statement_and_no_import_on_ray() -> None:
    """pytest rewrites asserts in tests only, and ``python -O`` leaves them out; a check needs Ray if it is asked to."""
    wrong = []
    for path in sorted(Path(testing.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        wrong += [f"{path.name}:{node.lineno} asserts" for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        at_import = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        wrong += [f"{path.name}: {line}" for line in at_import if re.search(r"\bray\b|ray_actors|cluster", line)]
    assert not wrong


def test_late_clients_are_those_of_another_rule_in_each_round() -> None:
    """With the numbers of the check, each rule has its round and makes somebody late, wholly or in part."""
    federation = digits()
    plan = replace(federation.plan(10, participation=0.8, seed=8, late=LATE), take_partial=True)
    late = [drawn(FEDAVG, plan, {}, number)[1] for number in range(1, 11)]
    for number, (rule, found) in enumerate(zip(2 * LATE.rules, late, strict=True), 1):
        joined = drawn(FEDAVG, replace(plan, late=None), {}, number)[0]
        assert found == rule(joined, plan.facts, number, 8)
    assert all(late[:5])
    assert [any(found.values()) for found in late[:5]] == [False, False, True, False, True]
    assert plan.facts.arrival is not None
    assert len(set(plan.facts.arrival)) == 5  # no two clients are alike


def test_the_example_of_a_method_has_the_property_that_contributing_names() -> None:
    kind = runpy.run_path(str(ROOT / "examples" / "own_method.py"), run_name="own_method")["FedAvgM"]
    federation = digits()
    without, fedavg, with_momentum = (
        federation.play(algorithm, federation.plan(3))[-1][0].model.buffer
        for algorithm in (kind(beta=0.0), FEDAVG, kind(beta=0.5))
    )
    assert torch.allclose(without, fedavg, rtol=0, atol=1e-6)
    assert not torch.allclose(with_momentum, fedavg, rtol=0, atol=1e-3)
