"""Rules about attention: the axis of its softmax, and the size of its scores."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record

# Standard deviation of a query's scores before training. Divided by √d, the products of independent
# queries and keys of unit variance have 1 (Vaswani et al. 2017, section 3.2.1); at 2.5, a key at
# two deviations gets e⁵ = 150 times the weight of the mean key.
SPREAD = 2.5


def attention_axis(record: Record) -> Iterator[Finding]:
    """Find attention weights that sum to 1 along another axis than the one that is summed over."""
    facts = record.found_by("attention-axis")
    if facts:
        fact = facts[0]
        axis, over = fact.words["axis"], fact.words["over"]
        others = f" Number of further such softmaxes: {len(facts) - 1}." * (len(facts) > 1)
        yield Finding(
            "attention-axis",
            (),
            "watch",
            (Evidence("softmaxes over another axis than their product", len(facts), 0.0, step=0),),
            (
                Advice("take the softmax over the keys, the axis that the product with the values "
                       "sums over, usually dim=-1", "summed-axis"),
            ),
            f"{fact.place} makes weights of shape {fact.words['shape']} that sum to 1 along axis "
            f"{axis}, but {fact.words['product']} sums over axis {over}: the weights of a query do "
            f"not sum to 1, so its result is no mean of the values.{others}",
            "Another learning rate does not change the axis.",
            0,
            RATES,
        )  # fmt: skip


def attention_saturated(record: Record) -> Iterator[Finding]:
    """Find attention whose scores differ so much at the beginning that one key gets all weight."""
    facts = [
        fact for fact in record.found_by("attention-saturated") if fact.numbers["spread"] > SPREAD
    ]
    if facts:
        worst = max(facts, key=lambda fact: fact.numbers["spread"])
        size, largest = worst.numbers["spread"], worst.numbers["largest"]
        yield Finding(
            "attention-saturated",
            (),
            "watch",
            (
                Evidence("standard deviation of a query's scores", size, SPREAD, worst.place, 0),
                Evidence("largest weight of a query, mean", largest, None, worst.place, 0),
            ),
            (
                Advice("divide the scores by the square root of the width of the queries, and "
                       "normalise the inputs of the attention", "unit-scores"),
            ),
            f"Before training, the scores of a query at {worst.place} have a standard deviation of "
            f"{size:.3g}, and the softmax gives {largest:.0%} of the weight to one key: so hard a "
            "choice passes little gradient to queries and keys.",
            since=0,
        )  # fmt: skip
