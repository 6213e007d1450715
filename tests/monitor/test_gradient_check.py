"""What speaks against a gradient's being that of a layer's rows, reason by reason."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adiv_monitor.step.gradient_check import (
    LARGEST_REST,
    as_multiple,
    by_entries,
    contributed,
    is_judged,
    is_now,
    is_of_entries,
    speaks_against,
)
from adiv_monitor.step.part import Looked

Values = dict[str, np.ndarray]

GAMMA = np.array([3.0, -4.0, 12.0, 0.5, -1.5, 2.0, 7.0, -2.5, 1.0, 6.0])
SHORT = GAMMA[:8]
SQUARE = float(GAMMA @ GAMMA)
SEEN = Looked("layer", "linear", [0], False, 4, 4, 1, 1e-7, "")
# As large as rounding: a gradient of 1 is summed up from terms of 1e8.
ROUNDED = replace(SEEN, terms=1e8)


def across(vector: np.ndarray, length: float) -> np.ndarray:
    """Added to the vector, of this length relative to it, and orthogonal to it."""
    other = np.zeros_like(vector)
    other[:2] = -vector[1], vector[0]
    other *= length * np.linalg.norm(vector) / np.linalg.norm(other)
    return other


def against(
    values: Values,
    factor: float = 1.0,
    gamma: float = SQUARE,
    scale: float = 1.0,
    seen: Looked = SEEN,
) -> str:
    return speaks_against(values, gamma, factor, seen, scale=scale)


def test_a_multiple_is_told_with_its_factor() -> None:
    assert as_multiple(0.25 * GAMMA, GAMMA) == pytest.approx((0.25, 0.0), abs=1e-12)
    assert as_multiple(np.array([3.0, 4.0]), np.array([1.0, 0.0])) == pytest.approx((3.0, 0.8))


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_no_square_is_too_small_or_too_large(size: float) -> None:
    assert as_multiple(size * GAMMA, GAMMA)[0] == pytest.approx(size)
    assert as_multiple(GAMMA, size * GAMMA) == pytest.approx((1 / size, 0.0), abs=1e-12)


def test_a_gradient_that_was_turned_round_is_no_multiple() -> None:
    assert as_multiple(-GAMMA, GAMMA) == (0.0, 1.0)


@pytest.mark.parametrize(("now", "then"), [(GAMMA, 0 * GAMMA), (0 * GAMMA, GAMMA)])
def test_of_zeros_nothing_is_known(now: np.ndarray, then: np.ndarray) -> None:
    assert all(map(math.isnan, as_multiple(now, then)))


def test_entries_of_another_number_are_not_compared() -> None:
    assert all(map(math.isnan, by_entries({"final_0": GAMMA}, 0.0)))
    assert all(map(math.isnan, by_entries({"then": GAMMA[:3], "final_0": GAMMA}, 0.0)))
    assert by_entries({"then": GAMMA, "final_0": 2 * GAMMA}, 0.0)[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "entries", "now", "judged"),
    [
        ("then", True, False, True),
        ("contributed_1", True, False, True),
        ("final_1", True, True, True),
        ("probe", False, False, True),
        ("foreign", False, False, True),
        ("G_G", False, False, False),
    ],
)
def test_what_a_number_is_for(name: str, entries: bool, now: bool, judged: bool) -> None:
    assert (is_of_entries(name), is_now(name), is_judged(name)) == (entries, now, judged)


def test_nothing_speaks_against_the_gradient_of_the_rows() -> None:
    probe = np.array([[0.0, 0.0], [3.0, 4.0]])
    known: Values = {
        "then": GAMMA,
        "contributed_0": GAMMA,
        "final_0": GAMMA,
        "foreign": np.array(0),
    }
    assert against({}) == against({**known, "probe": probe}) == ""


@pytest.mark.parametrize("gamma", [0.0, math.inf, math.nan])
def test_of_no_gradient_nothing_is_said(gamma: float) -> None:
    assert against({}, math.nan, gamma) == ""


@pytest.mark.parametrize(("rest", "reason"), [(0.9, ""), (1.1, "edited")])
def test_an_edited_gradient(rest: float, reason: str) -> None:
    # What is left of `now` is sin of the angle between the two.
    now = GAMMA + across(GAMMA, math.tan(math.asin(rest * LARGEST_REST)))
    assert against({"then": GAMMA, "final_0": now}) == reason


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize(("share", "reason"), [(0.9, ""), (1.1, "more")])
def test_what_was_there_before_the_rows(factor: float, share: float, reason: str) -> None:
    held = share * SEEN.tolerance * math.sqrt(SQUARE) / factor
    assert against({"foreign": np.array(held)}, factor) == reason


@pytest.mark.parametrize(("share", "reason"), [(0.9, ""), (1.1, "more")])
def test_a_probe(share: float, reason: str) -> None:
    whole = np.array([3.0, 4.0])
    assert against({"probe": np.array([10 * share * SEEN.tolerance * whole, whole])}) == reason


@pytest.mark.parametrize(("rest", "reason"), [(0.9, ""), (1.1, "more")])
@pytest.mark.parametrize("place", ["0", "1"])
def test_more_than_what_calls_hand_on(place: str, rest: float, reason: str) -> None:
    now = GAMMA + across(GAMMA, math.tan(math.asin(rest * SEEN.tolerance)))
    found = {f"contributed_{place}": GAMMA, f"final_{place}": now}
    assert against(found) == contributed(found, SEEN) == reason


@pytest.mark.parametrize(
    ("own", "now", "reason"),
    [(0, 0, ""), (0, 1, "more"), (1, 0, "more"), (1, 1, "")],
)
def test_where_calls_hand_on_nothing(own: int, now: int, reason: str) -> None:
    assert against({"contributed_0": own * GAMMA, "final_0": now * GAMMA}) == reason


def test_what_calls_hand_on_times_another_factor() -> None:
    assert against({"contributed_0": GAMMA, "final_0": 2 * GAMMA}) == "unknown"
    # So few entries may be multiples of each other though more was added to them.
    assert against({"contributed_0": SHORT, "final_0": 2 * SHORT}) == "more"
    assert against({"contributed_0": GAMMA[:9], "final_0": 2 * GAMMA[:9]}) == "unknown"


def test_the_factor_counts_with_what_the_optimizer_divides_by() -> None:
    found = {"contributed_0": GAMMA, "final_0": 2 * GAMMA}
    assert against(found, factor=0.5, scale=4.0) == against(found, factor=2.0) == ""
    assert against(found, factor=2.0, scale=4.0) == "unknown"


@pytest.mark.parametrize(("factor", "reason"), [(1.0, ""), (1 + 5e-4, ""), (1.1, "apart")])
def test_parameters_of_one_layer_share_their_factor(factor: float, reason: str) -> None:
    found = {"contributed_0": GAMMA, "final_0": 2 * GAMMA}
    found |= {"contributed_1": SHORT, "final_1": 2 * factor * SHORT}
    assert contributed(found, SEEN) == against(found, 2.0) == reason


def test_a_first_parameter_without_a_gradient_says_nothing_of_the_factor() -> None:
    found = {"contributed_0": 0 * GAMMA, "final_0": 0 * GAMMA}
    found |= {"contributed_1": GAMMA, "final_1": 3 * GAMMA}
    assert contributed(found, SEEN) == ""
    assert against(found, 1.0) == "apart"


def test_without_a_factor_only_more_than_the_rows_is_told() -> None:
    """Where it isn't known what became of the gradient, yet it holds more than the rows'."""
    more = GAMMA + across(GAMMA, 0.5)
    assert against({}, math.nan) == "unknown"
    assert against({"contributed_0": GAMMA, "final_0": 2 * GAMMA}, math.nan) == "unknown"
    assert against({"contributed_0": GAMMA, "final_0": more}, math.nan) == "other"


def test_the_first_reason_is_said() -> None:
    edited = GAMMA + across(GAMMA, 0.5)
    found = {"then": GAMMA, "final_0": edited, "contributed_0": GAMMA}
    assert against({**found, "foreign": np.array(100)}) == "edited"
    assert against({**found, "then": edited}) == "more"


def test_sums_are_rounded_by_what_they_are_summed_up_from() -> None:
    assert ROUNDED.rounding == pytest.approx(4 * 1e-7 * 1e8)
    # Half precision is summed up in float32.
    coarse = replace(ROUNDED, precision=2**-8)
    assert coarse.rounding == pytest.approx(4 * 2**-23 * 1e8)


OTHER = across(GAMMA, 1.0)


@pytest.mark.parametrize(
    "found",
    [
        {"then": GAMMA, "final_0": OTHER},
        {"contributed_0": GAMMA, "final_0": OTHER},
        {"contributed_1": GAMMA, "final_1": OTHER},
        {"contributed_0": 0 * GAMMA, "final_0": OTHER},
        {"contributed_0": GAMMA, "final_0": 0 * GAMMA},
        {"foreign": np.array(10.0)},
        {"probe": np.array([[30.0, 0.0], [3.0, 4.0]])},
    ],
)
def test_of_a_gradient_that_may_be_rounding_alone_nothing_is_concluded(found: Values) -> None:
    assert against(found) != ""
    assert against(found, seen=ROUNDED) == ""
    much_more = {n: 1e4 * v if n.startswith("final") else v for n, v in found.items()}
    much_more |= {n: 1e4 * v for n, v in found.items() if n in ("foreign", "probe")}
    if not (found.keys() & {"then"} or not much_more.get("final_0", GAMMA).any()):
        assert against(much_more, gamma=1e8 * SQUARE, seen=ROUNDED) == "more"


def test_rounding_is_taken_off_what_is_no_multiple() -> None:
    now = 2 * GAMMA + across(GAMMA, 0.1)
    _, rest = as_multiple(now, GAMMA)
    length = rest * float(np.linalg.norm(now)) / 2
    assert as_multiple(now, GAMMA, 0.5 * length)[1] == pytest.approx(rest / 2)
    assert as_multiple(now, GAMMA, length * (1 + 1e-12)) == pytest.approx((2.0, 0.0), abs=1e-12)
    assert all(map(math.isnan, as_multiple(now, GAMMA, 1.01 * float(np.linalg.norm(GAMMA)))))


def test_the_factor_comes_from_parameters_that_speak() -> None:
    """Beside a key bias whose gradient is rounding, the weight tells it."""
    seen = replace(SEEN, terms=1.0)
    noise = 1e-8 * GAMMA
    found = {"contributed_0": noise, "final_0": 3e-8 * OTHER}
    found |= {"contributed_1": GAMMA, "final_1": 2 * GAMMA}
    assert contributed(found, seen) == against(found, 2.0, seen=seen) == ""
    assert contributed(found | {"final_0": 1e-4 * OTHER}, seen) == "more"
