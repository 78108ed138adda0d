"""The public functions with what is easily mistaken for their arguments: taken as what is meant, or one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedcommons as fc
from fedcommons.tensors import flatten


def _runs() -> pd.DataFrame:
    rows = [{"run": f"r{seed}", "status": "finished", "seed": seed, "algorithm": "fedavg", "data.name": "digits",
             "rounds": 3, "last_accuracy": 0.5 + seed / 10, "MB": 1.0} for seed in (0, 1)]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "columns",
    ["last_accuracy", ["last_accuracy"], {"last_accuracy"}, iter(["last_accuracy"]), np.array(["last_accuracy"])],
    ids=lambda v: type(v).__name__,
)
def test_means_of_a_column_however_it_is_named(columns: Any) -> None:
    found = fc.means(_runs(), columns, say=pytest.fail)
    assert found["last_accuracy"].tolist() == [0.55]
    assert list(found) == ["seeds", "last_accuracy", "last_accuracy_sd"]


def test_parts_of_a_vector_are_named_by_one_text_or_by_what_is_read_once() -> None:
    whole = flatten({"ab": torch.ones(2), "a": torch.zeros(1)})
    for names in ("ab", ["ab"], iter(["ab"])):
        part = fc.select(whole, names)  # pyright: ignore[reportArgumentType]
        assert (part.layout.names, part.buffer.tolist()) == (("ab",), [1, 1])


def test_values_of_an_experiment_may_be_numpys_lists_and_paths() -> None:
    given = {"alpha": np.float64(0.5), "seed": np.int64(3), "model.channels": [8, np.int32(16)], "data.dir": Path("x")}
    plain = {"alpha": 0.5, "seed": 3, "model.channels": (8, 16), "data.dir": "x"}
    assert fc.experiment("smoke", values=given) == fc.experiment("smoke", values=plain)


one = fc.experiment("smoke")
CALLS: dict[str, Callable[[Path], object]] = {
    "means takes names of columns, got None.": lambda _: fc.means(_runs(), None),  # type: ignore
    "means takes names of columns, got b'MB'.": lambda _: fc.means(_runs(), b"MB"),  # type: ignore
    "means takes names of columns, got 3.": lambda _: fc.means(_runs(), 3),  # type: ignore
    "means takes names of columns, got [3].": lambda _: fc.means(_runs(), [3]),  # type: ignore
    "means takes a frame of load_runs, got 'runs'.": lambda _: fc.means("runs", "MB"),  # type: ignore
    "unknown column 'MBs'; did you mean 'MB'?": lambda _: fc.means(_runs(), "MBs"),
    "a folder is a str or a Path, got ['a', 'b'].": lambda _: fc.load_runs(["a", "b"]),  # type: ignore
    "a folder is a str or a Path, got None.": lambda _: fc.load_rounds(None),  # type: ignore
    "a folder is a str or a Path, got b'a'.": lambda _: fc.load_clients(b"a"),  # type: ignore
    "a folder is a str or a Path, got 3.": lambda _: fc.run(one, 3),  # type: ignore
    "run takes an experiment, got {'seed': 1}.": lambda folder: fc.run({"seed": 1}, folder),  # type: ignore
    "run takes an experiment, got 'smoke'.": lambda folder: fc.run("smoke", folder),  # type: ignore
    "sweep takes experiments, got 's'.": lambda folder: fc.sweep("smoke", folder),  # type: ignore
    "sweep takes experiments, got None.": lambda folder: fc.sweep(None, folder),  # type: ignore
    "sweep takes experiments, got 3.": lambda folder: fc.sweep([one, 3], folder),  # type: ignore
    "a folder is a str or a Path, got [].": lambda _: fc.sweep([one], []),  # type: ignore
    "a sweep has at most 10,000 cells": lambda folder: fc.sweep((one for _ in range(10**9)), folder),
    "values maps names of fields to their values, got ['seed'].": lambda _: fc.experiment(values=["seed"]),  # type: ignore
    "values maps names of fields to their values, got {1: 2}.": lambda _: fc.experiment(values={1: 2}),  # type: ignore
    "unknown preset 'None'.": lambda _: fc.experiment(None),  # type: ignore
}


@pytest.mark.parametrize("said", CALLS)
def test_what_no_argument_can_be_is_told_in_a_sentence(said: str, tmp_path: Path) -> None:
    with pytest.raises(fc.UserError) as error:
        CALLS[said](tmp_path / "out")
    assert str(error.value).startswith(said)
    assert not (tmp_path / "out").exists()
