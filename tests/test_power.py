"""How few copies the audit of a pool finds, and how rarely it accuses a pool without copies."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.audits.closeness import Compared, compare, copies_of, subject
from fedcommons.audits.copies import audit
from fedcommons.audits.distances import Space, pixel_space
from fedcommons.audits.pool import power
from fedcommons.audits.power import DRAWS, ENOUGH, SHARES, fewest_copies, plantings, verdicts
from fedcommons.audits.verdict import PARTS, Planted, chances, counts, memorised
from fedcommons.data.examples import Examples
from fedcommons.seeds import generator, numpy_generator


def drawn(n: int, *key: int | str) -> Examples:
    """n images of three classes: each the mean of its class under noise."""
    y = torch.arange(n) % 3
    centre = 60 + 120 * torch.rand(3, 1, 6, 6, generator=generator("centres"))
    x = centre[y] + 25 * torch.randn(n, 1, 6, 6, generator=generator(*key))
    return Examples(x.clamp(0, 255).round().to(torch.uint8), y)


def honest(seed: int, n: int = 150, client: int = 0, space: Space = pixel_space) -> Compared:
    """A pool of as many fresh images as were seen."""
    seen, made, unseen = (drawn(n, name, seed, client) for name in ("seen", "made", "unseen"))
    return compare(subject(client, made, seen, unseen, seed), space, seed)


def with_copies(one: Compared, planted: Planted, seed: int) -> Examples:
    """The made images, of which some have given way."""
    copies = copies_of(one.of.seen, numpy_generator(seed, "copies", one.of.client))
    x, y = one.of.made.x.clone(), one.of.made.y.clone()
    x[planted.rows], y[planted.rows] = copies.x[planted.copies], copies.y[planted.copies]
    return Examples(x, y)


def coarse(records: torch.Tensor):
    """Other distances, with many ties: in units of 150."""
    distances = pixel_space(records)
    return lambda x: (distances(x) / 150).round()


@pytest.mark.parametrize("space", [pixel_space, coarse])
@pytest.mark.parametrize("label", [None, 1])
@pytest.mark.long
def test_a_planted_pool_is_counted_as_if_it_were_measured_again(space: Space, label: int | None) -> None:
    clients = [honest(3, 60, client, space) for client in range(2)]
    for n in (1, 7, 20, 40):
        verdict = verdicts(clients, n, 0, label)
        for found, planted in islice(zip(verdict, plantings(clients, n, 0, label), strict=True), 4):
            assert sum(len(p.rows) for p in planted.values()) == min(n, 120 if label is None else 40)
            total = np.zeros(7)
            for i, one in enumerate(clients):
                if i not in planted:
                    total += counts(one, label)
                    continue
                pool = with_copies(one, planted[i], 3)
                again = counts(compare(replace(one.of, made=pool), space, 3), label)
                assert label is None or torch.equal(pool.y, one.of.made.y)
                assert np.array_equal(counts(one, label, planted[i]), again)
                total += again
            assert memorised(total) == found


def test_copies_are_exact_moved_and_mirrored_in_equal_parts() -> None:
    seen = drawn(600, "seen")
    copies = copies_of(seen, numpy_generator("copies"))
    assert pixel_space(seen.x)(copies.x).min(1).values.max() == 0
    exact = {x.numpy().tobytes() for x in seen.x}
    mirrored = {x.numpy().tobytes() for x in seen.x.flip(-1)}
    kinds = Counter((x.numpy().tobytes() in exact, x.numpy().tobytes() in mirrored) for x in copies.x)
    assert set(kinds) == {(True, False), (False, True), (False, False)}
    assert all(abs(number - 200) < 4 * np.sqrt(600 * 2 / 9) for number in kinds.values())
    rows = Examples(torch.randn(50, 4), torch.zeros(50, dtype=torch.int64))
    assert sorted(copies_of(rows, numpy_generator(0)).x.tolist()) == sorted(rows.x.tolist())


def test_the_smallest_share_is_found_and_the_one_before_it_is_not() -> None:
    one = honest(0)
    fewest = fewest_copies([one], 0)
    assert fewest is not None
    assert sum(verdicts([one], fewest, 0)) >= ENOUGH > 0.9 * DRAWS
    before = max(n for n in (int(np.ceil(150 * share)) for share in SHARES) if n < fewest)
    assert sum(verdicts([one], before, 0)) < ENOUGH
    verdict = audit([one.of], {"pixels": pixel_space}, 0).record()["pixels"]["all"]
    assert (verdict["finds"], verdict["finds_images"], verdict["memorised"]) == (fewest / 150, fewest, False)
    assert f" {fewest} copies" in power("pixels", verdict)
    assert [*verdicts([one], 13, 0)] == [*verdicts([one], 13, 0)]
    rows = {tuple(p[0].rows.tolist()) for seed in (0, 1) for p in plantings([one], 5, seed)}
    assert len(rows) == 2 * DRAWS


def test_where_too_few_images_could_show_anything_no_share_is_found() -> None:
    """Nine coins never fall so that chance is refuted at one in two thousand; what is accused needs no power."""

    def verdict_of(n: int, made: str) -> dict[str, Any]:
        one = subject(0, drawn(n, made), drawn(n, "seen"), drawn(n, "unseen"), 0)
        return audit([one], {"pixels": pixel_space}, 0).record()["pixels"]["all"]

    accused, verdict = verdict_of(60, "seen"), verdict_of(9, "made")
    assert (accused["memorised"], accused["finds"]) == (True, None)
    assert (verdict["memorised"], verdict["finds"], verdict["finds_images"]) == (False, None, None)
    assert "would not have found copies" in power("pixels", verdict)


def test_a_client_that_has_seen_nothing_of_a_class_plants_no_copy_of_it() -> None:
    one = honest(0, 60)
    without = replace(one.of, seen=one.of.seen[one.of.seen.y > 0], matched=torch.arange(40))
    held_out = one.of.held_out[one.of.held_out.y > 0]
    assert fewest_copies([compare(replace(without, held_out=held_out), pixel_space, 0)], 0, label=0) is None


@pytest.mark.parametrize("pool", ["fresh", "the same again", "blurry"])
@pytest.mark.long
def test_a_pool_without_copies_is_accused_no_more_often_than_stated(pool: str) -> None:
    """Nothing was memorised, so seen images may change places with held-out ones of their class: 4000 times.

    Each test's chance is below a level no more often than the level says, and so is the verdict's.
    """
    one = honest(5)
    x = one.of.made.x
    if pool == "the same again":
        x = x[(150 * torch.rand(150, generator=generator("again")) ** 4).long()]
    if pool == "blurry":
        x = torch.stack([x[k::3].float().mean(0) for k in range(3)]).round().to(torch.uint8).repeat(50, 1, 1, 1)
    found = compare(replace(one.of, made=Examples(x, one.of.made.y)), pixel_space, 5)
    m, draws, said = 150, numpy_generator("changes"), []
    bits = np.unpackbits(found.made.below, axis=2, count=2 * m)
    for _ in range(4000):
        swapped = draws.random(m) < 0.5
        places = np.concatenate([np.arange(m) + m * swapped, np.arange(m) + m * ~swapped])  # where each record goes
        below = np.zeros_like(bits)
        below[:, :, places] = bits
        record = places[found.made.record]
        held_out = (record >= m).astype(float)
        made = replace(found.made, record=record, to_matched=held_out, to_held_out=1 - held_out,
                       below=np.packbits(below, axis=2))  # fmt: skip
        said.append(chances(counts(replace(found, made=made))))
    for level in (0.1, 0.01, 0.001):
        assert np.all(np.mean(np.array(said) < level, 0) <= level + 4 * np.sqrt(level / 4000))
    assert PARTS.sum() == 1
