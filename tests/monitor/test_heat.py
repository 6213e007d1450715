"""Pictures of layers × steps: texts fit, and a colour means the same in every run."""

import math
from itertools import combinations

import numpy as np
import pytest
from example_reports import reading, report, running

from adiv_monitor.diagnosis.health import GRADIENT, HEALTH, OVERVIEW
from adiv_monitor.pictures.colours import SCALES, bar, places

pytest.importorskip("matplotlib")
from pixels import share

from adiv_monitor.pictures.grid import Grid, grid
from adiv_monitor.pictures.heat import heat_picture, overview_picture
from adiv_monitor.pictures.picture import Picture

PATHS = {
    "short": "{}",
    "blocks": "encoder.layers.{}.mlp",
    "long": "backbone_of_the_generator.stage{}.output_projection_of_the_residual_branch_with_gate",
    "unbroken": "x" * 120 + "{}",
    "strange": "日本語$a_{{b$.{}",
}
FINDING = (
    "• Layers move by very different amounts (act): backbone_of_the_generator.stage0.output_project"
    "ion_of_the_residual_branch, layer2 and 7 more. To fix it: give them their own learning rates"
)


def filled(measure: str, layers: int, steps: int, path: str = "{}") -> Grid:
    draws = np.random.default_rng(layers + steps)
    return Grid(
        measure,
        tuple(path.format(i) for i in range(layers)),
        tuple(i * 12_345 for i in range(steps)),
        10 ** draws.uniform(-4, 3, (layers, steps)),
        draws.random((layers, steps)) < 0.1,
    )


def assert_readable(picture: Picture) -> None:
    """Assert that no two texts overlap and that each lies inside the picture."""
    assert len(picture.texts) > 5
    for box, words in picture.texts:
        assert box[0] >= 0 and box[2] <= picture.width, words
        assert box[1] >= 0 and box[3] <= picture.height, words
    for (box, words), (other, others) in combinations(picture.texts, 2):
        apart = any(box[i + 2] <= other[i] or other[i + 2] <= box[i] for i in (0, 1))
        assert apart, (words, others)


@pytest.mark.slow(one_in=61)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("layers", [1, 3, 15, 16, 60, 61, 300])
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_texts_of_a_picture_have_room(layers: int, path: str, steps: int) -> None:
    some = filled("descent", layers, steps, path)
    for named in (set(), set(some.layers)):
        assert_readable(heat_picture(some, named))
        grids = [filled(measure, layers, steps, path) for measure in OVERVIEW]
        assert_readable(overview_picture(grids, "3 things to watch", [FINDING] * 3, named))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "headline", ["One thing to fix", "generator.of.images: " + "many " * 20, "W" * 300]
)
def test_headlines_and_findings_of_any_length_have_room(headline: str, count: int) -> None:
    grids = [filled(measure, 5, 9) for measure in OVERVIEW[:count]]
    for paragraphs in (["• short"], [FINDING] * 9, ["• " + "x" * 500]):
        assert_readable(overview_picture(grids, headline, paragraphs, ()))


# Colours


@pytest.mark.parametrize("measure", HEALTH)
def test_colours_end_where_the_bar_says(measure: str) -> None:
    assert (not HEALTH[measure].knots) == (measure in SCALES)
    meant = bar(measure)
    assert 0 <= meant.low < meant.high <= 1
    assert {meant.low, meant.high} <= set(meant.ticks)
    far = places(measure, np.array([1e30, math.nan]))
    assert far[0] == meant.high and math.isnan(far[1])
    least = -1.0 if "cosine" in measure else 0.0
    assert places(measure, np.array([least]))[0] == meant.low
    assert meant.ticks[meant.low].startswith("≤") == (meant.ticks[meant.low] != "0") or least < 0


def test_no_direction_is_not_healthy_and_not_ill() -> None:
    layers = {"a": reading(update_ratio=math.nan), "b": reading(update_ratio=math.nan)}
    found = grid(running(report(layers=layers)).record(), "update_ratio")
    assert found is not None and not found.not_finite.any()
    grey, stripe = (227, 235, 223), (201, 206, 214)
    well = heat_picture(found._replace(values=np.full((2, 1), 0.1)))
    assert share(heat_picture(found), grey) < share(well, grey) - 0.1
    assert share(heat_picture(found), stripe) > share(well, stripe) + 0.05


@pytest.mark.parametrize("measure", [GRADIENT, "descent"])
def test_a_legend_says_what_colours_mean(measure: str) -> None:
    found = filled(measure, 4, 4)
    found.values[0, 0], found.not_finite[0, 0] = math.nan, False
    found.not_finite[1, 1] = True
    for picture in (heat_picture(found), overview_picture([found], "Nothing", ["• all"], ())):
        words = {words for _, words in picture.texts}
        every = {"NaN or infinite", "no value"}
        assert every <= words
        limits = {"healthy", "too little", "too much"}
        order = {"healthy range"}
        assert (limits if measure == GRADIENT else order) <= words
        assert not (order if measure == GRADIENT else limits) & words


# The overview in a card of TensorBoard


def test_a_loss_that_explodes_is_red_though_every_measure_is_healthy() -> None:
    red = (179, 0, 0)
    grids = [filled("update_ratio", 4, 4)._replace(values=np.full((4, 4), 0.1))]
    grids[0].not_finite[:] = False
    sound = overview_picture(grids, "x", [], (), [1.0, 0.5, 0.4, 0.3])
    exploding = overview_picture(grids, "x", [], (), [1.0, 5.0, 50.0, 1e30])
    broken = overview_picture(grids, "x", [], (), [1.0, 5.0, math.inf, math.nan])
    assert share(exploding, red) > share(sound, red) + 0.01
    assert share(broken, (255, 63, 216)) > share(sound, (255, 63, 216)) + 0.005
    unknown = overview_picture(grids, "x", [], (), [None] * 4)
    assert "loss" not in {words for _, words in unknown.texts}
