"""Predictions of Corollary I for an experiment with a pool of shared data, from a short probe run without sharing."""

from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import override
from fedcommons.convergence import advisor
from fedcommons.convergence.advisor import Prediction
from fedcommons.generators import image_cache
from fedcommons.runs import assemble, spec
from fedcommons.storage.artifact_store import Store
from papers.fedssyn.advice_report import local_work
from papers.fedssyn.probe import probe


def predictions(ready: spec.RunSpec, options: parse.Options, display: Display) -> tuple[list[Prediction], str]:
    """Return the predictions for all shares p of shared data in one experiment, and the pool that they assume, as text.

    The pool is the experiment's pool if the store has all its images, else an ideal pool of real data.
    """
    config, store = ready.record, Store(Path(ready.record.artifacts), display.say, ready.record.storage)
    is_stored = not image_cache.missing(store, ready.requests)
    synthetic = assemble.contributions(ready, store) if ready.requests and is_stored else None
    pool = "the pool" if is_stored else "an ideal pool, of real data: no synthetic images are in the store yet"
    probed_models = probe(override(config, {"federation.rounds": options.probe_rounds}), synthetic, display.say)
    work = local_work(config, [len(rows) for rows in ready.partition.rows])
    shares = parse.split("--p", options.p, float)
    checked = parse.split("--check-p", options.check_p, float) if options.check else ()
    return advisor.predict([advisor.probed(f) for _, f in probed_models], sorted({*shares, *checked}), work), pool
