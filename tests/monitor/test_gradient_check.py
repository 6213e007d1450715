"""The reasons for which a gradient may not be that of a layer's rows, one by one."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adiv_monitor.maths.sums import Array, Evidence
from adiv_monitor.step.gradient_check import (
    LARGEST_REST,
    compared,
    multiples,
    speaks_against,
)
from adiv_monitor.step.gradient_check import (
    contributed as contributed_by,
)

GAMMA = np.array([3.0, -4.0, 12.0, 0.5, -1.5, 2.0, 7.0, -2.5, 1.0, 6.0])
SHORT = GAMMA[:8]
SQUARE = float(GAMMA @ GAMMA)
SEEN: Evidence[Array] = Evidence(precision=1e-7)
# Relative rounding of a gradient of 1 that is a sum of terms of 1e8.
ROUNDED = replace(SEEN, terms=1e8)


def across(vector: np.ndarray, length: float) -> np.ndarray:
    """Add an orthogonal vector of this relative norm."""
    other = np.zeros_like(vector)
    other[:2] = -vector[1], vector[0]
    other *= length * np.linalg.norm(vector) / np.linalg.norm(other)
    return other


def handed_on(*pairs: tuple[Array, Array] | None, seen: Evidence[Array] = SEEN) -> Evidence[Array]:
    """Return per parameter its calls' contributions and its gradient; None if unknown."""
    owns = tuple(None if pair is None else pair[0] for pair in pairs)
    nows = tuple(None if pair is None else pair[1] for pair in pairs)
    return replace(seen, contributed=owns, now=nows)


def left(then: Array, now: Array) -> Evidence[Array]:
    """Return the first parameter's gradient after the backward passes, and its present one."""
    return replace(SEEN, then=then, now=(now,))


def against(
    seen: Evidence[Array], factor: float = 1.0, gamma: float = SQUARE, scale: float = 1.0
) -> str:
    return speaks_against(replace(seen, factor=np.array(factor)), compared([seen])[0], gamma, scale)


def contributed(seen: Evidence[Array]) -> str:
    return contributed_by(seen, compared([seen])[0])


def as_multiple(now: Array, then: Array, rounding: float = 0.0) -> tuple[float, float]:
    found = multiples([(now, then, rounding)])[0]
    return found.factor, found.rest


def test_a_multiple_is_told_with_its_factor() -> None:
    assert as_multiple(0.25 * GAMMA, GAMMA) == pytest.approx((0.25, 0.0), abs=1e-12)
    assert as_multiple(np.array([3.0, 4.0]), np.array([1.0, 0.0])) == pytest.approx((3.0, 0.8))


def test_nothing_speaks_against_the_gradient_of_the_rows() -> None:
    probe = np.array([[0.0, 0.0], [3.0, 4.0]])
    known = replace(handed_on((GAMMA, GAMMA)), then=GAMMA, foreign=np.array(0))
    assert against(SEEN) == against(replace(known, probe=probe)) == ""


@pytest.mark.parametrize(("rest", "reason"), [(0.9, ""), (1.1, "edited")])
def test_an_edited_gradient(rest: float, reason: str) -> None:
    # The share of `now` that remains is the sine of the angle between the two.
    now = GAMMA + across(GAMMA, math.tan(math.asin(rest * LARGEST_REST)))
    assert against(left(GAMMA, now)) == reason


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize(("share", "reason"), [(0.9, ""), (1.1, "earlier")])
def test_what_was_there_before_the_rows(factor: float, share: float, reason: str) -> None:
    held = share * SEEN.tolerance * math.sqrt(SQUARE) / factor
    assert against(replace(SEEN, foreign=np.array(held)), factor) == reason


@pytest.mark.parametrize(("share", "reason"), [(0.9, ""), (1.1, "more")])
def test_a_probe(share: float, reason: str) -> None:
    whole = np.array([3.0, 4.0])
    probe = np.array([10 * share * SEEN.tolerance * whole, whole])
    assert against(replace(SEEN, probe=probe)) == reason


@pytest.mark.parametrize(("rest", "reason"), [(0.9, ""), (1.1, "more")])
@pytest.mark.parametrize("before", [(), (None,)])
def test_more_than_what_calls_hand_on(before: tuple[None, ...], rest: float, reason: str) -> None:
    now = GAMMA + across(GAMMA, math.tan(math.asin(rest * SEEN.tolerance)))
    found = handed_on(*before, (GAMMA, now))
    assert against(found) == contributed(found) == reason


def test_what_calls_hand_on_times_another_factor() -> None:
    assert against(handed_on((GAMMA, 2 * GAMMA))) == "unknown"
    # So few entries may be proportional by chance, although more was added to them.
    assert against(handed_on((SHORT, 2 * SHORT))) == "more"
    assert against(handed_on((GAMMA[:9], 2 * GAMMA[:9]))) == "unknown"


@pytest.mark.parametrize(("factor", "reason"), [(1.0, ""), (1 + 5e-4, ""), (1.1, "apart")])
def test_parameters_of_one_layer_share_their_factor(factor: float, reason: str) -> None:
    found = handed_on((GAMMA, 2 * GAMMA), (SHORT, 2 * factor * SHORT))
    assert contributed(found) == against(found, 2.0) == reason


def test_without_a_factor_only_more_than_the_rows_is_told() -> None:
    """If the gradient's factor is unknown, only a gradient beyond the rows' is reported."""
    more = GAMMA + across(GAMMA, 0.5)
    assert against(SEEN, math.nan) == "unknown"
    assert against(handed_on((GAMMA, 2 * GAMMA)), math.nan) == "unknown"
    assert against(handed_on((GAMMA, more)), math.nan) == "other"


OTHER = across(GAMMA, 1.0)


@pytest.mark.parametrize(
    "found",
    [
        left(GAMMA, OTHER),
        handed_on((GAMMA, OTHER)),
        handed_on(None, (GAMMA, OTHER)),
        handed_on((0 * GAMMA, OTHER)),
        handed_on((GAMMA, 0 * GAMMA)),
        replace(SEEN, foreign=np.array(10.0)),
        replace(SEEN, probe=np.array([[30.0, 0.0], [3.0, 4.0]])),
    ],
)
def test_a_gradient_that_may_be_rounding_leads_to_no_conclusion(
    found: Evidence[Array],
) -> None:
    assert against(found) != ""
    rounded = replace(found, terms=ROUNDED.terms)
    assert against(rounded) == ""
    much_more = replace(
        rounded,
        now=tuple(None if now is None else 1e4 * now for now in rounded.now),
        foreign=None if rounded.foreign is None else 1e4 * rounded.foreign,
        probe=None if rounded.probe is None else 1e4 * rounded.probe,
    )
    is_zero = any(now is not None and not now.any() for now in found.now)
    if found.then is None and not is_zero:
        expected = "more" if found.foreign is None else "earlier"
        assert against(much_more, gamma=1e8 * SQUARE) == expected


def test_the_factor_comes_from_parameters_that_speak() -> None:
    """The weight determines the factor: the gradient of a key bias is rounding error."""
    seen, noise = replace(SEEN, terms=1.0), 1e-8 * GAMMA
    found = handed_on((noise, 3e-8 * OTHER), (GAMMA, 2 * GAMMA), seen=seen)
    assert contributed(found) == against(found, 2.0) == ""
    more = handed_on((noise, 1e-4 * OTHER), (GAMMA, 2 * GAMMA), seen=seen)
    assert contributed(more) == "more"
