"""Start-up seconds of a run with N = 10^5 clients, partitioned by groups: build, assemble, write partition.json.

python benchmarks/groups.py [N]

Each client has ten examples of four numbers; a tenth of them is the client's test data. Goal: about 1 s without reading
the data. Times are the best of three calls, in seconds.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedcommons.config.dotted import choose
from fedcommons.runs import assemble, build, load_data

DATA = """
import numpy as np


def many(n: int = 10):
    draws = np.random.default_rng(0)
    train = draws.standard_normal((10 * n, 4)).astype("float32"), np.arange(10 * n) % 10, np.arange(10 * n) % n
    return train, tuple(column[:1000] for column in train)
"""


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest of three calls, and the result of the last call."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def main(n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "many.py").write_text(DATA, encoding="utf-8")
        fields = {"data.name": f"{folder}/many.py:many", "data.n": n, "data.client_test": 0.1, "data.validation": 0.0}
        more = {"model.name": "linear", "partition.name": "by_group"}
        config = choose({**fields, **more, "federation.participation": 100 / n})
        start = time.perf_counter()
        build.build(config)
        first = time.perf_counter() - start
        building, prepared = best(lambda: build.build(config))
        sharing, ready = best(lambda: assemble.assemble(prepared))
        write, _ = best(
            lambda: load_data.write_partition(Path(folder), prepared.partition, prepared.tests, "digest", b"")
        )
        assert len(np.asarray(ready.data.real.sizes)) == len(prepared.tests or ()) == n
        text = f"build {building:.2f} (with the data read {first:.2f}), assemble {sharing:.2f}, write {write:.2f}"
        print(f"{n:,} clients: {text}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
