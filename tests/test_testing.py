"""``fedcommons.testing`` as others use it: for any object with the four functions, and for the method of examples/."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedcommons import testing
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.testing import check_algorithm, digits

ROOT = Path(__file__).parent.parent
FEDAVG = FedAvg()


def _plain(**other: Any) -> Any:
    """FedAvg as an object that is no dataclass."""
    functions = {name: getattr(FEDAVG, name) for name in ("start", "down", "client", "merge")}
    return SimpleNamespace(**functions | other)


def test_an_algorithm_need_not_be_a_dataclass() -> None:
    check_algorithm(_plain())


def test_an_algorithm_that_raises_is_told_what() -> None:
    def merge(*args: object) -> None:
        raise ZeroDivisionError("of no avail")

    with pytest.raises(AssertionError, match=r"- the_loss_falls: it raised ZeroDivisionError: of no avail") as caught:
        check_algorithm(_plain(merge=merge))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("path", sorted(Path(testing.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_check_rests_on_an_assert_statement_and_no_import_on_ray(path: Path) -> None:
    """pytest rewrites asserts in tests only, and ``python -O`` leaves them out; a check needs Ray if it is asked to."""
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    at_import = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in at_import if re.search(r"\bray\b|ray_actors|cluster", line)]


def test_the_example_of_a_method_has_the_property_that_contributing_names() -> None:
    kind = runpy.run_path(str(ROOT / "examples" / "own_method.py"), run_name="own_method")["FedAvgM"]
    federation = digits()
    without, fedavg, with_momentum = (
        federation.play(algorithm, federation.plan(3))[-1][0].model.buffer
        for algorithm in (kind(beta=0.0), FEDAVG, kind(beta=0.5))
    )
    assert torch.allclose(without, fedavg, rtol=0, atol=1e-6)
    assert not torch.allclose(with_momentum, fedavg, rtol=0, atol=1e-3)
