"""All rules in order: causes come before their consequences."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from adiv_monitor.diagnosis.course import course
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Finding, unrefuted
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules import (
    attention,
    code,
    could_train,
    data,
    initialisation,
    inputs,
    interference,
    loss,
    numbers,
    optimizer,
    rates,
    samples,
    states,
    targets,
    units,
    weighting,
    wiring,
)

Rule = Callable[[Record], Iterable[Finding]]

# A fault that exists before training, or at its first step, is not caused by the learning rate.
# The rules before `input_ignored` find the causes of ignored inputs. `rate_too_low` comes late:
# whatever hinders training makes a higher learning rate look better. Where not even a small network
# predicts the labels, a fix that lowers the loss only memorises them: `labels_unrelated`
# stands before the findings of the step.
RULES: tuple[Rule, ...] = (
    could_train.could_train,
    wiring.not_held,
    code.hidden_parameters,
    wiring.unreached,
    code.rate_zero,
    code.rounded_away,
    optimizer.epsilon_dominates,
    code.gradient_hooks,
    code.gradient_differs,
    code.left_in_eval,
    samples.samples_mixed,
    samples.reshape_scrambles,
    samples.gradient_cut,
    samples.no_activation,
    attention.attention_axis,
    targets.future_leak,
    targets.targets_misplaced,
    targets.broadcast_loss,
    targets.no_log,
    targets.logits_as_probabilities,
    targets.softmax_of_one,
    targets.softmax_over_samples,
    loss.double_softmax,
    loss.activated_logits,
    targets.targets_out_of_range,
    targets.outputs_normalised,
    targets.dropout_on_outputs,
    targets.target_is_input,
    loss.zero_slope,
    loss.zero_gradient,
    weighting.label_smoothing,
    weighting.class_weights,
    weighting.class_untaught,
    weighting.padding_counts,
    weighting.penalty_dominates,
    loss.unbounded,
    targets.loss_reversed,
    wiring.frozen,
    data.constant_data,
    numbers.non_finite_from_the_start,
    data.same_batch,
    data.unshuffled,
    data.target_leak,
    data.targets_moved,
    numbers.unsafe_division,
    inputs.input_scale,
    inputs.input_mean,
    inputs.target_scale,
    loss.labels_unrelated,
    inputs.row_spread,
    code.batch_norm_starved,
    code.dropout_too_high,
    data.one_sided_weights,
    attention.attention_saturated,
    initialisation.bad_initialisation,
    wiring.outputs_constant,
    wiring.collapsed,
    wiring.input_lost,
    initialisation.vanishing,
    initialisation.exploding,
    rates.uneven_rates,
    optimizer.decay_fights,
    optimizer.projection_fights,
    optimizer.optimizer_turns,
    samples.input_partly_ignored,
    samples.order_ignored,
    data.bounded_logits,
    rates.rate_too_high,
    wiring.input_ignored,
    units.dead_units,
    units.saturated_units,
    optimizer.clipping_always,
    rates.rate_too_low,
    numbers.became_non_finite,
    numbers.skipped_steps,
    loss.cannot_overfit,
    loss.behind_reference,
    loss.loss_stuck,
    interference.interference,
)


# Findings that follow from others. If only reports are known, so no fix was tried, they give no
# advice of their own beside other findings, and are at most "watch".
SYMPTOMS = frozenset({"rate-too-low", "loss-stuck", "stands-still", "outside-healthy"})
# What a monitor is certain of: the loop does not train the model as it should. All else, but the
# inputs, may follow from it, and nothing can be said of a learning rate that is too low.
CERTAIN = frozenset(
    {
        *("not-held", "unreached", "not-zeroed", "zeroed-early", "left-in-eval", "clipping-always"),
        *("rate-zero", "rate-gone", "rate-rises", "weights-set-back", "gradients-summed"),
    }
)
INPUTS = frozenset({"input-scale", "input-mean", "row-spread"})
# In a monitor's run, what steps that are far too long lead to.
_OF_LONG_STEPS = SYMPTOMS | {
    *("non-finite", "dead-units", "saturated-units", "exploding", "vanishing", "uneven-rates"),
    *("optimizer-turns", "bad-initialisation"),
}
LEADS_TO: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "unbounded-loss": _OF_LONG_STEPS | {"rate-too-high"},
        "rate-too-high": _OF_LONG_STEPS,
    }
)
# Faults in wiring and loss that exist before the first step; findings about learning rates, units
# and overfitting follow from them.
CAUSES = frozenset(
    {
        *("not-held", "not-zeroed", "hidden-parameters", "unreached", "rate-zero", "rounded-away"),
        "epsilon-dominates",
        *("gradient-hooks", "left-in-eval", "double-softmax", "activated-logits"),
        *("logits-as-probabilities", "loss-reversed", "targets-misplaced"),
        *("future-leak", "broadcast-loss", "no-log", "softmax-of-one", "softmax-over-samples"),
        *("samples-mixed", "reshape-scrambles", "gradient-cut", "gradient-differs"),
        *("targets-out-of-range", "target-is-input", "unbounded-loss", "target-scale"),
        *("no-activation", "constant-data", "label-smoothing", "class-weights"),
        *("class-untaught", "penalty-dominates", "unsafe-division", "targets-moved"),
        *("attention-axis", "dropout-on-outputs", "outputs-normalised", "zero-gradient"),
        *("outputs-constant", "collapsed", "zero-slope"),
    }
)
FOLLOWS = frozenset(
    {
        *("rate-too-high", "rate-too-low", "dead-units", "saturated-units", "cannot-overfit"),
        *("loss-stuck", "behind-reference", "zero-gradient"),
    }
)
LAST = frozenset({"cannot-overfit", "behind-reference"})
# Causes of these, too, if they are only to be watched.
SEEN_CAUSES = CAUSES | {"frozen", "dropout-too-high", "same-batch"}
ALSO: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "not-zeroed": frozenset({"optimizer-turns", "non-finite", "stands-still"}),
        "samples-mixed": frozenset({"input-partly-ignored"}),
        "softmax-of-one": frozenset({"input-ignored", "target-scale", "vanishing"}),
        "targets-out-of-range": frozenset({"unbounded-loss", "non-finite", "exploding"}),
        "loss-reversed": frozenset({"vanishing"}),
        "unbounded-loss": frozenset({"non-finite", "exploding"}),
        "unsafe-division": frozenset({"non-finite", "exploding", "row-spread"}),
        "outputs-constant": frozenset({"input-ignored"}),
        "zero-slope": frozenset({"vanishing", "stands-still", "target-scale"}),
        "constant-data": frozenset({"non-finite", "exploding", "labels-unrelated", "same-batch"}),
    }
)
FIRST_THAT = (
    Advice(
        "fix the findings above first, because they may cause this one",
        untried="its cause comes first",
    ),
)


def _of_reports(findings: Sequence[Finding], record: Record) -> Iterator[Finding]:
    """Yield the findings of a monitor's run: the first cause that explains others, and these.

    If the loss rises, a learning rate that is too high is asked about before the inputs.
    """
    if course(record) == "rises":
        findings = sorted(findings, key=lambda finding: finding.name in INPUTS)
    causes = [finding for finding in findings if finding.strength != "note"]
    certain = any(finding.name in CERTAIN for finding in causes)
    cause = next((finding for finding in causes if finding.name in LEADS_TO), None)
    follows = LEADS_TO[cause.name] if cause is not None else frozenset()
    others = any(finding.name not in SYMPTOMS for finding in causes)
    for finding in findings:
        name = finding.name
        if certain and name == "rate-too-low":
            continue
        behind = certain and name not in CERTAIN | INPUTS
        if behind or name in follows or (name in SYMPTOMS and others):
            yield _behind(finding)
        else:
            yield finding


def _behind(finding: Finding) -> Finding:
    strength = "watch" if finding.strength == "act" else finding.strength
    return replace(finding, strength=strength, advice=FIRST_THAT, not_advised="", against=())


def explained(findings: Sequence[Finding]) -> list[Finding]:
    """Add to the first cause the findings that it explains, and remove other advice from these.

    "cannot-overfit" and "behind-reference" defer to every other finding to act on, and to causes.
    """
    act = [finding for finding in findings if finding.strength == "act"]
    cause = next((finding for finding in act if finding.name in CAUSES), None)
    if cause is None:
        is_last = any(finding.name != "cannot-overfit" for finding in act)
        is_last |= any(f.name in SEEN_CAUSES for f in findings if f.strength == "watch")
        return [_behind(f) if f.name in LAST and is_last else f for f in findings]
    follows = FOLLOWS | ALSO.get(cause.name, frozenset())
    explains = dict.fromkeys(f.name for f in findings if f.name in follows and f is not cause)
    said = f" This would explain: {', '.join(explains)}." if explains else ""
    return [
        replace(f, summary=f"{f.summary}{said}") if f is cause
        else _behind(f) if f.name in follows
        else f
        for f in findings
    ]  # fmt: skip


def diagnose(record: Record) -> tuple[Finding, ...]:
    """Return all findings, strongest first, and of equal strength causes before symptoms.

    If a learning rate was tried and pays, statements of rules that it would not help are removed.
    """
    findings = [finding for rule in RULES for finding in rule(record)]
    findings += states.outside_healthy(record, findings)
    if not record.is_audited:
        findings = [*_of_reports(findings, record)]
    findings = explained(findings)
    if record.trained:  # what was learnt would be lost
        findings = [
            replace(f, advice=tuple(a for a in f.advice if a.fix != "reinitialise"))
            for f in findings
        ]
    said = [unrefuted(finding, record.rates.values()) for finding in findings]
    return tuple(sorted(said, key=lambda finding: STRENGTHS.index(finding.strength)))
