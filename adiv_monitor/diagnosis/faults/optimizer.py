"""What do the optimizer, and code after it, make of the gradient?

Are its settings in their range, and is its state kept; does weight decay outweigh the gradient,
does other code undo the step, does the step go another way?
"""

import math
from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import is_long_enough
from adiv_monitor.diagnosis.faults.could_train import SET_BACK, goes_badly, strength
from adiv_monitor.diagnosis.faults.fault import (
    LEARNING,
    LONG_STEPS,
    Number,
    fault,
    finds,
    loop_fault,
    of_layers,
    told,
)
from adiv_monitor.diagnosis.faults.rates import less_momentum, suffers
from adiv_monitor.diagnosis.faults.states import behind_reference
from adiv_monitor.diagnosis.finding import (
    HIGHER_RATES,
    LOWER_RATES,
    Advice,
    Evidence,
    Finding,
    act_if,
)
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report.wording import listed

# Share of the last direction that each step keeps; this one lasts for 40 steps, 0.9 for 10.
LONG_MOMENTUM = 0.975
# Duration of momentum relative to the run; beyond it, later gradients hardly count.
LONGER_THAN_THE_RUN = 10.0
SHARES = ("momentum", "beta1", "beta2", "alpha")  # of an average that are kept in each step
OFF = 0.02  # share of the weights that decay takes in one step; usual ones take 1e-6 to 2e-3
LARGE_EPSILON = 0.01  # gradients of single weights are rarely larger
LOST = 0.25  # share of the measured steps before which the state was made anew
# Pull of the weight decay over the gradient's.
DECAY_WATCH, DECAY_ACT = 0.3, 1.0
# ‖parameters‖ at the end over ‖parameters‖ at the beginning.
SHRUNK = 0.5  # healthy ratios are 1.1 to 2.9
# cos(step as applied, optimizer's step). It is 1 if nothing changes weights after the step.
PROJECTED = 0.98
# The same, if the weights go back. Averages over ranks read −0.3 to 0.6, averages over steps −0.97.
AGAINST = -0.9
# cos(first step, −gradient): the first step has no past, and healthy runs have 0.47 and above.
FIRST_STEP = 0.2


@loop_fault("settings-off", "A setting of the optimizer beyond its range",
            shown_by=read.reported("settings"),
            explains=(*LEARNING, *LONG_STEPS, "weights-set-back", "projection-fights"))  # fmt: skip
def settings_off(record: Record) -> Iterator[Finding]:
    """Find settings that end below zero, or above what is usual."""
    rate = max(read.learning_rates(record).values(), default=0.0)
    limits = dict.fromkeys(SHARES, 1.0) | {"weight_decay": OFF / rate if rate else math.inf}
    times = first_pull(record)  # where it is no share of the weights that Adam's step takes
    if times > DECAY_ACT and goes_badly(record):
        limits["weight_decay"] = _setting(record, "weight_decay") / times
    limits |= {"lr": math.inf, **({"eps": LARGE_EPSILON} if read.scale_free(record) else {})}
    limits["beta1"] = math.sqrt(max(0.0, _setting(record, "beta2"))) or 1.0  # else Adam may diverge
    settings = [{**report.settings, "lr": report.learning_rates} for report in record.reports]
    for name, limit in limits.items() if read.several(record) else ():
        first, *_, last = (of.get(name, ()) for of in settings)
        off = next((i for i, x in enumerate(last) if not 0 <= x < limit), None)
        if off is not None:
            changed = last[off] not in first
            never = last[off] < 0 or name != "eps"  # whatever the loss does
            part = last[off] * rate  # of the weights
            pull = (f": each step pulls the weights towards 0 by {part:.0%} of them" if part >= OFF
                    else f": at first, {times:.3g} times the pull of the gradient")  # fmt: skip
            yield Finding("settings-off",
                strength(record) if never or goes_badly(record) else "note",
                f"In param_groups[{off}], {name} is {last[off]:.3g}"
                + pull * (name == "weight_decay")
                + ("; such steps climb the loss." if name == "lr" else
                   f"; usual is 0 to {limit:.3g}.")
                + f" It was {max(first, default=0.0):.3g} at first." * changed,
                (Evidence(name, last[off], limit, step=record.reports[-1].step),),
                (Advice(f"look for the code that changes {name}" if changed
                        else f"give the optimizer a usual {name}"),))  # fmt: skip


@finds("audit")
def large_epsilon(record: Record) -> Iterator[Finding]:
    """Find an epsilon beside which gradients are small, so that Adam's steps shrink with them."""
    eps = _setting(record, "eps")
    if read.scale_free(record) and eps > LARGE_EPSILON:
        yield Finding("settings-off", act_if(suffers(record)),
            f"The optimizer's eps is {eps:g}: gradients are small beside it, so that steps are as "
            "short as those of plain gradient descent at this rate.",
            (Evidence("eps", eps, LARGE_EPSILON),),
            (Advice("give the optimizer its usual eps, such as 1e-8"),))  # fmt: skip


@loop_fault("state-lost", "The optimizer's state is lost between steps", shown_by=read.stepped,
            explains=(*LEARNING, *LONG_STEPS))  # fmt: skip
def state_lost(record: Record) -> Iterator[Finding]:
    """Find that momentum, or Adam's averages, are made anew again and again."""
    new = [report.step for report in record.reports[1:] if report.new_state]
    if len(new) > 2:
        often = len(new) > LOST * len(record.reports)
        yield Finding("state-lost", strength(record) if often else "note",
            f"The optimizer's state was made anew before {len(new)} of {len(record.reports)} "
            "measured steps, or since the one before: momentum or averages of gradients are lost.",
            (Evidence("measured steps with a new state", len(new), 2.0),),
            (Advice("look for code in the loop that clears or replaces optimizer.state, or loads "
                    "an earlier state"),), since=new[0])  # fmt: skip


@fault("decay-fights", "Weight decay outweighs the gradient")
def decay_fights(record: Record) -> Iterator[Finding]:
    """Find weight decay, the optimizer's or in the loss, that pulls harder than the gradient."""
    norms = [norm for norm in record.parameter_norms if math.isfinite(norm)]
    if not norms or norms[0] == 0:
        return
    decay, pull, shrunk = _setting(record, "weight_decay"), first_pull(record), norms[-1] / norms[0]
    kept = read.by_layer(record, "projection_cosine").values()
    by_others = decay == 0 and any(cosine.below(PROJECTED) for cosine in kept)
    if by_others or not (pull > DECAY_WATCH or shrunk < SHRUNK):
        return
    pulls = f" and pulls {pull:.3g} times as hard as the gradient at the first step"
    yield Finding("decay-fights",
        act_if(shrunk < SHRUNK or (pull > DECAY_ACT and suffers(record))),
        f"The weight decay is {decay:g}{pulls * (pull > DECAY_WATCH)}, and the norm of the "
        f"parameters ends at {shrunk:.3g} times its first value.",
        (*[Evidence("pull of the weight decay", pull, DECAY_WATCH, step=0)] * bool(decay),
         Evidence("norm of the parameters, last over first", shrunk, SHRUNK)),
        (Advice("use no weight decay", "no-decay"),
         Advice("use a tenth of the weight decay")) if decay else
        (Advice("if the loss contains a penalty on the weights, use a tenth of it, or none"),),
        "A lower learning rate weakens gradient and decay alike." * (pull > DECAY_WATCH),
        against=LOWER_RATES)  # fmt: skip


def _outweighs(record: Record) -> bool:
    pull = record.found_by("decay-fights")[0].numbers["pull"]
    return pull > DECAY_ACT and (suffers(record) or any(behind_reference(record)))


told(__name__, "decay-fights", "", _outweighs,
     "Terms of the loss that depend on the weights alone, {value:.3g} of {loss:.3g}, pull "
     "{pull:.3g} times as hard as the other terms at the first step.",
     Number("pull of a penalty on the weights", "pull", above=DECAY_WATCH),
     Advice("use a tenth of this penalty, or none"),
     unless=lambda record: any(decay_fights(record)))  # fmt: skip


def first_pull(record: Record) -> float:
    """Return ‖decay · θ‖ over the norm of the update that it is added to, at the first step.

    The update is the gradient, or Adam's unit steps. Later steps are less informative: where decay
    wins, weights shrink until it and the gradient balance.
    """
    norms, sizes, elements = record.parameter_norms, record.gradient_norms, record.facts.trainable
    if not record.is_audited and record.reports:
        first = record.reports[0]
        norms = (math.hypot(*(x.weight_norm or 0.0 for x in first.layers.values())),)
        sizes, elements = (first.gradient_norm or 0.0,), first.trainable
    size = next(iter(sizes), math.nan)
    decoupled = record.facts.settings.get("decoupled_weight_decay")
    if decoupled or read.optimizer_of(record) in ("AdamW", "Lion", "Adafactor", "Muon"):
        size = math.sqrt(elements)
    return _setting(record, "weight_decay") * norms[0] / size if norms and size > 0 else math.nan


def _setting(record: Record, name: str) -> float:
    """Return a setting of the optimizer, the largest of a monitored run's groups; else 0."""
    of_run = record.reports[-1].settings if record.reports and not record.is_audited else {}
    setting = max(of_run[name]) if name in of_run else record.facts.settings.get(name)
    return float(setting) if isinstance(setting, int | float) else 0.0


@fault("projection-fights", "Other code changes the weights",
       shown_by=lambda record: read.by_layer(record, "projection_cosine"))  # fmt: skip
def projection_fights(record: Record) -> Iterator[Finding]:
    """Find code besides the optimizer that changes the weights, after its step or within it.

    The first step of plain gradient descent is its gradient; another optimizer's may have a low
    cosine by itself, where a few entries of the gradient are far larger than the others. Weight
    decay that exceeds the gradient turns it, too.
    """
    kept, first = read.by_layer(record, "projection_cosine"), _first_cosines(record)
    undone = {p: t.value for p, t in kept.items() if t.below(PROJECTED)}
    within = {p: t.value for p, t in first.items() if t.below(FIRST_STEP) and t.above(-FIRST_STEP)}
    hidden = len(within) > len(kept) / 2 and not first_pull(record) > DECAY_ACT
    if not undone and not hidden:
        return
    measure, limit = ("projection", PROJECTED) if undone else ("parameter", FIRST_STEP)
    cosines = dict(sorted((undone or within).items(), key=lambda of_layer: of_layer[1]))
    applied, layers = read.by_layer(record, "applied_cosine"), tuple(cosines)
    uphill = any(p in applied and applied[p].below(0) for p in layers)
    where, cosine = read.named(record, layers[0]), cosines[layers[0]]
    turns = not undone and read.scale_free(record)  # as Adam does, if few entries are far larger
    yield Finding("projection-fights", act_if(uphill or suffers(record)) if not turns else
        "watch" if suffers(record) else "note",
        f"Code that runs after the optimizer's step changes the weights of {where} again: the "
        f"change that remains has a cosine of {cosine:.3g} with the optimizer's step." if undone
        else f"Code that runs within the step changes the weights of {where}, unless the optimizer "
        f"turns it: the first step has a cosine of {cosine:.3g} with its gradient.",
        of_layers(f"{measure}_cosine", cosines, limit),
        (Advice("train without the code that changes the weights"),
         Advice("project the gradient onto the constraint before the step")),
        "With a higher learning rate, the other code undoes more of each step." * bool(undone),
        layers=layers, against=HIGHER_RATES)  # fmt: skip


@finds("monitor")
def moved_back(record: Record) -> Iterator[Finding]:
    """Find a few steps after which other code moves the weights back past where they began."""
    of_steps = {r.step: [of for x in r.layers.values() if (of := x.projection_cosine) is not None]
                for r in record.reports}  # fmt: skip
    back = {step: median(of) for step, of in of_steps.items() if of and median(of) < AGAINST}
    if back and not any(projection_fights(record)):
        undone = max(report.weights_returned or 0.0 for report in record.reports)
        # Lookahead does so on purpose.
        yield Finding("projection-fights",
            "watch" if undone > SET_BACK or goes_badly(record) else "note",
            f"After step {listed([*map(str, back)])}, of {len(of_steps):,} measured ones, other "
            "code changes the weights: they go back further than the step went.",
            (Evidence("projection_cosine, median layer", min(back.values()), AGAINST),),
            (Advice("look for averaged weights left in, and copy_"),), since=min(back))  # fmt: skip


def _first_cosines(record: Record) -> dict[str, read.Typical]:
    """Return `parameter_cosine` of the first step: 1 for gradient descent, ‖g‖₁/(√n·‖g‖₂) for Adam.

    It is empty for an optimizer that was resumed and so has a past.
    """
    first = read.at_first(record, "parameter_cosine")
    known = first and record.reports[0].step == 0 and not read.resumed(record)
    return first[0] if known else {}


@fault("optimizer-turns", "The optimizer turns the step away from the gradient",
       shown_by=read.stepped)  # fmt: skip
def optimizer_turns(record: Record) -> Iterator[Finding]:
    """Find steps that go uphill or follow gradients of many steps ago.

    In the user's own run, an optimizer with `maximize=True` goes uphill on purpose.
    """
    if not record.is_audited and any(report.maximize for report in record.reports):
        return
    cosines = read.by_layer(record, "parameter_cosine")
    turned = {p: -t.value for p, t in cosines.items() if t.below(0)}
    descents = [r.descent for r in record.reports[1:] if r.descent is not None]
    uphill = fmean(d < 0 for d in descents) if len(descents) >= 3 else 0.0
    # Where the loss has settled, half of the steps go uphill by chance: 1.5 deviations more count.
    half = 0.5 + 0.75 / math.sqrt(max(len(descents), 1))
    momentum = _momentum(record)
    lasts = 1 / (1 - momentum)
    steps = record.facts.steps or len(record.losses)
    outlasts = is_long_enough(record) and lasts > LONGER_THAN_THE_RUN * steps
    if uphill > half:
        evidence = Evidence("share of steps uphill", uphill, half)
        said = (f"{uphill:.0%} of the measured steps go uphill: by the gradient of their own "
                "batch, they raise the loss.")  # fmt: skip
    elif len(turned) > len(cosines) / 2:
        worst = read.worst_first(turned)[0]
        evidence = Evidence("parameter_cosine", cosines[worst].value, 0, worst)
        said = (f"In {len(turned)} of {len(cosines)} layers, the optimizer's step typically points "
                "uphill with respect to the gradient of that step.")  # fmt: skip
    elif momentum > LONG_MOMENTUM and (suffers(record) or outlasts):
        evidence = Evidence("momentum", momentum, LONG_MOMENTUM)
        said = (f"A momentum of {momentum:g} keeps each gradient for {lasts:.0f} steps: the "
                "weights keep moving in old directions after the gradient has turned.")  # fmt: skip
    else:
        return
    yield Finding("optimizer-turns", act_if(suffers(record) or outlasts), said,
        (evidence,), (_straightened(record),), layers=read.worst_first(turned))  # fmt: skip


def _straightened(record: Record) -> Advice:
    """Return advice on steps that don't follow their gradient: its sign, momentum, or other code.

    No momentum can explain that the first step already goes uphill.
    """
    first, momentum = _first_cosines(record), _momentum(record)
    cosines = [cosine.value for cosine in first.values()]
    uphill = cosines and ((record.reports[0].descent or 0.0) < 0 or median(cosines) < 0)
    if momentum and not uphill and record.facts.settings.get("maximize") is not True:
        return Advice(f"use less momentum of {less_momentum(momentum):g}", "less-momentum")
    return Advice("look for maximize=True, and for code that changes gradients before the step")


def _momentum(record: Record) -> float:
    """Return the share of the last step's direction that the next one keeps; 0 if it is unknown."""
    betas = record.facts.settings.get("betas")
    first = betas[0] if isinstance(betas, list | tuple) and betas else 0.0
    found = max(first, _setting(record, "beta1"), _setting(record, "momentum"))
    return float(found) if found < 1 else 0.0
