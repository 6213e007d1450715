"""Every statement about a training is true of its state, wherever it appears.

The table: states of a training × whether its loss is known × places where people read about it.
"""

import html
import json
import logging
import re
from typing import NamedTuple

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("rich")
pytest.importorskip("pytorch_lightning")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from verdict_runs import BREAKS, EVERY, LOOPS, STATES, STEPS, Seen, seen

from adiv_monitor.diagnosis.diagnose import NOTHING, finding_title, running_headline
from adiv_monitor.diagnosis.finding import Finding

pytestmark = pytest.mark.slow(one_in=17)
WITHOUT_LOSS = "plain, without the loss"
FALLS = "Whether the loss falls"
WIRING = "Wiring, inputs, labels"
QUIET = {"nothing", "note"}  # neither to fix nor to watch
# For every state: allowed strengths of its findings, with the loss and without.
STRENGTHS = {
    "healthy": (QUIET, QUIET),
    "not finite": ({"act"}, {"act"}),
    "flat: learning rate too high": ({"act", "watch"}, {"nothing", "act", "watch"}),
    "flat: random labels": ({"watch"}, {"nothing", "note", "watch"}),
    "diverged": ({"act"}, {"act", "watch"}),
    "learning rate too low": ({"watch"}, {"watch"}),
    "dead units": ({"act"}, {"act"}),
    "frozen by a learning rate of 0": ({"watch"}, {"watch"}),
    "frozen by requires_grad": (QUIET, QUIET),
    "decayed": (QUIET, QUIET),
    "warm-up": ({"note"}, {"note"}),
    "converged": (QUIET, QUIET),
    "resumed where it had converged": ({"nothing", "note", "watch"}, {"watch"}),
}


class Case(NamedTuple):
    """A run and its state and loop."""

    state: str
    loop: str
    seen: Seen

    @property
    def knows_loss(self) -> bool:
        return self.loop != WITHOUT_LOSS

    @property
    def findings(self) -> dict[str, Finding]:
        return {finding.name: finding for finding in self.seen.running.findings()}

    @property
    def headline(self) -> str:
        return running_headline(self.seen.running.findings(), self.seen.running.record())

    @property
    def strength(self) -> str:
        found = [f.strength for f in self.findings.values()]
        return found[0] if found else "nothing"

    def layers(self, finding: str) -> tuple[str, ...]:
        return tuple(self.findings[finding].layers)


@pytest.fixture(
    scope="module",
    params=[(state, loop) for state in STATES for loop in LOOPS],
    ids=lambda pair: f"{pair[0]}; {pair[1]}",
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a run, trained once for all tests."""
    state, loop = request.param
    return Case(state, loop, seen(STATES[state], loop, tmp_path_factory.mktemp("run")))


def items(page: str, kind: str) -> list[str]:
    """Return the page's checks with this mark, without markup."""
    found = re.findall(rf'<li class="{kind}[^"]*">(.*?)</li>', page, re.DOTALL)
    return [html.unescape(re.sub(r"<.*?>", "", text)).strip() for text in found]


# Tests of every run


def test_all_views_of_a_run_agree(case: Case) -> None:
    (headline,) = re.findall(r'<h1 id="headline">(.*?)</h1>', case.seen.page)
    assert html.unescape(headline) == case.headline
    assert case.seen.findings_text.startswith(f"### {case.headline}\n")
    assert case.seen.overviews[-1][0] == case.headline, "of the picture"
    (line,) = case.seen.logged
    said = line.getMessage()
    assert str(case.seen.folder / "run.html") in said.partition(" → ")[2].split(", ")
    if case.strength in QUIET:
        assert line.levelno == logging.INFO
        measured = f"adiv-monitor: {case.headline} ({STEPS // EVERY} measured steps)"
        assert said.lower().startswith(measured.lower())
    else:
        assert line.levelno == logging.WARNING
    for finding in case.findings.values():
        title = finding_title(finding.name)
        assert f"**{title} ({finding.strength}, `{finding.name}`" in case.seen.findings_text
        assert title in case.seen.page
        assert any(title in said for said in case.seen.overviews[-1][1]) or len(case.findings) > 2
        if finding.strength == "act":
            assert title.lower() in said.lower()


def test_the_strength_follows_from_how_faulty_the_state_is(case: Case) -> None:
    assert case.strength in STRENGTHS[case.state][not case.knows_loss], case.findings


def test_ticks_are_for_what_was_looked_at(case: Case) -> None:
    ticked, missing = items(case.seen.page, "clear"), items(case.seen.page, "missing")
    stuck = finding_title("loss-stuck")
    never = (FALLS, WIRING, "labels", *map(finding_title, (
        "frozen", "rate-too-high", "rate-too-low", "saturated-units",
        "cannot-overfit", "decay-fights", "clipping-always",
    )))  # fmt: skip
    assert not [line for line in ticked if line.startswith(never)]
    assert not [line for line in ticked if any(line.startswith(finding_title(name))
                for name in case.findings)], "found, and ticked"  # fmt: skip
    assert any(line.startswith(WIRING) for line in missing)
    is_told = case.knows_loss or case.state == "not finite"
    assert any(line.startswith(FALLS) for line in missing) != is_told
    assert (f"- {FALLS}" in case.seen.findings_text) != is_told
    assert case.knows_loss or not any(line.startswith(stuck) for line in ticked)


def test_every_line_of_json_is_there(case: Case) -> None:
    lines = [json.loads(line) for line in (case.seen.folder / "run.jsonl").read_text().splitlines()]
    breaks = case.knows_loss and case.state == "not finite"
    after = {BREAKS + 1, BREAKS + 2} if breaks else set()  # the first loss that is not finite
    assert [line["step"] for line in lines] == sorted({*range(0, STEPS, EVERY), *after})
    assert all(bool(line["losses"]) == case.knows_loss for line in lines)


# Tests of single states


def read(case: Case, words: str) -> None:
    """Return the words that TensorBoard and the page both print."""
    assert words in case.seen.findings_text.replace("\\", "")
    assert words in html.unescape(re.sub(r"<.*?>", "", case.seen.page))


def healthy(case: Case) -> None:
    assert case.strength in QUIET


def not_finite(case: Case) -> None:
    step = BREAKS if case.knows_loss else -(-BREAKS // EVERY) * EVERY  # the next measured one
    # By then the step with the NaN loss has made all weights NaN.
    place = "the loss" if case.knows_loss else "the outputs of Linear 'first'"
    first = case.seen.running.findings()[0]
    assert (first.name, first.strength, first.since) == ("non-finite", "act", step)
    assert case.headline.startswith("To fix: values that are not finite")
    assert first.summary.startswith(f"Step {step} is the first with values that are not finite")
    assert f"The first one is in: {place}." in first.summary
    read(case, first.summary)
    (line,) = case.seen.logged
    said = f"adiv-monitor: values that are not finite since step {step}"
    assert line.getMessage().startswith(said)
    (warned,) = case.seen.warned
    measured = min(report.step for report in case.seen.reports if report.step >= BREAKS)
    assert warned.startswith(f"adiv_monitor: step {step}: not finite (NaN, infinite or too large")
    assert warned.endswith(f": {place}")
    lines = [json.loads(text) for text in (case.seen.folder / "run.jsonl").read_text().splitlines()]
    broken = [
        line["step"] for line in lines if any(r.get("non_finite") for r in line["layers"].values())
    ]
    assert broken[0] == measured
    losses = {int(step): loss for line in lines for step, loss in line["losses"].items()}
    assert all((loss is None) == (step >= BREAKS) for step, loss in losses.items())
    assert "NaN: not finite" in case.seen.table


def flat(case: Case) -> None:
    if case.knows_loss:
        assert case.findings["loss-stuck"].strength == "watch"
        read(case, "Does not train; cause not found")
        assert ">falls<" not in case.seen.page
    else:
        assert "loss-stuck" not in case.findings


def diverged(case: Case) -> None:
    assert case.findings["rate-too-high"].strength == ("act" if case.knows_loss else "watch")
    read(case, "The first step moved the activations of the median layer by ")
    assert "learning rate × 10" not in case.seen.findings_text
    if case.knows_loss:  # it follows from the rate
        assert case.findings["loss-stuck"].strength == "note"


def too_low(case: Case) -> None:
    assert next(iter(case.findings)) == "rate-too-low"
    read(case, "no layer's activations move by more than ")


def dead(case: Case) -> None:
    assert case.layers("dead-units") == ("first", "second")
    assert "dead units (" in case.seen.logged[0].getMessage()
    assert "second'" in case.seen.logged[0].getMessage()
    read(case, "No row sends a gradient to Linear ")


def held_still(case: Case) -> None:
    assert [*case.findings] == ["rate-zero", "stands-still"], "the cause comes first"
    assert case.layers("rate-zero") == case.layers("stands-still") == ("second",)
    assert case.findings["stands-still"].strength == ("note" if case.knows_loss else "watch")
    read(case, "The learning rate of Linear 'second' is zero in all measured steps.")
    read(case, "The learning rate is zero, or other code resets the weights.")


def without_gradients(case: Case) -> None:
    """Check for a hint at the wiring: reports cannot tell whether a frozen layer is intended."""
    layers = {layer for report in case.seen.reports for layer in report.layers}
    assert layers == {"first", "head"}
    read(case, WIRING)


def warms_up(case: Case) -> None:
    assert case.layers("stands-still")
    read(case, "The learning rate still rises: measurements at its peak will be clearer")
    assert ("loss-stuck" in case.findings) == case.knows_loss


def found_nothing(case: Case) -> None:
    assert case.headline == NOTHING
    assert not case.findings or case.state == "converged"


def resumed(case: Case) -> None:
    if not case.knows_loss:
        read(case, "usual at the end of a training")


CHECKS = {
    "healthy": healthy,
    "not finite": not_finite,
    "flat: learning rate too high": flat,
    "flat: random labels": flat,
    "diverged": diverged,
    "learning rate too low": too_low,
    "dead units": dead,
    "frozen by a learning rate of 0": held_still,
    "frozen by requires_grad": without_gradients,
    "decayed": found_nothing,
    "warm-up": warms_up,
    "converged": found_nothing,
    "resumed where it had converged": resumed,
}


def test_it_is_true_of_the_state(case: Case) -> None:
    CHECKS[case.state](case)
    if case.state != "not finite":
        assert not case.seen.warned and "non-finite" not in case.findings
        assert "NaN: not finite" not in case.seen.table


def test_every_state_has_its_truth() -> None:
    assert STATES.keys() == CHECKS.keys() == STRENGTHS.keys()
