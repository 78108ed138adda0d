"""Components that were written for version 0.2: they run with the same results, and with a warning per old name."""

import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedcommons as fc
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.cli import main
from fedcommons.core.capabilities import Capabilities, capabilities_of
from fedcommons.deprecated import adopt_old_methods
from fedcommons.generators import requests
from fedcommons.sharing.synthetic import ShuffledSynthetic
from fedcommons.testing import check_stage

OLD = """
import torch

from fedcommons.sharing.needs import needs
import fedcommons as fc
from fedcommons.sharing.synthetic import ShuffledSynthetic
from fedcommons.testing import check_stage

class Method:
    takes_partial = True

    def start(self, model, facts, seed):
        return {"model": model}

    def down(self, state, round, client):
        return fc.Message({"model": state["model"]}, own={"client": torch.tensor(client)})

    def client(self, work, message, memory, data, round, seed):
        assert len(message.own) == 1
        x = message.common["model"]
        y, metrics, spent = work.local(x, data, seed)
        return fc.Reply({"delta": fc.sub(y, x)}, metrics=metrics, releases=[spent.of("delta")])

    def merge(self, executor, state, total, replies, round, seed):
        return {"model": fc.add(state["model"], total["delta"], 1 / len(replies))}

class Strategy:
    serves_pool = True

    def check_dealt(self, dealt):
        print("check_dealt:", len(dealt.own))

    def needs(self, dealt, recipe):
        return needs(0.2, dealt, recipe)

    def make(self, dealt, drawn):
        return fc.Contributions.of_made(dealt, [fc.Contribution(d.examples, d.receipt, seen=d.seen) for d in drawn])

    def release(self, dealt, contributed):
        return contributed, contributed.releases("images")

    def assign(self, dealt, released):
        assert len(released.of_each(5)) == len(released.seen) == 5
        return fc.Assigned(kept=dealt.own.rows, received=released.of_each(5), once=7)
"""


@pytest.mark.long
@pytest.mark.filterwarnings("always::DeprecationWarning")
def test_components_of_the_version_before_run_with_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.py").write_text(OLD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    few = {"rounds": 1, "generator.epochs": 1, "partition.n_clients": 5, "measure.every": 0, "data.limit": 80}
    values = {**few, "algorithm": "old.py:Method", "sharing": "old.py:Strategy"}
    with pytest.warns(DeprecationWarning, match="is now") as warnings:
        result = fc.run(fc.experiment("smoke", values=values), tmp_path / "run")
    assert "check_dealt: 5" in capsys.readouterr().out
    assert result.summary["bytes_once"] == 7
    old = ["takes_partial", "serves_pool", "own", "of", "needs", "check_dealt", "of_made", "seen", "of_each", "kept"]
    old.append("once")
    messages = " ".join(str(w.message) for w in warnings)
    assert [name for name in old if f".{name} is now " not in messages] == []


def test_old_names_are_accepted_as_attributes_and_keywords() -> None:
    v2: Any = fc
    with pytest.warns(DeprecationWarning, match=r"Release\.why is now reason"):
        release = v2.Release(0, ("x",), why="a")
    assert release == v2.Release(0, ("x",), reason="a")
    with pytest.warns(DeprecationWarning, match=r"Correction\.of is now values"):
        assert v2.Correction(lambda parameters: None, of=()).values == ()
    x = torch.zeros(2)
    with pytest.warns(DeprecationWarning, match=r"ClientData\.beside is now extra_columns"):
        assert v2.ClientData(x, x, beside=(x,)).beside[0] is x
    with pytest.raises(TypeError, match="whose"):
        v2.Message({}, whose={})


def test_old_attributes_are_capabilities() -> None:
    class Old(FedProx):
        trains_locally = False

    class New(Old):
        capabilities = Capabilities(distils=True)

    class Both(New):
        capabilities = Capabilities(distils=True)
        trains_twice = True

    class Strategy:
        serves_pool = True

        def needs(self) -> None:
            """Not a capability, but the old name of ``requests``."""

    for old, expected in (
        (Old, Capabilities(averages=True, takes_partial=True, trains_locally=False)),
        (Both, Capabilities(distils=True, trains_twice=True)),
        (Strategy, Capabilities(serves_pool=True)),
        (lambda: SimpleNamespace(needs={"decode": "decoder"}), Capabilities(needs={"decode": "decoder"})),
    ):
        with pytest.warns(DeprecationWarning, match=r"is now capabilities = Capabilities\("):
            assert capabilities_of(old()) == expected
    assert capabilities_of(New()) == capabilities_of(New) == Capabilities(distils=True)


def test_an_old_method_of_a_subclass_overrides_the_new_method_of_its_base_and_may_call_it() -> None:
    class Base:
        def requests(self) -> list[str]:
            return ["new"]

    class Old(Base):
        def needs(self) -> list[str]:
            return ["old", *super().needs()]  # pyright: ignore[reportAttributeAccessIssue]

    class New(Old):
        def requests(self) -> list[str]:
            return ["newer", *super().requests()]

    with pytest.warns(DeprecationWarning, match=r"Old\.needs is now requests"):
        adopt_old_methods("sharing", Old)
    adopt_old_methods("sharing", New)
    assert [c().requests() for c in (Base, Old, New)] == [["new"], ["old", "new"], ["newer", "old", "new"]]


def test_the_check_of_a_strategy_calls_its_old_methods() -> None:
    class Old(ShuffledSynthetic):
        def needs(self, client_data: Any, recipe: Any) -> Any:
            raise ArithmeticError("called")

    with pytest.warns(DeprecationWarning, match="requests"), pytest.raises(ArithmeticError, match="called"):
        check_stage(Old(0.5))


def test_names_of_the_version_before_work_with_a_warning() -> None:
    v2: Any = fc
    for old, new in (("Dealt", fc.ClientDatasets), ("Need", fc.GenerationRequest)):
        with pytest.warns(DeprecationWarning, match=new.__name__):
            assert getattr(v2, old) is new
        assert old not in fc.__all__
    with pytest.warns(DeprecationWarning, match=r"TellsWork is now fedcommons\.Algorithm"):
        empty = v2.TellsWork
    both = type("Both", (fc.Algorithm, empty), {})  # a class may name both
    assert {fc.Algorithm, empty} <= {*both.__mro__}
    sys.modules.pop("fedcommons.sharing.needs", None)
    with pytest.warns(DeprecationWarning, match=r"generators\.requests"):
        assert import_module("fedcommons.sharing.needs").needs is requests.requests_of_clients


def test_the_old_name_of_a_command_works_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedcommons"])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main.command(["storage_gc", str(tmp_path)])
    signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert "fedcommons gc" in printed.err
    assert "0 files" in printed.out
