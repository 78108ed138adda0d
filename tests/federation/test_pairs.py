"""Each pair of options on updates either trains or is refused in a sentence that names both."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from report_runs import quiet

from fedcommons import UserError, experiment, run

FIELDS = {
    "clients": 5, "partition": "iid", "rounds": 1, "epochs": 1, "data.limit": 100, "model": "linear",
    "measure.every": 0, "wandb": "off",
}  # fmt: skip
USED: dict[str, dict[str, Any]] = {
    "communication.compress": {"communication.compress": "topk:0.1"}, "dp.local": {"dp.local": True},
    "dp.central": {"dp.central": True}, "federation.sampling": {"federation.sampling": "poisson"},
    "federation.weighting": {"federation.weighting": "samples"}, "federation.max_norm": {"federation.max_norm": 9.0},
    "federation.aggregation": {"federation.aggregation": "median"}, "straggler": {"straggler.q": 0.3},
    "attack.name": {"attack.name": "sign_flip", "attack.share": 0.2}, "client.batched": {"client.batched": True},
    "scaffold": {"algorithm": "scaffold"}, "fedbuff": {"algorithm": "fedbuff", "fedbuff.buffer": 3},
}  # fmt: skip
REFUSED = {
    "dp.central": "federation.weighting federation.max_norm federation.aggregation attack.name scaffold fedbuff",
    "fedbuff": "communication.compress federation.aggregation attack.name federation.sampling straggler",
    "scaffold": "federation.aggregation attack.name", "dp.local": "client.batched",
    "straggler": "federation.sampling",
}  # fmt: skip
"""Option or method -> what it cannot be used with; all other pairs are allowed."""


@pytest.mark.long
@pytest.mark.parametrize("pair", [pair for pair in combinations(USED, 2) if pair != ("scaffold", "fedbuff")])
def test_a_pair_trains_or_is_refused_by_name(pair: tuple[str, str], tmp_path: Path) -> None:
    one, other = pair
    fields = {**FIELDS, **USED[one], **USED[other]}
    if other not in REFUSED.get(one, "").split() and one not in REFUSED.get(other, "").split():
        assert run(experiment("smoke", values=fields), tmp_path / "run", say=quiet).summary["rounds"] == 1
        return
    with pytest.raises(UserError) as refused:
        run(experiment("smoke", values=fields), tmp_path / "run", say=quiet)
    assert all(name in str(refused.value).lower() for name in pair)
    assert not (tmp_path / "run").exists()
