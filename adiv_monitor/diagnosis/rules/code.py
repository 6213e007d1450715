"""Rules about the code of a run, from the facts that probes of copies found, with their places."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import LOWER_RATES, RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Fact, Record
from adiv_monitor.diagnosis.rules.rates import suffers

# Share of the entries with a gradient that a step leaves equal to the last bit: 81 % with faulty
# bfloat16 weights, at most 2.6 % elsewhere.
ROUNDED_AWAY = 0.5
# Limits of the ratio of the applied gradient's length to the backward pass's, and of their cosine.
CHANGED_LENGTH, TURNED = 10.0, 0.9
# Loss of the trained model with dropout over the loss without: a third of the loss is due to
# dropout.
DROPOUT_COSTS = 1.5


def hidden_parameters(record: Record) -> Iterator[Finding]:
    """Find parameters in plain lists or tensors, which the model does not register."""
    facts = record.found_by("hidden-parameters")
    if facts:
        share = sum(fact.numbers["share"] for fact in facts)
        yield Finding(
            "hidden-parameters",
            (),
            "act",
            (Evidence("share of all parameters", share, 0),),
            (
                Advice("put modules into nn.ModuleList or nn.ModuleDict and tensors into "
                       "nn.Parameter, then make the optimizer", "register-parameters"),
            ),
            f"forward() uses {_places(facts)}, which no parameter of the model is: torch does not "
            "look into plain lists, dictionaries and tensors. The optimizer does not change them.",
            "Another learning rate changes nothing for them.",
            0,
            RATES,
        )  # fmt: skip


def rate_zero(record: Record) -> Iterator[Finding]:
    """Find parameter groups whose learning rate is zero and stays zero."""
    facts = record.found_by("rate-zero")
    if facts:
        share = sum(fact.numbers["share"] for fact in facts)
        scheduled = any(fact.numbers["initial_lr"] > 0 for fact in facts)
        source = (
            " A scheduler has set it, and would not raise it within these steps: look for a "
            "division of integers."
        ) * scheduled
        yield Finding(
            "rate-zero",
            (),
            "act",
            (Evidence("share of the parameters", share, 0),),
            (
                Advice("give this parameter group a learning rate, or set requires_grad=False",
                       "rate-as-others"),
            ),
            f"The learning rate is 0 for {share:.0%} of the parameters, from '{facts[0].place}' "
            f"on, which have a gradient: they stay as they are to the last bit.{source}",
            "A factor on the learning rate leaves zero at zero.",
            0,
            RATES,
        )  # fmt: skip


def rounded_away(record: Record) -> Iterator[Finding]:
    """Find 16-bit weights whose steps are smaller than their last digit."""
    for fact in record.found_by("rounded-away"):
        share = fact.numbers["share"]
        if share > ROUNDED_AWAY:
            yield Finding(
                "rounded-away",
                (),
                "act" if suffers(record) else "watch",
                (Evidence("share of entries that a step leaves as they are", share, ROUNDED_AWAY),),
                (
                    Advice("keep the weights in float32, and compute in 16 bits under "
                           "torch.autocast", "float32-weights"),
                ),
                f"{share:.0%} of the entries that have a gradient are equal to the last bit after "
                f"a step: the weights are {fact.words['dtype']}, and the step is smaller than "
                "their last digit.",
                "A lower learning rate makes steps that are rounded away altogether.",
                0,
                LOWER_RATES,
            )  # fmt: skip


def gradient_hooks(record: Record) -> Iterator[Finding]:
    """Find hooks that change the gradient between the backward pass and the step."""
    for fact in record.found_by("gradient-hooks"):
        ratio, cosine = fact.numbers["ratio"], fact.numbers["cosine"]
        if 1 / CHANGED_LENGTH <= ratio <= CHANGED_LENGTH and cosine >= TURNED:
            continue
        yield Finding(
            "gradient-hooks",
            (),
            "act" if suffers(record) else "watch",
            (
                Evidence("length that is used, of that of the backward pass", ratio,
                         CHANGED_LENGTH if ratio > 1 else 1 / CHANGED_LENGTH, step=0),
                Evidence("their cosine", cosine, TURNED, step=0),
            ),
            (
                Advice("take off the hooks that change gradients (register_hook, "
                       "register_full_backward_hook, register_step_pre_hook)", "without-hooks"),
            ),
            f"Hooks change the gradient between backward() and the step: the optimizer uses one of "
            f"{ratio:.2g} times its length, with a cosine of {cosine:.2f} to it.",
            "",
            0,
        )  # fmt: skip


def left_in_eval(record: Record) -> Iterator[Finding]:
    """Find normalisations that run with their initial statistics and so normalise nothing."""
    facts = record.found_by("left-in-eval")
    running = [fact for fact in facts if not fact.numbers["given"]]
    if running:
        yield Finding(
            "left-in-eval",
            tuple(fact.place for fact in running),
            "act" if suffers(record) else "watch",
            (Evidence("normalisations in evaluation mode", len(running), 0),),
            (Advice("call train() on these modules before training", "train-mode"),),
            f"Evaluation mode while the model trains: {_places(running)}, with the mean 0 and "
            "the variance 1 that they were made with: they normalise nothing.",
            since=0,
        )
    elif facts:
        yield Finding(
            "left-in-eval",
            (),
            "watch",
            (Evidence("normalisations in evaluation mode", len(facts), 0),),
            (Advice("call model.train() at the head of the training loop"),),
            "The model was given in evaluation mode, and its normalisations have the mean 0 and "
            "the variance 1 that they were made with. The audit has trained it in training mode; a "
            "loop that does not call train() normalises nothing.",
            since=0,
        )


def batch_norm_starved(record: Record) -> Iterator[Finding]:
    """Find batch normalisations whose statistics are computed from a handful of values."""
    facts = record.found_by("batch-norm-starved")
    if facts:
        values = min(fact.numbers["values"] for fact in facts)
        yield Finding(
            "batch-norm-starved",
            tuple(fact.place for fact in facts),
            "act" if suffers(record) else "watch",
            (Evidence("values of a channel", values, 4, facts[0].place, 0),),
            (
                Advice("LayerNorm or GroupNorm in their place", "group-norm"),
                Advice("larger batches", "larger-batch"),
            ),
            f"Mean and variance of {values:.0f} values in each channel: {_places(facts)}. They "
            "differ from batch to batch by about as much as they are.",
            since=0,
        )


def dropout_too_high(record: Record) -> Iterator[Finding]:
    """Find dropout that drops more than it keeps, and compare the losses with and without it."""
    facts = record.found_by("dropout-too-high")
    if facts:
        worst = max(facts, key=lambda fact: fact.numbers["rate"])
        rate, with_it, without = (worst.numbers[name] for name in ("rate", "with", "without"))
        costs = with_it > DROPOUT_COSTS * without > 0
        yield Finding(
            "dropout-too-high",
            (),
            "act" if suffers(record) or costs else "watch",
            (Evidence("dropout rate", rate, 0.7, worst.place, 0),),
            (
                Advice(
                    "a rate of 0.1: the argument is the share to drop, not to keep", "dropout-0.1"
                ),
            ),
            f"{worst.place} drops {rate:.0%} of what it is given. The trained model's loss is "
            f"{with_it:.3g} with it, {without:.3g} without.",
            since=0,
        )


def _places(facts: tuple[Fact, ...] | list[Fact]) -> str:
    """Return the places of facts as text."""
    shown = ", ".join(f"'{fact.place}'" for fact in facts[:3])
    more = f" and {len(facts) - 3} more" if len(facts) > 3 else ""
    return f"{shown}{more}"
