"""Compare the values that a client sent in two runs on neighbouring data with their declared privacy (releases).

    sqrt( sum over noisy sums and tensors of (moved / sd)^2 )  <=  times sqrt( sum over releases of steps / sigma^2 )

moved: Euclidean distance between a value of the first run and the same value of the second run; noisy sums are compared
before noise;  sd: standard deviation of the noise on the value;  times: 1 for a removed example, 2 for a replaced one
(``neighbours.Kind``);  steps: declared number of noisy sums;  sigma: declared noise multiplier. The right side is the
total change that the declared Gaussian noise hides if every example is in every sum (sampling rate q = 1). With q < 1
an example is in fewer sums, so the left side is smaller.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf, sqrt

import torch
from torch import Tensor

from fedcommons.flat_tensors import Flat, Payload, data
from fedcommons.privacy.release import Release
from fedcommons.testing.comparing import listed
from fedcommons.testing.neighbours import Kind
from fedcommons.testing.sides import ROUNDING, Side, Sum

SEEDS = 12
"""Number of runs with other seeds, from which the standard deviation of the noise is estimated."""

SLACK = 0.25
"""Relative tolerance for standard deviations that are estimated from ``SEEDS`` runs."""

Spread = Callable[[], Mapping[str, Tensor]]
"""A function that returns, by tensor name, the standard deviation of the noise in each element of the tensor."""


def first_and_count(names: Sequence[str]) -> str:
    """Return the first sentence and the number of further sentences as a text; an empty text without sentences."""
    return names[0] + (f" ({len(names) - 1} more)" if names[1:] else "") if names else ""


@dataclass(frozen=True)
class Output:
    """All values that a client sent: tensors by name, its weight in averages, and the declared privacy (releases)."""

    tensors: Payload
    releases: Sequence[Release]
    weight: float = 1.0

    @property
    def free(self) -> set[str]:
        """Return the names of tensors that a release declares as unprotected (uncovered)."""
        return {name for event in self.releases if not event.covered for name in event.what}

    @property
    def covered(self) -> list[Release]:
        return [event for event in self.releases if event.covered]

    def describe_uncovered(self, name: str) -> str:
        """Return the end of a message on an unprotected tensor: its declared noise, or that no release names it."""
        releases_of_name = [event for event in self.covered if name in event.what]
        declared = " and ".join(
            f"noise multiplier {e.sigma:g} with sensitivity {e.sensitivity:g}" for e in releases_of_name
        )
        return f"declared is {declared}, but no separate noise hides it" if releases_of_name else "no release names it"


def faults(
    first: Output, second: Output, sides: tuple[Side, Side], kind: Kind, spread: Spread, slack: float = ROUNDING
) -> list[str]:
    """Return a sentence for each value that differs more between the two runs than its release declares.

    spread: estimates the standard deviations of the noise (``Spread``). slack: relative tolerance of the bound on the
    total change of all values.
    """
    if wrong := _of_noise(*sides, kind):
        return [wrong]
    sentences, differing = _of_forms(first, second, kind), _differing(first, second)
    pairs = list(zip(sides[0].sums, sides[1].sums, strict=True))
    if differing and (wrong := _of_sums(pairs, kind)):
        return [wrong, *sentences]
    spreads = spread() if differing else {}
    spent = sum(
        (first_sum.moved(second_sum) / first_sum.sd) ** 2
        for first_sum, second_sum in pairs
        if first_sum.keeps(second_sum, kind.times)
    )
    for name, moved in differing:
        rounded = not data(first.tensors[name]).is_floating_point()
        units = in_units(moved, spreads.get(name, torch.zeros_like(moved)), rounded)
        if units == inf or not any(name in event.what for event in first.covered):
            by = f"moves by {float(moved.norm()):.3g}" if moved.isfinite().all() else "is not finite"
            sentences.append(f"{name} {by} {kind.words}: {first.describe_uncovered(name)}")
        spent += units**2
    most = kind.times * sqrt(sum(event.steps / event.sigma**2 for event in first.covered))
    # An unprotected floating-point tensor may contain noisy sums that no release declares.
    gives_away = any(name in first.free and data(x).is_floating_point() for name, x in first.tensors.items())
    if sentences or gives_away or sqrt(spent) <= most * (1 + slack):
        return sentences
    names = listed([name for event in first.covered for name in event.what]) or "nothing"
    return [
        f"all that was sent moves by {sqrt(spent):.3g} standard deviations of its noise {kind.words}, but the release "
        f"declared for {names} lets it move by {most:.3g}"
    ]


def faults_of_streams(
    first: Output, second: Output, sides: tuple[Side, Side], kind: Kind, again: Callable[[Side], Output]
) -> list[str]:
    """Return the ``faults`` of code that draws all its noise from streams of ``Noise.call``.

    If there are none, return a sentence if more elements differ than noise values were drawn outside of noisy sums.
    again: runs the first side once more with the noise of another side. The differences to a run whose noise outside
    of noisy sums is larger by 1 are the standard deviations of this noise.
    """
    side = sides[0]

    def spread() -> Mapping[str, Tensor]:
        noisier = again(side.follower(1.0, raised=1.0)).tensors if side.loose else {}
        pairs = {name: (data(x), data(noisier[name])) for name, x in first.tensors.items() if name in noisier}
        return {name: difference(x, y) for name, (x, y) in pairs.items() if x.shape == y.shape}

    if sentences := faults(first, second, sides, kind, spread):
        return sentences
    differing = _differing(first, second)
    if (n := sum(moved.numel() for _, moved in differing)) <= side.loose:
        return []
    names = listed([name for name, _ in differing])
    return [f"{names}: {n} numbers move {kind.words}, but only {side.loose} of noise were drawn for them"]


def faults_of_seeds(play: Callable[[int, Side], Output], kind: Kind, seed: int) -> tuple[Output, list[str]]:
    """Run code whose noise may depend on its seed only on both data sets; return the first output and the ``faults``.

    play: runs the code on data set 0 or 1, with the seed and the noise of a side. Runs with other seeds give the
    standard deviations of the noise.
    """
    first = Side(seed)
    second = first.follower(kind.times)
    sent, other = play(0, first), play(1, second)

    def spread() -> Mapping[str, Tensor]:
        runs = [play(0, Side(seed + number)).tensors for number in range(1, 1 + SEEDS)]
        values = {name: [x, *(run[name] for run in runs)] for name, x in sent.tensors.items() if data(x).numel()}
        same = {name: xs[1:] for name, xs in values.items() if len({data(x).shape for x in xs}) == 1}
        return {name: torch.stack([data(x).double() for x in xs]).std(0) for name, xs in same.items()}

    return sent, faults(sent, other, (first, second), kind, spread, SLACK)


def renamed(events: Sequence[Release], tensors: Payload) -> list[Release]:
    """Return copies of the releases that name all ``tensors``; a release of class counts names ``labels`` only."""
    return [replace(event, what=("labels",) if event.what == ("class counts",) else tuple(tensors)) for event in events]


def _of_noise(first: Side, second: Side, kind: Kind) -> str:
    """Return a sentence on a fault of the noise (order of draws, reused streams, number of sums), or an empty text."""
    for number, (a, b) in enumerate(zip_longest(first.draws, second.draws), 1):
        if a != b:
            return f"draw {number} is {a or 'none'}, and {b or 'none'} {kind.words}"
    if first.again:
        return f"the stream of {first.again[0]} is opened twice, so the same noise is used twice"
    if any(not each.what for each in first.sums):
        return "the noise of a sum does not come from a stream of noise.call(...)"
    if len(first.sums) != len(second.sums):
        return f"it makes {len(first.sums)} noisy sums, and {len(second.sums)} {kind.words}"
    return ""


def _of_sums(pairs: Sequence[tuple[Sum, Sum]], kind: Kind) -> str:
    """Return a sentence on the first protected sum that differs too much, or an empty text.

    Only the first such sum is reported, because later sums depend on it.
    """
    for first, second in pairs:
        if first.release.covered and not first.keeps(second, kind.times):
            if not first.is_like(second):
                return f"the noisy sum of {first.what} has other clipping or noise {kind.words}"
            most = kind.times * first.release.sensitivity
            moved = f"the noisy sum of {first.what} moves by {first.moved(second):.3g} {kind.words}"
            return f"{moved}, but declared is {most:.3g} (data in start=, lr= or a hook also move it)"
    return ""


def _of_forms(first: Output, second: Output, kind: Kind) -> list[str]:
    """Return a sentence for each release, weight, and tensor name, shape or type that differs between the runs."""
    free, sentences = first.free | second.free, []
    for release, other_release in zip_longest(first.covered, second.covered):
        if release != other_release:
            sentences.append(f"it declares {_describe(other_release)} {kind.words}, instead of {_describe(release)}")
    if first.weight != second.weight and "weight" not in free:
        sentences.append(f"its weight is {first.weight:g}, and {second.weight:g} {kind.words}")
    for name in sorted({*first.tensors, *second.tensors} - free):
        forms = [_form(side.tensors.get(name)) for side in (first, second)]
        if forms[0] != forms[1]:
            sentences.append(f"{name} is {forms[0]}, and {forms[1]} {kind.words}")
    return sentences


def _describe(event: Release | None) -> str:
    if event is None:
        return "nothing"
    facts = f"q {event.q:g}, noise multiplier {event.sigma:g}, sensitivity {event.sensitivity:g}, steps {event.steps}"
    return f"{listed(event.what)} with {facts}"


def _form(x: Flat | Tensor | None) -> str:
    if x is None:
        return "not there"
    parts = f" of {', '.join(x.layout.names)}" if isinstance(x, Flat) else ""
    return f"{data(x).dtype} {tuple(data(x).shape)}{parts}"


def _differing(first: Output, second: Output) -> list[tuple[str, Tensor]]:
    """Return (name, second minus first value) of each protected tensor that differs between the runs."""
    same = [name for name, x in first.tensors.items() if _form(x) == _form(second.tensors.get(name))]
    pairs = [(name, data(first.tensors[name]), data(second.tensors[name])) for name in same]
    free = first.free | second.free
    return [(name, difference(a, b)) for name, a, b in pairs if name not in free and not torch.equal(a, b)]


def in_units(moved: Tensor, sd: Tensor, rounded: bool) -> float:
    """Return the Euclidean norm of ``moved`` divided by the standard deviation of the noise; infinite without noise.

    moved: difference of a tensor between two runs. sd: standard deviations of the noise by element; the divisor
    is their root mean square over the changed elements. rounded: whether elements were rounded after the noise; then
    1 is subtracted from the absolute difference of each element.
    """
    is_moved = moved != 0
    of_noise = float(sd[is_moved].square().mean().sqrt())
    if not 0 < of_noise < inf:
        return inf
    return float((moved.abs() - int(rounded)).clamp(min=0).norm()) / of_noise


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the difference b - a in float64, so that the subtraction adds no rounding."""
    return b.detach().double() - a.detach().double()
