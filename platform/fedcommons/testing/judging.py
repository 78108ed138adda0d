"""What left on two sides of a play, against what is declared of it.

    sqrt( sum over noisy sums and tensors of (moved / sd)^2 )  <=  times sqrt( sum over releases of steps / sigma^2 )

moved: ||difference||, of a sum before its noise;  sd: standard deviation of its noise, as it was drawn;  times: see
``neighbours.Kind``. At q = 1 both sides of it are what Gaussian noise hides in all. With q < 1 an example is in fewer
sums, and the left side is smaller.
"""

from collections.abc import Sequence
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
from fedcommons.testing.spreads import Spread, difference, in_units


def told(found: Sequence[str]) -> str:
    """The first of these sentences, and how many more there are."""
    return found[0] + (f" ({len(found) - 1} more)" if found[1:] else "") if found else ""


@dataclass(frozen=True)
class Left:
    """What left a client: tensors by name, its weight, and what is declared of them."""

    tensors: Payload
    releases: Sequence[Release]
    weight: float = 1.0

    @property
    def free(self) -> set[str]:
        """Names that are declared as protected by nothing."""
        return {name for event in self.releases if not event.covered for name in event.what}

    @property
    def covered(self) -> list[Release]:
        return [event for event in self.releases if event.covered]

    def told(self, name: str) -> str:
        """What is declared of a tensor that no noise hides, in words."""
        of = [event for event in self.covered if name in event.what]
        declared = " and ".join(f"noise multiplier {e.sigma:g} with sensitivity {e.sensitivity:g}" for e in of)
        return f"declared is {declared}, and no noise of its own hides it" if of else "no release names it"


def faults(
    first: Left, second: Left, sides: tuple[Side, Side], kind: Kind, spread: Spread, slack: float = ROUNDING
) -> list[str]:
    """A sentence for each thing that moved further than is declared; empty if nothing did."""
    if wrong := _of_noise(*sides, kind):
        return [wrong]
    found, differing = _of_forms(first, second, kind), _differing(first, second)
    pairs = list(zip(sides[0].sums, sides[1].sums, strict=True))
    if differing and (wrong := _of_sums(pairs, kind)):
        return [wrong, *found]
    spreads = spread() if differing else {}
    spent = sum((one.moved(two) / one.sd) ** 2 for one, two in pairs if one.keeps(two, kind.times))
    for name, moved in differing:
        rounded = not data(first.tensors[name]).is_floating_point()
        units = in_units(moved, spreads.get(name, torch.zeros_like(moved)), rounded)
        if units == inf or not any(name in event.what for event in first.covered):
            by = f"moves by {float(moved.norm()):.3g}" if moved.isfinite().all() else "is not finite"
            found.append(f"{name} {by} {kind.said}: {first.told(name)}")
        spent += units**2
    return found if found or _gives_away(first) else _of_all(sqrt(spent), first, kind, slack)


def too_few(first: Left, second: Left, side: Side, kind: Kind) -> list[str]:
    """A sentence if fewer normal numbers were drawn outside of sums than there are numbers that need them."""
    differing = _differing(first, second)
    if (n := sum(moved.numel() for _, moved in differing)) <= side.loose:
        return []
    names = listed([name for name, _ in differing])
    return [f"{names}: {n} numbers move {kind.said}, and only {side.loose} of noise were drawn for them"]


def renamed(events: Sequence[Release], tensors: Payload) -> list[Release]:
    """The events for these tensors, all of them; only ``labels`` follow class counts."""
    return [replace(event, what=("labels",) if event.what == ("class counts",) else tuple(tensors)) for event in events]


def _of_noise(one: Side, two: Side, kind: Kind) -> str:
    """What is wrong with what was drawn, whatever it hides."""
    for number, (a, b) in enumerate(zip_longest(one.drawn, two.drawn), 1):
        if a != b:
            return f"draw {number} is {a or 'none'}, and {b or 'none'} {kind.said}"
    if one.again:
        return f"the stream of {one.again[0]} is opened twice, and gives the same noise again"
    if any(not each.what for each in one.sums):
        return "the noise of a sum does not come from a stream of noise.call(...)"
    if len(one.sums) != len(two.sums):
        return f"it makes {len(one.sums)} noisy sums, and {len(two.sums)} {kind.said}"
    return ""


def _of_sums(pairs: Sequence[tuple[Sum, Sum]], kind: Kind) -> str:
    """Of the first covered sum that moves too far; those after it follow from it."""
    for one, two in pairs:
        if one.release.covered and not one.keeps(two, kind.times):
            if not one.is_like(two):
                return f"the noisy sum of {one.what} has other clipping or noise {kind.said}"
            most = kind.times * one.release.sensitivity
            moved = f"the noisy sum of {one.what} moves by {one.moved(two):.3g} {kind.said}"
            return f"{moved}, and declared is {most:.3g} (it moves too where data are in start=, lr= or a hook)"
    return ""


def _of_forms(first: Left, second: Left, kind: Kind) -> list[str]:
    """Names, shapes, types, weights and the releases themselves."""
    free, found = first.free | second.free, []
    for one, two in zip_longest(first.covered, second.covered):
        if one != two:
            found.append(f"it declares {_said(two)} {kind.said}, instead of {_said(one)}")
    if first.weight != second.weight and "weight" not in free:
        found.append(f"its weight is {first.weight:g}, and {second.weight:g} {kind.said}")
    for name in sorted({*first.tensors, *second.tensors} - free):
        forms = [_form(left.tensors.get(name)) for left in (first, second)]
        if forms[0] != forms[1]:
            found.append(f"{name} is {forms[0]}, and {forms[1]} {kind.said}")
    return found


def _said(event: Release | None) -> str:
    if event is None:
        return "nothing"
    facts = f"q {event.q:g}, noise multiplier {event.sigma:g}, sensitivity {event.sensitivity:g}, steps {event.steps}"
    return f"{listed(event.what)} with {facts}"


def _form(x: Flat | Tensor | None) -> str:
    if x is None:
        return "not there"
    parts = f" of {', '.join(x.layout.names)}" if isinstance(x, Flat) else ""
    return f"{data(x).dtype} {tuple(data(x).shape)}{parts}"


def _differing(first: Left, second: Left) -> list[tuple[str, Tensor]]:
    """The tensors whose bits differ, and by how much each number does; not those that are declared as bare."""
    same = [name for name, x in first.tensors.items() if _form(x) == _form(second.tensors.get(name))]
    pairs = [(name, data(first.tensors[name]), data(second.tensors[name])) for name in same]
    free = first.free | second.free
    return [(name, difference(a, b)) for name, a, b in pairs if name not in free and not torch.equal(a, b)]


def _gives_away(left: Left) -> bool:
    """Whether floating numbers are declared as bare: noisy sums may have gone into these."""
    return any(name in left.free and data(x).is_floating_point() for name, x in left.tensors.items())


def _of_all(spent: float, left: Left, kind: Kind, slack: float) -> list[str]:
    most = kind.times * sqrt(sum(event.steps / event.sigma**2 for event in left.covered))
    if spent <= most * (1 + slack):
        return []
    names = listed([name for event in left.covered for name in event.what]) or "nothing"
    return [
        f"what left moves by {spent:.3g} standard deviations of its noise {kind.said}, and what is declared of {names} "
        f"lets it move by {most:.3g}"
    ]
