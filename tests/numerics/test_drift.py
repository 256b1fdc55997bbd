"""Drifts of the sizes that docs/low-precision.md lists are found, and windows in which nothing changed are silent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.inference.drift import QUANTILES, Alarm, DriftCheck, DriftReference, _probabilities

NAMES = ["normal", "lognormal", "exponential", "student", "half zero", "whole", "constant"]
CONTINUOUS = 4
SHARES = ["unseen ids of user", "blanks of price"]
WINDOW, REFERENCE = 2048, 16_384


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bell-shaped, skewed, heavy-tailed, zero-inflated, discrete and constant numbers that depend on one another."""
    generator = np.random.default_rng(seed)
    common = generator.standard_normal(samples)
    z = 0.6 * common[:, None] + 0.8 * generator.standard_normal((samples, 4))
    student = generator.standard_t(2, samples)
    columns = [
        z[:, 0], np.exp(1.5 * z[:, 1]), generator.exponential(3.0, samples), student,
        np.where(z[:, 2] > 0, np.exp(z[:, 3]), 0.0), generator.poisson(3.0, samples), np.full(samples, 2.5),
    ]  # fmt: skip
    flags = generator.random((samples, 2)) < [0.03, 0.2]
    return torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(flags)


@pytest.fixture(scope="module")
def reference() -> DriftReference:
    numbers, flags = drawn(REFERENCE, 1)
    return DriftReference.of(NAMES, numbers, SHARES, flags)


def alarms(reference: DriftReference, numbers: Tensor, flags: Tensor | None = None, **options: float) -> list[Alarm]:
    check = DriftCheck(reference)
    for part in range(0, len(numbers), 700):
        window = slice(part, part + 700)
        check.update(numbers[window], torch.zeros(len(numbers[window]), 2).bool() if flags is None else flags[window])
    return check.alarms(**options)


def moved(kind: str, column: int, seed: int) -> tuple[Tensor, Tensor]:
    """A clean window with one number drifted by the least size that the documentation lists."""
    numbers, flags = drawn(WINDOW, seed)
    generator = np.random.default_rng([seed, 9])
    x = numbers[:, column]
    if kind == "mean":
        x += 0.25 * (x.quantile(0.841) - x.quantile(0.159)) / 2
    elif kind.startswith("scale"):
        middle = x.median()
        x.copy_(middle + (x - middle) * float(kind.split()[1]))
    elif kind == "tail":
        hit = torch.from_numpy(generator.random(WINDOW) < 0.015)
        x[hit] = 10 * drawn(REFERENCE, 1)[0][:, column].max()
    elif kind == "unseen":
        flags[:, column] |= torch.from_numpy(generator.random(WINDOW) < 0.05)
    elif kind == "missing":
        x[torch.from_numpy(generator.random(WINDOW) < 0.1)] = x.mean()
    return numbers, flags


KINDS = [
    *((kind, column) for kind in ("mean", "scale 1.5", "scale 0.5", "tail") for column in range(CONTINUOUS)),
    ("unseen", 0),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "column"), KINDS)
def test_drifts_of_the_listed_sizes_are_found(
    kind: str, column: int, reference: DriftReference, fuzz_inputs: Callable[[int], int]
) -> None:
    """At least 99 % of them in one window of 2,048 samples; --fuzz 1000 takes as many as the claim needs."""
    trials = fuzz_inputs(20)
    expected = SHARES[0] if kind == "unseen" else NAMES[column]
    missed = sum(
        expected not in {one.name for one in alarms(reference, *moved(kind, column, seed))}
        for seed in range(5000, 5000 + trials)
    )
    assert missed <= 0.01 * trials


def test_windows_of_the_same_distribution_raise_no_alarm(
    reference: DriftReference, fuzz_inputs: Callable[[int], int]
) -> None:
    windows = fuzz_inputs(100)
    false = sum(bool(alarms(reference, *drawn(WINDOW, seed))) for seed in range(2, 2 + windows))
    assert false < 0.01 * windows


def test_the_rate_of_false_alarms_is_what_is_asked_for_over_references_of_any_size(
    fuzz_inputs: Callable[[int], int],
) -> None:
    """At ten per cent, so that few windows tell; references are drawn anew each time, as small as the windows."""
    windows = fuzz_inputs(150)
    false = 0
    for seed in range(windows):
        numbers, flags = drawn(300, 10_000 + 2 * seed)
        found = DriftReference.of(NAMES, numbers, SHARES, flags)
        false += bool(alarms(found, *drawn(300, 10_001 + 2 * seed), false_alarms=0.1))
    assert false <= 0.1 * windows + 2


def test_what_moved_is_named_with_what_it_was_and_is(reference: DriftReference) -> None:
    by_name = {one.name: one for one in alarms(reference, *moved("mean", 0, 3))}
    assert by_name["normal"].check == "mean"
    assert by_name["normal"].now - by_name["normal"].before == pytest.approx(0.25, abs=0.1)
    by_name = {one.name: one for one in alarms(reference, *moved("scale 4", 0, 3))}
    assert by_name["normal"].check == "scale"
    assert by_name["normal"].now / by_name["normal"].before == pytest.approx(4, rel=0.1)
    by_name = {one.name: one for one in alarms(reference, *moved("tail", 2, 3))}
    assert by_name["exponential"].check.startswith("share above ")
    assert by_name["exponential"].now > 0.01
    by_name = {one.name: one for one in alarms(reference, *moved("unseen", 0, 3))}
    assert by_name[SHARES[0]].before == pytest.approx(0.03, abs=0.01)
    assert by_name[SHARES[0]].now == pytest.approx(0.08, abs=0.02)
    assert "unseen ids of user: share 0.03" in str(by_name[SHARES[0]])


def test_every_feature_times_four_with_its_mean_as_it_was_is_found(reference: DriftReference) -> None:
    numbers, flags = drawn(WINDOW, 4)
    mean = numbers.mean(0)
    found = alarms(reference, mean + 4 * (numbers - mean), flags)
    assert {one.name for one in found} >= set(NAMES[:6])


def test_more_blanks_zeros_and_whole_numbers_are_found(reference: DriftReference) -> None:
    numbers, flags = drawn(WINDOW, 5)
    numbers[::8, 4], numbers[:, 5], flags[:, 1] = 0.0, numbers[:, 5] + (numbers[:, 5] > 3), flags[:, 0]
    assert {one.name for one in alarms(reference, numbers, flags)} == {"half zero", "whole", SHARES[1]}


def test_samples_that_are_lost_are_counted_and_raise_an_alarm_where_they_are_more(reference: DriftReference) -> None:
    numbers, flags = drawn(WINDOW, 6)
    numbers[::50, 2] = math.nan
    check = DriftCheck(reference)
    check.update(numbers, flags)
    assert (check.samples, check.lost) == (WINDOW - 41, 41)
    assert [one.name for one in check.alarms()] == ["samples that are not finite"]
    again, their_flags = drawn(REFERENCE, 1)
    again[::50, 2] = math.nan
    assert alarms(DriftReference.of(NAMES, again, SHARES, their_flags), numbers, flags) == []


def test_constants_and_mistakes() -> None:
    constant, other = torch.ones(100, 1), torch.full((100, 1), 2.0)
    found = DriftReference.of(["n"], constant)

    def beside(numbers: Tensor) -> list[Alarm]:
        check = DriftCheck(found)
        check.update(numbers)
        return check.alarms()

    assert beside(constant) == []
    (alarm,) = beside(other)
    assert (alarm.name, alarm.check, alarm.before, alarm.now) == ("n", "mean", 1.0, 2.0)
    for numbers in (constant[:0], constant[:1], torch.full((5, 1), math.nan)):
        with pytest.raises(NumericsError, match="at least two are needed"):
            beside(numbers)
        with pytest.raises(NumericsError, match="at least two are needed"):
            DriftReference.of(["n"], numbers)
    with pytest.raises(NumericsError, match="do not go together"):
        DriftReference.of(["n", "m"], constant)


def test_samples_of_a_few_users_count_as_few(fuzz_inputs: Callable[[int], int]) -> None:
    """Each user has a level of its own: a window of 60 others is no drift, though its 1,200 samples lie elsewhere."""

    def sessions(users: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = np.random.default_rng(seed)
        user = np.repeat(np.arange(users), 20)
        level = generator.standard_normal(users)[user]
        numbers = torch.from_numpy((level + 0.3 * generator.standard_normal(len(user)))[:, None])
        return numbers, torch.from_numpy((level > 1)[:, None]), torch.from_numpy(user)

    false, blind = 0, 0
    windows = fuzz_inputs(60)
    numbers, flags, user = sessions(400, 0)
    grouped, ungrouped = (DriftReference.of(["n"], numbers, ["s"], flags, groups) for groups in (user, None))
    for seed in range(1, 1 + windows):
        numbers, flags, user = sessions(60, seed)
        check, naive = DriftCheck(grouped), DriftCheck(ungrouped)
        for part in range(0, len(user), 500):  # a user's samples may come in several parts
            window = slice(part, part + 500)
            check.update(numbers[window], flags[window], user[window])
        naive.update(numbers, flags)
        false += bool(check.alarms(0.01))
        blind += bool(naive.alarms(0.01))
    assert false <= 0.02 * windows
    assert blind > 0.5 * windows
    numbers, flags, user = sessions(60, 7)
    check = DriftCheck(grouped)
    check.update(numbers + 3, flags, user)
    assert [one.name for one in check.alarms()] == ["n"]


def test_probabilities_are_those_of_fishers_exact_test() -> None:
    generator = np.random.default_rng(0)
    n, m = generator.integers(2, 400, 200), generator.integers(2, 400, 200)
    a, b = generator.integers(0, n + 1), generator.integers(0, m + 1)
    more, fewer = _probabilities(*(one.astype(np.float64) for one in (a, n, b, m)), np.ones(200), np.ones(200))
    for i in range(200):
        table = [[b[i], m[i] - b[i]], [a[i], n[i] - a[i]]]
        up = b[i] / m[i] > a[i] / n[i]
        expected = scipy.stats.fisher_exact(table, alternative="greater" if up else "less")[1]
        assert (more[i] if up else fewer[i]) == pytest.approx(expected, rel=1e-7)


def test_a_reference_is_read_as_it_was_written(reference: DriftReference) -> None:
    content = json.loads(json.dumps(reference.to_json(), allow_nan=False))
    assert DriftReference.from_json(content) == reference


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("samples",), 1), (("samples",), True), (("samples",), 3.0), (("lost",), -1), (("numbers",), []),
        (("numbers", 0, "name"), 3), (("numbers", 0, "mean"), math.nan), (("numbers", 0, "mean"), True),
        (("numbers", 0, "deviation"), -1e-9), (("numbers", 0, "effect"), 0.99), (("shares", 0, "effect"), 0.99),
        (("numbers", 0, "boundaries", 0, 1), 1), (("numbers", 0, "boundaries", 0, 2), REFERENCE + 1),
        (("numbers", 0, "boundaries", 0, 2), -1), (("shares", 0, "true"), REFERENCE + 1), (("shares", 0, "name"), None),
    ],
)  # fmt: skip
def test_a_damaged_reference_is_refused(reference: DriftReference, path: tuple[Any, ...], value: Any) -> None:
    content = json.loads(json.dumps(reference.to_json()))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(NumericsError, match="this is no reference"):
        DriftReference.from_json(content)


def test_extremes_of_a_reference_are_read(reference: DriftReference) -> None:
    content = json.loads(json.dumps(reference.to_json()))
    content["lost"] = 5
    content["numbers"][0] |= {"deviation": 0.0, "effect": 1.0, "boundaries": [[0.5, True, REFERENCE], [1.0, False, 0]]}
    content["shares"][0]["true"] = REFERENCE + 5
    assert DriftReference.from_json(content).to_json() == content
    few = {"samples": 2, "lost": 0, "numbers": [content["numbers"][0] | {"boundaries": []}], "shares": []}
    assert DriftReference.from_json(few).to_json() == few


def test_boundaries_lie_at_quantiles_and_count_the_samples_above_them() -> None:
    numbers, _ = drawn(1001, 11)
    found = DriftReference.of(NAMES, numbers)
    for column, own in enumerate(found.boundaries):
        x = numbers[:, column].numpy()
        quantiles = np.sort(x)[np.round(np.array(QUANTILES) * 1000).astype(int)]  # of 1,001 samples every one is whole
        assert {one.value for one in own} <= set(quantiles.tolist())
        for one in own:
            assert one.above == (x >= one.value if one.inclusive else x > one.value).sum()
        counts = sorted(one.above for one in own)
        assert counts[0] == 0
        assert len(set(counts)) == len(counts)
        for value in quantiles:  # every count that a quantile could give is there, or one that differs by one
            for count in ((x >= value).sum(), (x > value).sum()):
                assert min(abs(count - other) for other in counts) <= 1
    assert [(one.value, one.inclusive, one.above) for one in found.boundaries[6]] == [
        (2.5, True, 1001),
        (2.5, False, 0),
    ]


def test_design_effects_are_those_of_sums_over_groups() -> None:
    """Kish 1965: the variance of a mean over clusters against that of a simple random sample of its size."""
    generator = np.random.default_rng(12)
    sizes = generator.integers(1, 12, 50)
    user = np.repeat(np.arange(50), sizes)
    flags = generator.random((len(user), 2)) < np.stack([0.2 + 0.6 * (user % 2), np.full(len(user), 0.3)], 1)
    numbers = torch.zeros(len(user), 1)
    found = DriftReference.of(["n"], numbers, SHARES, torch.from_numpy(flags), torch.from_numpy(user))
    for share in range(2):
        deviations = flags[:, share] - flags[:, share].mean()
        clusters = np.array([deviations[user == one].sum() for one in range(50)])
        expected = (clusters**2).sum() * 50 / 49 / (deviations**2).sum()
        assert found.effects[1 + share] == pytest.approx(max(1.0, expected), rel=1e-9)
    assert found.effects[0] == 1.0  # a constant
    assert found.effects[1] > 2
    alone = DriftReference.of(["n"], numbers, SHARES, torch.from_numpy(flags), torch.zeros(len(user)).long())
    assert set(alone.effects) == {float(len(user))}


def test_probabilities_of_groups_are_those_of_fewer_samples_rounded_towards_each_other() -> None:
    one = np.ones(1)
    more, fewer = _probabilities(30 * one, 100 * one, 45 * one, 90 * one, 3 * one, 2 * one)
    # 100 / 3 are 33 samples of which 30 % are 9.9, and 90 / 2 are 45 of which half are 22.5
    assert more[0] == pytest.approx(scipy.stats.fisher_exact([[22, 23], [10, 23]], alternative="greater")[1], rel=1e-7)
    assert fewer[0] == 1
    more, fewer = _probabilities(50 * one, 100 * one, 27 * one, 90 * one, 3 * one, 2 * one)
    assert fewer[0] == pytest.approx(scipy.stats.fisher_exact([[14, 31], [16, 17]], alternative="less")[1], rel=1e-7)
    assert more[0] == 1


def test_an_alarms_probability_is_its_own_times_the_number_of_checks() -> None:
    numbers, flags = drawn(WINDOW, 6)
    flags[:400, 0] = True
    before, their_flags = drawn(REFERENCE, 1)
    before[5::100, 2] = numbers[5::100, 2] = math.nan  # a lost sample has its shares nevertheless
    reference = DriftReference.of(NAMES, before, SHARES, their_flags)
    assert (reference.samples, reference.lost) == (REFERENCE - 164, 164)
    check = DriftCheck(reference)
    check.update(numbers, flags)
    (alarm,) = check.alarms()
    table = [[int(flags[:, 0].sum()), int((~flags[:, 0]).sum())], [reference.true[0], REFERENCE - reference.true[0]]]
    comparisons = 2 * sum(len(own) for own in reference.boundaries) + 2 * 2 + 1
    expected = scipy.stats.fisher_exact(table, alternative="greater")[1] * comparisons
    assert alarm.probability == pytest.approx(expected, rel=1e-6)
    assert (alarm.before, alarm.now) == (reference.true[0] / REFERENCE, table[0][0] / WINDOW)
