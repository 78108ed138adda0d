"""Computation of the curves of figures 1 to 3 on one or several workers (Ray), and of their means over repetitions."""

from collections.abc import Iterator, Mapping
from typing import Any

from fedcommons.cli import parse
from fedcommons.config.schema import Data
from fedcommons.core.worker import set_up_process
from fedcommons.federation import hosts
from fedcommons.runs.build import load
from fedcommons.runtime import ray_cluster
from papers.agc.gradient_coding import Played, Problem, Setting, joined, play, select_examples
from papers.agc.presets import PER_CLASS, PRESETS

CHUNK = 100  # repetitions per job, a multiple of gradient_coding.BLOCK
Curve = dict[str, Any]


def load_problem(options: parse.Options) -> Problem:
    """Load the preset's training and test images, with ``PER_CLASS`` training images of each class."""
    preset = PRESETS[options.preset]
    dataset = load(Data(options.dataset, options.data_dir, options.download, validation=0))
    train = select_examples(dataset, PER_CLASS, preset.first, options.seed)
    return Problem.build(train, dataset.test[slice(0, preset.n_test)], dataset.classes, preset.white)


def job(problem: Problem, setting: Setting, repetitions: range, seed: int) -> Played:
    """Run some repetitions of a curve, in this process or on a Ray worker."""
    set_up_process()
    return play(problem, setting, repetitions, seed)


def run_all(problem: Problem, wanted: Mapping[str, Setting], options: parse.Options) -> Iterator[tuple[str, Played]]:
    """Yield (name, results) of each curve in ``wanted``, in order; the bits do not depend on the number of workers."""
    chunks = [range(options.repetitions)[i : i + CHUNK] for i in range(0, options.repetitions, CHUNK)]
    if options.workers == 1:
        for name, setting in wanted.items():
            yield name, joined([job(problem, setting, chunk, options.seed) for chunk in chunks])
        return
    import ray

    ray_cluster.connect(options.workers)
    data, driver, pin = ray.put(problem), hosts.facts(), ray_cluster.node_labels(0)
    ray_cluster.free(ray_cluster.reserve([ray_cluster.bundle(0)], pin, "a repetition"))
    remote: Any = ray.remote(num_cpus=1, label_selector=pin)(hosts.run_if_same)
    sent = {
        name: [remote.remote(driver, job, data, setting, chunk, options.seed) for chunk in chunks]
        for name, setting in wanted.items()
    }
    for name, references in sent.items():
        yield name, joined(ray.get(references))


def summed_up(setting: Setting, played: Played) -> Curve:
    """Return the curve: for each quantity, lists by round of means over repetitions and of their standard errors."""
    curve: Curve = {"partition": setting.partition, "q": setting.q, "d": setting.d, "c": setting.c}
    for name, values in (
        ("accuracy", played.accuracy),
        ("second_moment", played.second_moment),
        ("same_class", played.same_class),
        ("cross_class", played.cross_class),
        ("norm_sq", played.same_class + played.cross_class),
    ):
        curve[name] = values.mean(0).tolist()
        curve[f"{name}_se"] = (values.std(0, ddof=1) / len(values) ** 0.5).tolist()
    return curve
