"""The aggregation against a second implementation in plain loops (reference.py), and the cases that trap it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crad_p2p.aggregation import RULES, Aggregation, aggregate, screen
from crad_p2p.data.epoch import plain_batches
from crad_p2p.manifest import CROSS_ENTROPY_LIMIT
from crad_p2p.methods.table4 import WEIGHTS, Evidence
from crad_p2p.statistics import agresti_coull, measure, precision

PROPERTY = settings(deadline=None, derandomize=True, max_examples=120, database=None)
EMPTY = ("uniform", "zero", "student")


def draw_posteriors(
    rng: np.random.Generator, teachers: int, samples: int, classes: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Softmax of normal logits; ``scale`` of 50 and more gives exact zeros and ones."""
    logits = torch.from_numpy(rng.normal(0, scale, (teachers, samples, classes)))
    return torch.softmax(logits.float(), -1).to(dtype)


def draw_counts(rng: np.random.Generator, teachers: int, classes: int) -> tuple[Tensor, Tensor]:
    """n from none to many, h between 0 and n, both ends often."""
    n = rng.choice([0, 1, 2, 3, 7, 40, 258], (teachers, classes))
    h = np.round(n * rng.choice([0, 0, 0.3, 0.8, 1, 1], (teachers, classes))).astype(np.int64)
    return torch.from_numpy(n), torch.from_numpy(h)


def draw_cross_entropy(rng: np.random.Generator, teachers: int, classes: int) -> Tensor:
    """From none to the most that may be published."""
    drawn = rng.gamma(0.5, 2.0, (teachers, classes))
    drawn[rng.random((teachers, classes)) < 0.1] = 0
    drawn[rng.random((teachers, classes)) < 0.1] = CROSS_ENTROPY_LIMIT
    return torch.from_numpy(drawn)


def assert_matches_reference(q: Tensor, n: Tensor, h: Tensor, **options: Any) -> reference.Result:
    """Same teachers kept, same mass, same target; rows that did not take Eq. 3 sum to one."""
    result = aggregate(q, n, h, **options)
    more = {name: options.pop(name, None) for name in ("student", "cross_entropy")}
    expected = reference.aggregate(
        q.double().tolist(),
        n.tolist(),
        h.tolist(),
        **{name: None if value is None else value.double().tolist() for name, value in more.items()},
        **options,
    )
    assert result.target.dtype == result.mass.dtype == torch.float64
    assert result.kept.tolist() == expected.kept
    assert result.collapsed.tolist() == expected.collapsed
    assert_weights_are_those_that_counted(result)
    np.testing.assert_allclose(result.mass.numpy(), expected.mass, rtol=1e-11, atol=1e-14)
    wanted = np.array(expected.target)
    np.testing.assert_allclose(  # bfloat16 rows do not sum to one, and so nor does their mean
        (result.target / result.target.sum(-1, keepdim=True)).numpy(),
        wanted / wanted.sum(-1, keepdims=True),
        rtol=1e-11,
        atol=1e-14,
    )
    sums = result.target.sum(-1).numpy()[~np.array(expected.collapsed)]
    np.testing.assert_allclose(sums, 1, rtol=0, atol=1e-12)
    return expected


def assert_weights_are_those_that_counted(result: Aggregation) -> None:
    """What is said of how a target came about leads to the target: who is kept, with what share, and nobody else."""
    assert not bool(result.weights[~result.kept].any())
    is_clear = result.kept.any(0) & ~result.collapsed[:, None]
    mean = (result.weights * result.q).sum(0) / result.weights.sum(0)
    found = (result.target * result.mass[:, None])[is_clear]
    torch.testing.assert_close(mean[is_clear], found, rtol=1e-9, atol=1e-12)
    if result.screening is not None:
        assert torch.equal(result.screening.kept, result.kept)
        assert not bool((result.kept & ~result.screening.supported).any())


# ------------------------------------------------------------------------------------------- against the second reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0, 200.0])
@pytest.mark.parametrize("teachers", range(1, 10))
def test_random_inputs(teachers: int, scale: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([teachers, int(scale * 10)])
    others = zip((rule for rule in RULES if rule not in ("crad", "stage1")), itertools.cycle(EMPTY), strict=False)
    for rule, empty_class in (*itertools.product(("crad", "stage1"), EMPTY), *others):
        classes = int(rng.choice([1, 2, 3, 10]))
        q = draw_posteriors(rng, teachers, 3, classes, scale, dtype)
        n, h = draw_counts(rng, teachers, classes)
        student = draw_posteriors(rng, 1, 3, classes, 1.0, torch.float32)[0]
        assert_matches_reference(
            q,
            n,
            h,
            rule=rule,
            empty_class=empty_class,
            student=student,
            cross_entropy=draw_cross_entropy(rng, teachers, classes),
            min_support=int(rng.integers(1, 4)),
        )


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_classes(rule: str) -> None:
    rng = np.random.default_rng(100)
    n, h = draw_counts(rng, 9, 100)
    q, cross_entropy = draw_posteriors(rng, 9, 4, 100, 3.0, torch.float32), draw_cross_entropy(rng, 9, 100)
    assert_matches_reference(q, n, h, rule=rule, cross_entropy=cross_entropy)


@st.composite
def coarse_inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Posteriors from a coarse grid, so that ties, zeros, ones and empty classes are the rule."""
    teachers, samples, classes = draw(st.integers(1, 9)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    weights = draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=classes, max_size=classes).filter(any),
            min_size=teachers * samples,
            max_size=teachers * samples,
        )
    )
    q = torch.tensor([[w / sum(row) for w in row] for row in weights], dtype=torch.float64)
    n = draw(st.lists(st.integers(0, 5), min_size=teachers * classes, max_size=teachers * classes))
    h = [draw(st.integers(0, most)) for most in n]
    return {
        "q": q.reshape(teachers, samples, classes).to(draw(st.sampled_from([torch.float32, torch.float64]))),
        "n": torch.tensor(n).reshape(teachers, classes),
        "h": torch.tensor(h).reshape(teachers, classes),
        "cross_entropy": torch.tensor([[0.0, 0.2, 1000.0][c % 3] for c in n]).reshape(teachers, classes),
        "rule": draw(st.sampled_from(RULES)),
        "empty_class": draw(st.sampled_from(EMPTY)),
        "min_support": draw(st.integers(1, 3)),
        "student": torch.full((samples, classes), 1 / classes),
    }


@given(coarse_inputs())
@PROPERTY
def test_degenerate_inputs(inputs: dict[str, Any]) -> None:
    assert_matches_reference(**inputs)


@given(coarse_inputs(), st.randoms(use_true_random=False))
@PROPERTY
def test_the_order_of_the_teachers_does_not_matter(inputs: dict[str, Any], random: Any) -> None:
    arrays = [inputs.pop(name) for name in ("q", "n", "h")]
    cross_entropy = inputs.pop("cross_entropy")
    order = list(range(len(arrays[0])))
    random.shuffle(order)
    one = aggregate(*arrays, cross_entropy=cross_entropy, **inputs)
    two = aggregate(*(array[order] for array in arrays), cross_entropy=cross_entropy[order], **inputs)
    assert torch.equal(one.kept[order], two.kept)
    torch.testing.assert_close(one.target, two.target, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.mass, two.mass, rtol=0, atol=1e-12)


@given(coarse_inputs())
@PROPERTY
def test_samples_do_not_touch_each_other(inputs: dict[str, Any]) -> None:
    q, n, h, student = (inputs.pop(name) for name in ("q", "n", "h", "student"))
    whole = aggregate(q, n, h, student=student, **inputs)
    for b in range(q.shape[1]):
        alone = aggregate(q[:, b : b + 1], n, h, student=student[b : b + 1], **inputs)
        assert torch.equal(alone.target[0], whole.target[b])
        assert torch.equal(alone.kept[:, 0], whole.kept[:, b])


# ----------------------------------------------------------------------------------------------------------- the filter


def kept_of(values: list[float], supported: list[bool] | None = None) -> list[bool]:
    """The filter on one sample and one class."""
    mask = torch.tensor(supported or [True] * len(values))[:, None]
    return screen(torch.tensor(values, dtype=torch.float64)[:, None, None], mask).kept[:, 0, 0].tolist()


def test_the_filter_says_what_it_found() -> None:
    q = torch.tensor([0.1, 0.3, 0.8, 0.9], dtype=torch.float64)[:, None, None]
    found = screen(q, torch.tensor([True, True, True, False])[:, None])
    assert found.consensus.item() == pytest.approx(0.4)
    assert found.deviation.flatten().tolist() == pytest.approx([0.3, 0.1, 0.4, math.inf])
    assert found.threshold.item() == pytest.approx(0.3)
    assert found.supported.flatten().tolist() == [True, True, True, False]
    assert found.kept.flatten().tolist() == [True, True, False, False]
    nobody = screen(q, torch.zeros(4, 1, dtype=torch.bool))
    assert (nobody.consensus.item(), nobody.threshold.item()) == (0.0, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("teachers", [2, 5])
def test_one_or_two_supported_teachers_are_always_kept(teachers: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(teachers)
    for scale in (0.1, 1.0, 5.0, 60.0):
        q = draw_posteriors(rng, teachers, 64, 100, scale, dtype)
        n = torch.zeros(teachers, 100, dtype=torch.int64)
        n[-2:, :60] = 2
        n[0, 60:] = 2
        kept = aggregate(q, n, n).kept
        assert bool((kept == (n >= 2)[:, None]).all())


@pytest.mark.parametrize("k", range(1, 10))
def test_half_of_the_supported_are_kept_rounded_up(k: int) -> None:
    rng = np.random.default_rng(k)
    q = torch.from_numpy(rng.dirichlet(np.ones(10), (k + 3, 200)).transpose(0, 1, 2)[:, :, :5])
    supported = torch.zeros(k + 3, 5, dtype=torch.bool)
    for c in range(5):
        supported[rng.permutation(k + 3)[:k], c] = True
    kept = screen(q, supported).kept
    assert not bool((kept & ~supported[:, None]).any())
    number = kept.sum(0)
    assert bool((number == (2 if k == 2 else math.ceil(k / 2))).all())


def test_the_outlying_half_is_dropped() -> None:
    assert kept_of([0.0, 0.4, 0.5, 0.6, 1.0]) == [
        False,
        True,
        True,
        True,
        False,
    ]  # mean .5; median of the deviations .1
    assert kept_of([0.1, 0.2, 0.3, 0.9]) == [False, True, True, False]  # mean .375
    assert kept_of([0.0, 0.1, 0.9]) == [True, True, False]
    assert kept_of([0.7]) == [True]
    assert kept_of([0.1, 0.2, 0.3, 0.9], [False, True, True, False]) == [False, True, True, False]
    assert kept_of([0.1, 0.2], [False, False]) == [False, False]


def test_the_consensus_is_of_the_supported_only() -> None:
    # Mean .23 of the first three; the other two would move it to .5, and 0.4 would be kept instead of 0.1.
    supported = [True, True, True, False, False]
    assert kept_of([0.1, 0.2, 0.4, 0.9, 0.9], supported) == [True, True, False, False, False]


def test_ties_are_kept() -> None:
    assert kept_of([0.25] * 6) == [True] * 6
    assert kept_of([0.0, 0.0, 0.0, 0.0, 1.0]) == [True, True, True, True, False]
    assert kept_of([0.0, 0.0, 1.0, 1.0]) == [True] * 4


def test_what_counts_as_a_tie() -> None:
    def spread(x: float, y: float) -> list[bool]:
        return kept_of([0.5 - x, 0.5 + x, 0.5 - y, 0.5 + y])  # deviations x x y y, their median between

    near, far = [True] * 4, [True, True, False, False]
    assert spread(0.125, 0.125 * (1 + 1e-10)) == near
    assert spread(0.125, 0.125 * (1 + 1e-8)) == far
    assert spread(0.0, 1e-12) == near
    assert spread(0.0, 1e-11) == far


# ---------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize(
    ("n", "accuracy", "expected"),
    [
        (0, 0, 16),
        (1, 0, 20.8),
        (1, 1, 20.8),
        (2, 0.5, 24),
        (2, 0, 27),
        (2, 1, 27),
        (180, 0.8, 1123),
        (258, 0.905, 2881),
        (180, 1, 17114),
        (1000, 1, 505014),
    ],
)
def test_the_known_weights(n: int, accuracy: float, expected: float) -> None:
    weight = float(precision(torch.tensor(float(n)), torch.tensor(n * accuracy, dtype=torch.float64)))
    assert weight == pytest.approx(expected, abs=0.6 if expected > 100 else 0.05)


def all_counts() -> tuple[Tensor, Tensor]:
    pairs = [(n, h) for n in (*range(20), 180, 1000) for h in range(0, n + 1, 1 + n // 100)]
    return tuple(torch.tensor(column) for column in zip(*pairs, strict=True))  # type: ignore[return-value]


def test_the_weight_has_a_closed_form_and_its_epsilon_is_too_small_to_matter() -> None:
    n, h = all_counts()
    weight = precision(n, h)
    assert weight.dtype == torch.float64
    closed = (n + 4).double() ** 3 / ((h + 2) * (n - h + 2)).double()
    torch.testing.assert_close(weight, closed, rtol=1e-6, atol=0)
    exact = torch.tensor(
        [reference.precision(*pair) for pair in zip(n.tolist(), h.tolist(), strict=True)], dtype=torch.float64
    )
    torch.testing.assert_close(weight, exact, rtol=1e-10, atol=0)  # epsilon itself shows at the largest: 5e-7


def test_the_weight_rewards_decisiveness_not_correctness() -> None:
    n, h = all_counts()
    torch.testing.assert_close(precision(n, h), precision(n, n - h), rtol=1e-11, atol=0)


def test_weights_are_per_teacher_and_class() -> None:
    q = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]])
    n, h = torch.tensor([[2, 180], [180, 2]]), torch.tensor([[1, 144], [144, 2]])  # weights 24, 1123 and 1123, 27
    target = aggregate(q, n, h).target[0]
    heavy = 184**3 / (146 * 38)
    first = (24 * 0.9 + heavy * 0.5) / (24 + heavy)
    second = (heavy * 0.1 + 27 * 0.5) / (heavy + 27)
    expected = torch.tensor([first, second], dtype=torch.float64) / (first + second)
    torch.testing.assert_close(target, expected, rtol=0, atol=1e-7)  # 0.9 and 0.1 are float32


def test_all_correct_and_all_wrong_weigh_the_same() -> None:
    rng = np.random.default_rng(3)
    q = draw_posteriors(rng, 7, 8, 10, 2.0, torch.float32)
    n = torch.from_numpy(rng.integers(2, 50, (7, 10)))
    right, wrong = aggregate(q, n, n), aggregate(q, n, torch.zeros_like(n))
    torch.testing.assert_close(right.target, wrong.target, rtol=1e-10, atol=0)
    assert not torch.allclose(right.target, aggregate(q, n, n // 2).target, atol=1e-4)


def test_stage1_is_the_filter_alone() -> None:
    rng = np.random.default_rng(4)
    q = draw_posteriors(rng, 6, 8, 10, 1.0, torch.float32)
    n, h = draw_counts(rng, 6, 10)
    one, other = aggregate(q, n, h, rule="stage1"), aggregate(q, n, n - h, rule="stage1")
    assert torch.equal(one.target, other.target)
    assert torch.equal(one.kept, aggregate(q, n, h, rule="crad").kept)
    assert not torch.allclose(one.target, aggregate(q, n, h, rule="crad").target, atol=1e-4)


def rule_weights(rule: str, n: Tensor, h: Tensor, cross_entropy: Tensor | None = None) -> Tensor:
    return WEIGHTS[rule](Evidence(n.double(), h.double(), cross_entropy))


def test_the_rows_of_table_4_by_hand() -> None:
    """n = 6, h = 3: a~ = 1/2, sigma^2 = 1/40."""
    n, h = torch.tensor([[6]]), torch.tensor([[3]])
    expected = {
        "precision": 40,
        "crad": 40,
        "stage1": 1,
        "acc": 0.5,
        "sup": 6,
        "sm": math.exp(-1 / 40),
        "lcb": 0.5 - math.sqrt(1 / 40),
        "ce": 1 / 0.251,
        "inv_sigma": math.sqrt(40),
    }
    assert set(expected) == set(WEIGHTS)
    for rule, weight in expected.items():
        found = rule_weights(rule, n, h, torch.tensor([[0.25]], dtype=torch.float64))
        assert found.dtype == torch.float64
        assert float(found) == pytest.approx(weight, rel=1e-9), rule


def test_precision_is_another_name_of_crad() -> None:
    rng = np.random.default_rng(10)
    q, (n, h) = draw_posteriors(rng, 7, 8, 10, 1.0, torch.float32), draw_counts(rng, 7, 10)
    assert torch.equal(aggregate(q, n, h, rule="precision").target, aggregate(q, n, h, rule="crad").target)


def test_the_softmax_of_variances_is_stage_1_in_all_but_name() -> None:
    n, h = all_counts()
    weights = rule_weights("sm", n, h)[n >= 2]
    assert float(weights.max() / weights.min()) <= math.exp(0.25 / 6) < 1.0426
    rng = np.random.default_rng(11)
    q, (n, h) = draw_posteriors(rng, 9, 32, 10, 2.0, torch.float32), draw_counts(rng, 9, 10)
    one, other = (aggregate(q, n, h, rule=rule).target for rule in ("sm", "stage1"))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=math.exp(2 * 0.25 / 6) - 1, atol=0)


def test_the_lower_bound_never_clips() -> None:
    n, h = all_counts()
    weights = rule_weights("lcb", n, h)
    accuracy, variance = agresti_coull(n, h)
    assert torch.equal(weights, accuracy - variance.sqrt())
    assert bool((accuracy >= math.sqrt(2) * variance.sqrt()).all())
    assert float(weights.min()) > 0


def test_where_nobody_has_any_weight_those_who_are_kept_count_alike() -> None:
    q = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]], [[0.3, 0.7]]], dtype=torch.float64)
    n = torch.tensor([[9, 9], [9, 9], [0, 9]])  # the third does not count for the first class
    h = torch.tensor([[0, 0], [0, 0], [0, 9]])
    result = aggregate(q, n, h, rule="acc")
    assert result.kept[:, 0].int().tolist() == [[1, 0], [1, 1], [0, 1]]
    np.testing.assert_allclose(result.mass, [0.7 + 0.7], rtol=0, atol=1e-11)
    np.testing.assert_allclose(result.target, [[0.5, 0.5]], rtol=0, atol=1e-11)
    h[1, 0] = 1  # one that is right once counts alone
    np.testing.assert_allclose(aggregate(q, n, h, rule="acc").mass, [0.5 + 0.7], rtol=0, atol=1e-10)


def test_a_teacher_that_is_less_surprised_counts_more() -> None:
    q = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]], dtype=torch.float64)
    n = torch.full((2, 2), 9)
    cross_entropy = torch.tensor([[0.0, 0.999], [0.999, 0.999]])  # weights 1000, 1 and 1, 1
    target = aggregate(q, n, n, rule="ce", cross_entropy=cross_entropy).target[0]
    first, second = (1000 * 0.8 + 0.4) / 1001, 0.4
    np.testing.assert_allclose(target, np.array([first, second]) / (first + second), rtol=0, atol=1e-7)


def test_support_is_what_min_support_says() -> None:
    q = torch.tensor([[[0.8, 0.2]], [[0.3, 0.7]]])
    n, h = torch.tensor([[1, 2], [2, 3]]), torch.zeros(2, 2, dtype=torch.int64)
    for min_support, expected in ((1, [[1, 1], [1, 1]]), (2, [[0, 1], [1, 1]]), (3, [[0, 0], [0, 1]])):
        assert aggregate(q, n, h, min_support=min_support).kept[:, 0].int().tolist() == expected
    assert aggregate(q, n, h).kept[:, 0].int().tolist() == [[0, 1], [1, 1]]  # two by default


# --------------------------------------------------------------------------------------------- empty classes, lost mass


def test_a_class_without_support() -> None:
    q = torch.tensor([[[0.6, 0.3, 0.1]], [[0.2, 0.3, 0.5]]], dtype=torch.float64)
    n = torch.tensor([[5, 5, 1], [5, 5, 0]])
    h = torch.tensor([[2, 2, 1], [2, 2, 0]])
    student = torch.tensor([[0.2, 0.2, 0.6]])
    for empty_class, third in (("uniform", 0.3), ("zero", 0.0), ("student", 0.6)):
        result = aggregate(q, n, h, empty_class=empty_class, student=student)
        expected = np.array([0.4, 0.3, third])
        assert float(result.mass) == pytest.approx(expected.sum())
        np.testing.assert_allclose(result.target[0], expected / expected.sum(), rtol=0, atol=1e-7)
        assert not bool(result.kept[:, :, 2].any())
    assert torch.equal(aggregate(q, n, h).target, aggregate(q, n, h, empty_class="uniform").target)


@pytest.mark.parametrize("empty_class", EMPTY)
def test_no_support_anywhere(empty_class: str) -> None:
    rng = np.random.default_rng(5)
    q = draw_posteriors(rng, 4, 6, 10, 1.0, torch.float32)
    student = draw_posteriors(rng, 1, 6, 10, 1.0, torch.float32)[0]
    nothing = torch.zeros(4, 10, dtype=torch.int64)
    result = aggregate(q, nothing, nothing, empty_class=empty_class, student=student)
    expected = student.double() if empty_class == "student" else q.double().mean(0)
    torch.testing.assert_close(result.target, expected, rtol=0, atol=1e-6)
    assert not bool(result.kept.any())
    if empty_class == "zero":
        assert result.mass.tolist() == [0.0] * 6


def spiky(e: float) -> Aggregation:
    """Three teachers, each sure of a class of its own: the filter drops the sure one of every class."""
    q = [[[1 - 3 * e, e, 2 * e]], [[e, 1 - 3 * e, 2 * e]], [[e, 2 * e, 1 - 3 * e]]]
    n = torch.full((3, 3), 10)
    return aggregate(torch.tensor(q, dtype=torch.float64), n, n)


def test_collapsed_mass_takes_the_plain_mean() -> None:
    lost, left = spiky(2e-4), spiky(2.5e-4)  # masses 4.5e: below and above 1e-3
    assert lost.kept.tolist() == left.kept.tolist()
    assert lost.kept[:, 0].int().tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert float(lost.mass) == pytest.approx(9e-4)
    assert float(left.mass) == pytest.approx(1.125e-3)
    np.testing.assert_allclose(lost.target[0], np.array([1 - 2e-4, 1, 1 + 2e-4]) / 3, rtol=0, atol=1e-12)
    np.testing.assert_allclose(left.target[0], np.array([1, 1.5, 2]) / 4.5, rtol=0, atol=1e-9)
    assert float(spiky(0.0).mass) == 0.0
    np.testing.assert_allclose(spiky(0.0).target[0], [1 / 3] * 3, rtol=0, atol=1e-12)


def test_only_the_collapsed_sample_takes_the_plain_mean() -> None:
    one_hot = torch.eye(3, dtype=torch.float64)[:, None]
    agreed = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).expand(3, 1, 3)
    n = torch.full((3, 3), 10)
    result = aggregate(torch.cat([one_hot, agreed], 1), n, n)
    np.testing.assert_allclose(result.target, [[1 / 3] * 3, [0.7, 0.2, 0.1]], rtol=0, atol=1e-9)
    np.testing.assert_allclose(result.mass, [0, 1], rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ the other rules


def test_uniform_is_the_mean_whatever_the_evidence() -> None:
    rng = np.random.default_rng(6)
    q = draw_posteriors(rng, 5, 8, 10, 2.0, torch.float32)
    result = aggregate(q, *draw_counts(rng, 5, 10), rule="uniform")
    torch.testing.assert_close(result.target, q.double().mean(0), rtol=1e-6, atol=0)
    assert bool(result.kept.all())


def test_uncertainty_weighs_the_confident_teacher_more() -> None:
    q = torch.tensor([[[0.0, 0.0, 1.0, 0.0]], [[0.25, 0.25, 0.25, 0.25]]])
    n = torch.zeros(2, 4, dtype=torch.int64)
    result = aggregate(q, n, n, rule="uncertainty")
    # entropies 0 and log 4, so weights 4/5 and 1/5
    np.testing.assert_allclose(result.target[0], [0.05, 0.05, 0.85, 0.05], rtol=0, atol=1e-12)
    assert bool(result.kept.all())
    assert float(result.mass) == pytest.approx(1)


# ----------------------------------------------------------------------------------------------------- the surroundings


@pytest.mark.parametrize("rule", RULES)
def test_autocast_does_not_reach_in(rule: str) -> None:
    rng = np.random.default_rng(7)
    q = draw_posteriors(rng, 9, 16, 10, 2.0, torch.float32)
    n, h = draw_counts(rng, 9, 10)
    cross_entropy = draw_cross_entropy(rng, 9, 10)
    plain = aggregate(q, n, h, rule=rule, cross_entropy=cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        cast = aggregate(q, n, h, rule=rule, cross_entropy=cross_entropy)
    screenings = zip(plain.screening or (), cast.screening or (), strict=True)
    for one, two in (*zip(plain[:-1], cast[:-1], strict=True), *screenings):
        assert isinstance(one, Tensor)
        assert isinstance(two, Tensor)
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


def test_counts_may_be_floating_and_inputs_stay_as_they_are() -> None:
    rng = np.random.default_rng(8)
    q = draw_posteriors(rng, 5, 8, 10, 2.0, torch.float32)
    n, h = draw_counts(rng, 5, 10)
    before = [value.clone() for value in (q, n, h)]
    result = aggregate(q, n, h)
    assert torch.equal(aggregate(q, n.float(), h.float()).target, result.target)
    assert all(map(torch.equal, before, (q, n, h)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "ce"}, r"rule='ce' needs the teachers' cross-entropy \[teachers, classes\] = \(2, 3\)"),
        ({"rule": "ce", "cross_entropy": torch.ones(2, 4)}, "rule='ce' needs the teachers' cross-entropy"),
        ({"posteriors": torch.zeros(0, 4, 3)}, r"at least one teacher, found \(0, 4, 3\)"),
        ({"posteriors": torch.zeros(4, 3)}, r"\[teachers, batch, classes\].*found \(4, 3\)"),
        ({"counts": torch.zeros(2, 4)}, r"counts must be .*\(2, 3\), found \(2, 4\)"),
        ({"hits": torch.zeros(3, 2)}, r"hits must be .*\(2, 3\), found \(3, 2\)"),
        ({"counts": torch.zeros(3)}, "counts must be"),
        ({"rule": "median"}, "rule must be one of uniform, uncertainty, crad, .*, found 'median'"),
        ({"empty_class": "skip"}, "empty_class must be uniform, zero or student, found 'skip'"),
        ({"empty_class": "student"}, r"needs the student's posterior \[batch, classes\] = \(4, 3\)"),
        ({"empty_class": "student", "student": torch.zeros(4, 2)}, "needs the student's posterior"),
    ],
)
def test_what_cannot_be_combined_is_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "posteriors": torch.full((2, 4, 3), 1 / 3),
        "counts": torch.full((2, 3), 5),
        "hits": torch.full((2, 3), 2),
    }
    aggregate(**good)
    with pytest.raises(ValueError, match=message):
        aggregate(**{**good, **change})


# ----------------------------------------------------------------------------------------------------- class statistics


def test_statistics_count_samples_hits_and_predictions_of_each_class() -> None:
    labels = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3])
    guesses = np.array([0, 2, 0, 1, 0, 3, 3, 1, 2])
    images = np.zeros((9, 1, 1, 1), np.uint8)
    images[:, 0, 0, 0] = guesses
    for batch_size in (1, 4, 100):
        samples = plain_batches(
            images, labels, batch_size=batch_size, mean=(0.0,), std=(1 / 255,), device=torch.device("cpu")
        )
        found = measure(lambda x: torch.eye(4)[x[:, 0, 0, 0].round().long()], samples, 4)
        assert found.counts == (3, 2, 0, 4)
        assert found.hits == (2, 1, 0, 2)
        assert found.predicted == (3, 2, 2, 2)
        assert found.accuracy == pytest.approx(5 / 9)
    none = plain_batches(images[:0], labels[:0], batch_size=4, mean=(0.0,), std=(1.0,), device=torch.device("cpu"))
    empty = measure(lambda x: torch.zeros(len(x), 4), none, 4)
    assert empty.counts == empty.hits == empty.predicted == (0, 0, 0, 0)
    assert empty.accuracy is None
    assert empty.cross_entropy is found.cross_entropy is None


def test_the_cross_entropy_is_the_mean_over_the_samples_of_each_class() -> None:
    rng = np.random.default_rng(12)
    labels = np.array([0, 0, 0, 1, 1, 3, 3, 4])
    logits = torch.from_numpy(rng.normal(0, 3, (8, 5))).float()
    logits[7, 2] = 5000  # the only sample of class 4 is beyond all measure
    images = np.arange(8, dtype=np.uint8).reshape(8, 1, 1, 1)
    expected = [
        float(np.mean([-reference.log_softmax(logits[i].tolist())[c] for i in np.flatnonzero(labels == c)]))
        for c in (0, 1, 3)
    ]
    for batch_size in (1, 3, 100):
        samples = plain_batches(
            images, labels, batch_size=batch_size, mean=(0.0,), std=(1 / 255,), device=torch.device("cpu")
        )
        found = measure(lambda x: logits[x[:, 0, 0, 0].round().long()], samples, 5, with_cross_entropy=True)
        assert found.cross_entropy is not None
        np.testing.assert_allclose([found.cross_entropy[c] for c in (0, 1, 3)], expected, rtol=1e-12)
        # Without a sample, or too large, it is the most that a manifest may say, so that it counts least.
        assert found.cross_entropy[2] == found.cross_entropy[4] == CROSS_ENTROPY_LIMIT
    nothing = measure(lambda x: torch.full((len(x), 5), torch.nan), samples, 5, with_cross_entropy=True)
    assert nothing.cross_entropy == (CROSS_ENTROPY_LIMIT,) * 5
