"""A probe: a short federation without sharing that measures convergence parameters, and Corollary I's predictions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import override, part_of
from fedcommons.config.experiment import Experiment
from fedcommons.convergence import advisor
from fedcommons.convergence.advisor import Prediction
from fedcommons.convergence.laboratory import Estimate, Laboratory
from fedcommons.core.evaluation import ModelTask, evaluate
from fedcommons.core.rejections import records, rejection_summary
from fedcommons.core.worker import fresh_torch
from fedcommons.federation import rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.generators import image_cache
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.salts import SEEDED
from fedcommons.runs import assemble, build, spec
from fedcommons.runtime import ray_cluster
from fedcommons.seeding import seed_for
from fedcommons.sharing.stage import Generating
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import grid
from papers.fedssyn.advice import local_work

Found = dict[str, Estimate]


@fresh_torch()
def probe(
    config: Experiment, synthetic: Sequence[Contribution] | None, say: Callable[[str], None]
) -> list[tuple[float, Found]]:
    """Return test accuracy and convergence parameters of the server model at rounds 0 to ``config.federation.rounds``.

    config: the experiment with sharing. The probe measures the experiment's pool, but does not train on it. synthetic:
    the clients' synthetic images. If they are None and the strategy has generators, the pool is all clients' real data:
    images of an ideal generator would have the same distribution.
    """
    prepared = build.build(override(config, {"sharing.setting": "real", "measure.every": 1, "dp.noise": SEEDED}))
    ready = assemble.assemble(prepared)
    if synthetic is not None or not isinstance(part_of(config, "sharing"), Generating):
        shared = assemble.assemble(build.build(config), synthetic or ()).data
        ready = ready.on(replace(shared, clients=shared.real))  # adds the pool; clients keep their real data
    if ready.data.pool is None:
        ready = ready.on(replace(ready.data, pool=ready.data.real))
    if config.federation.executor == "ray_actors":
        ray_cluster.connect()
        ray_cluster.require_actors(config.federation.processes, config.federation.gpus_per_actor)
    executor, result = ready.executor(), []
    try:
        c = ready.spec.record
        laboratory = Laboratory(executor, ready.data, 0.0, c.federation.blocks, c.measure.samples, c.seed)
        start = ready.start(ClientMemory(cap_bytes=c.federation.memory_mb * 1e6))
        for now, _ in chain([(start, {})], rounds.run(ready.algorithm, executor, ready.plan, start)):
            seed = seed_for(c.seed, "observed", now.round)
            at = ModelTask(now.model, now.buffers, seed, now.round, ready.steps, c.evaluate.chunk)
            measured = laboratory.measure(at, hessians=True)
            sizes = {"test": len(ready.data.sets["test"])}
            accuracy = evaluate(executor, at, sizes)["test/accuracy"]
            say(f"probe, round {now.round}: test accuracy {accuracy:.3f}")
            result.append((accuracy, measured))
        if now.rejected:
            say(f"probe: {rejection_summary(records(now.rejected))}")
    finally:
        executor.close()
    return result


def predictions(ready: spec.RunSpec, options: parse.Options, display: Display) -> tuple[list[Prediction], str]:
    """Return the predictions for all shares p of shared data, and the pool that they assume, as text."""
    config, store = ready.record, Store(ready.artifacts, display.say, ready.storage)
    is_stored = not image_cache.missing(store, ready.requests)
    synthetic = assemble.contributions(ready, store) if ready.requests and is_stored else None
    pool = "the pool" if is_stored else "an ideal pool, of real data: no synthetic images are in the store yet"
    probed_models = probe(override(config, {"federation.rounds": options.probe_rounds}), synthetic, display.say)
    work = local_work(config, [len(rows) for rows in ready.partition.rows])
    shares = grid.values(options, "p", float)
    checked = grid.values(options, "check-p", float) if options.check else ()
    return advisor.predict([advisor.probed(f) for _, f in probed_models], sorted({*shares, *checked}), work), pool
