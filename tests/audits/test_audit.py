"""The audit of a pool: it catches copiers, knows its detection limit, and rarely accuses a pool without copies."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from fedcommons import Examples, UserError, generator, numpy_generator
from fedcommons.audits.copies import Audit, audit, clopper_pearson, facts
from fedcommons.audits.detection_power import DRAWS, ENOUGH, SHARES, fewest_copies, plantings, verdicts
from fedcommons.audits.distances import Look, Space, looks, pixel_space
from fedcommons.audits.nearest_neighbours import Compared, compare, copies_of, subject
from fedcommons.audits.verdict import PARTS, Planted, chances, counts, memorised
from fedcommons.runs.pool_audit import power

SEEDS = range(6)


def sample(n: int, *key: int | str, classes: int = 3, side: int = 6) -> Examples:
    draws = generator(*key)
    y = torch.arange(n) % classes
    centre = 60 + 120 * torch.rand(classes, 1, side, side, generator=generator("centres"))
    x = centre[y] + 25 * torch.randn(n, 1, side, side, generator=draws)
    return Examples(x.clamp(0, 255).round().to(torch.uint8), y)


def copies(seen: Examples, noise: float, *key: int | str) -> Examples:
    x = seen.x + noise * torch.randn(seen.x.shape, generator=generator(*key))
    return Examples(x.clamp(0, 255).round().to(torch.uint8), seen.y)


def audited(synthetic: Examples, seen: Examples, seed: int, client: int = 0) -> Audit:
    client_data = subject(client, synthetic, seen, sample(400, "unseen", seed), seed)
    return audit([client_data], {"pixels": pixel_space}, seed)


def verdict(synthetic: Examples, seen: Examples, seed: int) -> dict:
    result = facts(audited(synthetic, seen, seed).compared["pixels"])
    assert result
    return result


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_a_copier_is_caught(noise: float) -> None:
    for seed in SEEDS:
        seen = sample(300, "seen", seed)
        result = verdict(copies(seen, noise, "noise", seed), seen, seed)
        assert result["memorised"]
        assert result["low"] > 0.97
        assert result["near_copies"] == 300 > 20 * result["expected"]
        assert (result["copied"], result["control"] < 10) == (300, True)
        assert (result["identical"] == 300) == (noise == 0)


@pytest.mark.long
def test_a_fresh_sample_passes() -> None:
    """The interval holds 1/2 for nearly every seed (95 %), and no pool is called memorised."""
    results = [verdict(sample(300, "fresh", seed), sample(300, "seen", seed), seed) for seed in range(40)]
    assert not any(f["memorised"] for f in results)
    assert sum(f["low"] <= 0.5 <= f["high"] for f in results) >= 35
    assert abs(np.mean([f["closer"] for f in results]) - 0.5) < 0.02
    near = np.mean([f["near_copies"] for f in results])
    assert near < results[0]["expected"] + 4 * np.sqrt(300 * 0.01 / 40 * 4)  # the limit is itself drawn
    assert near > 0.5
    assert {f["identical"] for f in results} == {0}


@pytest.mark.long
def test_a_few_copies_among_fresh_images_are_caught_by_the_near_copies() -> None:
    for seed in SEEDS:
        seen, fresh = sample(300, "seen", seed), sample(270, "fresh", seed)
        pool = Examples(torch.cat([fresh.x, copies(seen[:30], 3, "noise", seed).x]), torch.cat([fresh.y, seen.y[:30]]))
        result = audited(pool, seen, seed)
        record, near = facts(result.compared["pixels"]), result.near()[0]
        assert record
        assert record["memorised"]
        assert near[270:].all()
        assert near[:270].mean() < 0.06


@pytest.mark.long
def test_copies_that_are_moved_or_mirrored_are_identical_whatever_fills_their_edge() -> None:
    """All 18 looks, in a pool of as many fresh images: every verdict is memorised."""
    seen, fresh = sample(90, "seen"), sample(90, "fresh")
    assert len(set(looks(seen.x))) == 18
    for look in looks(seen.x):
        moved = look.apply(seen.x)
        if look.down:
            moved[..., 0 if look.down > 0 else -1, :] = 255
        pool = Examples(torch.cat([moved, fresh.x]), torch.cat([seen.y, fresh.y]))
        compared = compare(subject(0, pool, seen, sample(400, "unseen"), 0), pixel_space, 0)
        assert compared.nearest.to_seen[:90].max() == 0
        assert compared.nearest.closest_seen[:90].tolist() == list(range(90))
        assert compared.identical.sum() == 90
        assert memorised(counts(compared))


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 32, 32)])
def test_image_distance_is_the_least_over_shifts_and_flips_scaled_to_a_whole_image(shape: tuple[int, int, int]) -> None:
    """In whole numbers, at extremes; both ways round the distance is the same."""
    (_, h, w), draws = shape, generator("extremes", shape[1])
    a, b = (255 * torch.randint(2, (n, *shape), generator=draws, dtype=torch.uint8) for n in (3, 4))

    def apart(x: Tensor, record: Tensor, down: int, right: int) -> float:
        rows, columns = ([i for i in range(n) if 0 <= i - by < n] for n, by in ((h, down), (w, right)))
        moved = record.long()[:, [i - down for i in rows]][:, :, [i - right for i in columns]]
        return int((x.long()[:, rows][:, :, columns] - moved).square().sum()) * h * w / (len(rows) * len(columns))

    steps = (-1, 0, 1)
    expected = [[min(apart(x, r, down, right) for r in (record, record.flip(-1)) for down in steps for right in steps)
                 for record in b] for x in a]  # fmt: skip
    assert pixel_space(b)(a).tolist() == pytest.approx(np.sqrt(expected), rel=1e-15)
    assert torch.equal(pixel_space(b)(a), pixel_space(a)(b).T)


def test_examples_that_are_not_images_are_compared_without_shifts_or_flips() -> None:
    x, y = torch.randn(9, 5, generator=generator("rows")), torch.zeros(9, dtype=torch.int64)
    assert looks(x) == looks(x.view(9, 1, 1, 5)) == [Look()]
    assert torch.allclose(pixel_space(x)(x[:4]), torch.cdist(x[:4].double(), x.double()), atol=1e-6)
    synthetic = Examples(torch.cat([x[:3], x[:3].flip(-1)]), y[:6])
    client_data = subject(0, synthetic, Examples(x[:5], y[:5]), Examples(x[5:], y[5:]), 0)
    assert compare(client_data, pixel_space, 0).identical.tolist() == [True] * 3 + [False] * 3


def test_held_out_images_have_the_classes_of_the_seen_ones_and_are_keyed() -> None:
    seen, unseen = sample(60, "seen", classes=3), sample(45, "unseen", classes=5)
    first, again, other = (subject(0, seen, seen, unseen, seed) for seed in (0, 0, 1))
    assert np.bincount(first.held_out.y).tolist() == np.bincount(seen.y[first.matched]).tolist() == [9, 9, 9]
    assert torch.equal(first.matched, again.matched)
    assert torch.equal(first.held_out.x, again.held_out.x)
    assert not torch.equal(first.matched, other.matched)
    assert len(set(first.matched.tolist())) == 27
    assert compare(first, pixel_space, 0).expected == pytest.approx(1 / 28)  # j/(m + 1)
    with pytest.raises(UserError, match="held-out images of client 3's classes"):
        subject(3, seen[seen.y == 0], seen[seen.y == 0], unseen[unseen.y > 0], 0)


def test_clients_and_classes_have_verdicts_of_their_own() -> None:
    subjects = []
    for client in (0, 1):
        seen, synthetic = sample(300, "seen", client), sample(300, "fresh", client)
        if client:
            synthetic.x[synthetic.y == 2] = seen.x[seen.y == 2]
        subjects.append(subject(client, synthetic, seen, sample(400, "unseen", client), 0))
    space = audit(subjects, {"pixels": pixel_space}, 0).record()["pixels"]
    assert [space["clients"][c]["memorised"] for c in "01"] == [False, True]
    assert [space["classes"][c]["memorised"] for c in "012"] == [False, False, True]
    assert space["all"]["images"] == 600
    assert sum(counted["near_copies"] for counted in space["clients"].values()) == space["all"]["near_copies"]
    for name in ("copied", "control", "images"):
        assert sum(counted[name] for counted in space["classes"].values()) == space["all"][name]


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (50, 400)])
def test_clopper_pearson_has_half_the_error_on_each_side(k: int, n: int) -> None:
    low, high = clopper_pearson(k / n, n)
    assert (binom.sf(k - 1, n, low) if k else 0.025) == pytest.approx(0.025)
    assert (binom.cdf(k, n, high) if k < n else 0.025) == pytest.approx(0.025)
    assert (k == 0) == (low == 0)
    assert (k == n) == (high == 1)


# How few copies the audit finds, and how rarely it accuses


def honest(seed: int, n: int = 150, client: int = 0, space: Space = pixel_space) -> Compared:
    seen, synthetic, unseen = (sample(n, name, seed, client) for name in ("seen", "made", "unseen"))
    return compare(subject(client, synthetic, seen, unseen, seed), space, seed)


def with_copies(compared: Compared, planted: Planted, seed: int) -> Examples:
    """Return the synthetic images with the planted copies in their rows."""
    copies = copies_of(compared.subject.training, numpy_generator(seed, "copies", compared.subject.client))
    x, y = compared.subject.synthetic.x.clone(), compared.subject.synthetic.y.clone()
    x[planted.rows], y[planted.rows] = copies.x[planted.copies], copies.y[planted.copies]
    return Examples(x, y)


def coarse(records: torch.Tensor):
    """Other distances, with many ties: in units of 150."""
    distances = pixel_space(records)
    return lambda x: (distances(x) / 150).round()


@pytest.mark.parametrize(("space", "label"), [(pixel_space, None), (coarse, 1)])
@pytest.mark.long
def test_counts_for_a_pool_with_planted_copies_equal_counts_measured_again(space: Space, label: int | None) -> None:
    clients = [honest(3, 60, client, space) for client in range(2)]
    for n in (1, 7, 20, 40):
        verdict = verdicts(clients, n, 0, label)
        for outcome, planted in islice(zip(verdict, plantings(clients, n, 0, label), strict=True), 4):
            assert sum(len(p.rows) for p in planted.values()) == min(n, 120 if label is None else 40)
            total = np.zeros(7)
            for i, unplanted in enumerate(clients):
                if i not in planted:
                    total += counts(unplanted, label)
                    continue
                pool = with_copies(unplanted, planted[i], 3)
                again = counts(compare(replace(unplanted.subject, synthetic=pool), space, 3), label)
                assert label is None or torch.equal(pool.y, unplanted.subject.synthetic.y)
                assert np.array_equal(counts(unplanted, label, planted[i]), again)
                total += again
            assert memorised(total) == outcome


def test_copies_are_exact_moved_and_mirrored_in_equal_parts() -> None:
    seen = sample(600, "seen")
    copies = copies_of(seen, numpy_generator("copies"))
    assert pixel_space(seen.x)(copies.x).min(1).values.max() == 0
    exact = {x.numpy().tobytes() for x in seen.x}
    mirrored = {x.numpy().tobytes() for x in seen.x.flip(-1)}
    kinds = Counter((x.numpy().tobytes() in exact, x.numpy().tobytes() in mirrored) for x in copies.x)
    assert set(kinds) == {(True, False), (False, True), (False, False)}
    assert all(abs(number - 200) < 4 * np.sqrt(600 * 2 / 9) for number in kinds.values())


def test_the_smallest_detectable_share_of_copies_is_detected_and_the_next_lower_is_not() -> None:
    client = honest(0)
    fewest = fewest_copies([client], 0)
    assert fewest is not None
    assert sum(verdicts([client], fewest, 0)) >= ENOUGH > 0.9 * DRAWS
    before = max(n for n in (int(np.ceil(150 * share)) for share in SHARES) if n < fewest)
    assert sum(verdicts([client], before, 0)) < ENOUGH
    verdict = audit([client.subject], {"pixels": pixel_space}, 0).record()["pixels"]["all"]
    assert (verdict["finds"], verdict["finds_images"], verdict["memorised"]) == (fewest / 150, fewest, False)
    assert f" {fewest} copies" in power("pixels", verdict)
    assert [*verdicts([client], 13, 0)] == [*verdicts([client], 13, 0)]
    rows = {tuple(p[0].rows.tolist()) for seed in (0, 1) for p in plantings([client], 5, seed)}
    assert len(rows) == 2 * DRAWS


def test_where_too_few_images_could_show_anything_no_share_is_found() -> None:
    """Nine coins never fall so that chance is refuted at one in two thousand."""
    verdict = audit([honest(0, 9).subject], {"pixels": pixel_space}, 0).record()["pixels"]["all"]
    assert (verdict["memorised"], verdict["finds"], verdict["finds_images"]) == (False, None, None)
    assert "would not have detected copies" in power("pixels", verdict)


@pytest.mark.parametrize("pool", ["fresh", "the same again", "blurry"])
@pytest.mark.long
def test_a_pool_without_copies_is_accused_no_more_often_than_stated(pool: str) -> None:
    """Nothing was memorised, so seen images may change places with held-out ones of their class: 4000 times."""
    client = honest(5)
    x = client.subject.synthetic.x
    if pool == "the same again":
        x = x[(150 * torch.rand(150, generator=generator("again")) ** 4).long()]
    if pool == "blurry":
        x = torch.stack([x[k::3].float().mean(0) for k in range(3)]).round().to(torch.uint8).repeat(50, 1, 1, 1)
    compared = compare(replace(client.subject, synthetic=Examples(x, client.subject.synthetic.y)), pixel_space, 5)
    m, draws, p_values = 150, numpy_generator("changes"), []
    bits = np.unpackbits(compared.nearest.below, axis=2, count=2 * m)
    for _ in range(4000):
        swapped = draws.random(m) < 0.5
        places = np.concatenate([np.arange(m) + m * swapped, np.arange(m) + m * ~swapped])  # where each record goes
        below = np.zeros_like(bits)
        below[:, :, places] = bits
        record = places[compared.nearest.record]
        held_out = (record >= m).astype(float)
        swapped_nearest = replace(compared.nearest, record=record, to_matched=held_out, to_held_out=1 - held_out,
                       below=np.packbits(below, axis=2))  # fmt: skip
        p_values.append(chances(counts(replace(compared, nearest=swapped_nearest))))
    for level in (0.1, 0.01, 0.001):
        assert np.all(np.mean(np.array(p_values) < level, 0) <= level + 4 * np.sqrt(level / 4000))
    assert PARTS.sum() == 1
