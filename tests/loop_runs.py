"""Made records of monitored runs whose loop can't train the model, and of what is meant."""

import math
from dataclasses import replace

from made_records import FACTS, RISING, STILL, WELL, reading, record

from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.seen import activation_before, chance_of, seen_in
from adiv_monitor.report import AttentionReading, Spike, StepReport
from adiv_monitor.report.wording import NO_GRADIENT

OWN = replace(FACTS, model="", optimizer="")  # known from reports alone
LAYERS = {name: reading() for name in "abc"}
SHORT = {name: reading(update_ratio=1e-4, gradient_factor=1e-3) for name in "abc"}
FAR = {name: reading(update_ratio=50.0) for name in "abc"}
HIGH = (4e4, *(3.9e4 + 100.0 * (-1) ** step for step in range(39)))
SLOWLY = tuple(2.3 * 0.99**step for step in range(40))  # by a third
CREEPING = tuple(550.0 - 0.4 * step + 1.5 * (-1) ** step for step in range(40))  # by 3 %
USUAL = {"layers": LAYERS, "unsupported": {}, "optimizer": "SGD", "trainable": 1000}
UP = (2.3, *(2.3 + 3 * step for step in range(39)))
UP_AGAIN = (*(2.3 - 0.1 * step for step in range(10)), *(1.4 + 3 * step for step in range(30)))


def run(
    count: int = 6,
    losses: tuple[float, ...] = WELL,
    *,
    every: int = 7,
    loss_of: tuple[float, ...] = (),
    **facts: object,
) -> Record:
    """A monitored run; a fact that is a list has one value for each report."""
    reports = tuple(
        StepReport(
            every * i,
            losses=dict(zip([every * i], loss_of[i : i + 1], strict=False)),
            coverage=1.0,
            **{
                name: value[i] if isinstance(value, list) else value
                for name, value in (USUAL | facts).items()
            },  # type: ignore[arg-type]
        )
        for i in range(count)
    )
    told = {"probed": seen_in(reports), "activated_output": activation_before(reports)}
    none = {"inputs": {}, "units": {}, "chance": chance_of(reports, losses)}
    return record(facts=OWN, reports=reports, losses=losses, **none, **told)


def without(*steps: str) -> dict[str, object]:
    """Facts of steps in which no gradient reached some of these modules, of 500 elements each."""
    return {
        "unsupported": [dict.fromkeys(paths, NO_GRADIENT) for paths in steps],
        "unmeasured": [{f"{path}.weight": 500 for path in paths} for paths in steps],
    }


def rates(*values: float) -> list[tuple[float, ...]]:
    return [(value,) for value in values]


SLOW_RISE = {"learning_rates": rates(*[1e-3] * 3, *[2e-3] * 3, *[3e-3] * 3)}
IN_ORDER = {"target_moments": [(0.01, float(i)) for i in range(6)], "loss_shapes": ((8, 1),) * 2}
FADES = rates(0.1, 1e-3, 5e-5, 1e-5, 3e-6, 1e-6)


LONG = LAYERS | {"c": reading(update_ratio=2.0)}
ONES, QUARTERS = (1.0,) * 4, (0.25,) * 4
NOT_ZEROED = {name: reading(earlier_share=0.9) for name in "abc"}
DEAD = {name: reading(idle_share=1.0, gradient_factor=math.nan) for name in "ab"}
HEAD = {"c": LAYERS["c"]}
SMALL = {"a": reading(activation_rms=0.3)}
BELOW_ZERO = (0.7, *(-0.01 * step for step in range(39)))
ALIKE = LAYERS | {"c": reading(gradient_cosine=0.99)}
UNDONE = {name: reading(projection_cosine=0.5) for name in "abc"}
OF_ONE = {"loss_shapes": ((8, 1), (8,))}
OF_CLASSES = {"loss_module": "CrossEntropyLoss", "loss_shapes": ((8, 2), (8,))}
PROBABLE_AT_TIMES = ["probabilities", ""] * 3
PADDED = [{"a": reading(kind="gru", idle_share=1 - 1 / (i + 3))} for i in range(6)]
UNREAD = reading(kind="gru", idle_share=0.875)
IGNORED = LAYERS | {"c": reading(idle_share=0.97)}
MASKED = LAYERS | {"c": reading(idle_share=0.85)}  # as for masked language models
FLAT = {name: reading(descent=0.0, idle_share=1.0, update_ratio=math.nan) for name in "abc"}
ROUNDED = {name: reading(descent=1e-18, update_ratio=1e-11) for name in "abc"}
CLIPPED_AWAY = {
    name: reading(descent=1e-18, update_ratio=1e-11, gradient_factor=1e-9) for name in "abc"
}
DIFFERENT = [(float(i),) for i in range(6)]
ADDED = {name: reading(foreign_share=0.7) for name in "abc"}
INVERSE = [(0.95 ** (-7 * i),) for i in range(6)]  # times `WELL`, a constant
ONE_GROUP = {"groups": {"a": 0, "b": 0, "c": 1}}
FADING = {"learning_rates": [(0.1 * 0.02**i, 0.1, 0.1) for i in range(6)]}
GROUPS = {"learning_rates": (0.1, 0.1, 10.0), "groups": {"a": 0, "b": 1, "c": 2}}
SPREAD = {"batch": [(float((-1) ** i * 30),) for i in range(9)], "batch_spread": (10.0,)}
LOOKS = {
    "a": AttentionReading(
        8, 8, attention_entropy=0.01, attention_first_share=0.1, attention_logit_max=300.0
    )
}
COARSE = {"attention_logit_max": 90.0, "attention_logit_step": 0.7}
UNSCALED = [
    {n: reading(descent=0.01 * (i + 1), update_ratio=1e-5, gradient_factor=2**-16) for n in "abc"}
    for i in range(6)
]
SCALED = {name: reading(gradient_factor=65536.0, update_ratio=1e3) for name in "abc"}
NO_FACTOR = {name: reading(gradient_factor=math.nan, update_ratio=math.nan) for name in "abc"}
AVERAGED = {name: reading(projection_cosine=-0.97) for name in "abc"}
OF_WORKERS = {name: reading(projection_cosine=-0.2) for name in "abc"}
HITS = {
    "gradient-reversed by an optimizer that maximizes": run(
        losses=RISING, maximize=True, loss_module="CrossEntropyLoss"
    ),
    "loss-multiplied by a scaler": run(losses=STILL, layers=UNSCALED, loss_gradients=(1.0,)),
    "loss-multiplied by a scale that nothing divides": run(
        losses=(1.6, *(1e5,) * 3, math.inf),
        layers=[SCALED, *[NO_FACTOR] * 5],
        loss_gradients=(65536.0,),
    ),
    "settings-off by a decay that takes weights back": run(
        losses=STILL,
        settings={"weight_decay": (0.5,)},
        learning_rates=(0.1,),
        weights_returned=[None, None, 0.6, 0.7, 0.6, 0.9],
        layers=UNDONE,
    ),
    "weights-set-back now and then": run(weights_returned=[None, None, 0.0, 1.0, 0.1, 1.0]),
    "dropout-too-high that makes steps too long": run(losses=RISING, layers=FAR, dropout=0.95),
    "zero-gradient": run(losses=(0.0,) * 40, layers=FLAT),
    "zero-gradient up to rounding": run(
        losses=(1.6,) * 40, layers=ROUNDED, weights_returned=[None, None, 1.0, 1.0, 1.0, 1.0]
    ),
    "targets-ignored": run(losses=STILL, layers=IGNORED),
    "dropout-too-high": run(losses=STILL, dropout=[0.1, 0.5, 0.8, 0.9, 0.95, 0.99]),
    "gradient-rescaled": run(losses=STILL, rescaled=("a", "b"), loss_gradients=(1.0,)),
    "loss-multiplied by 1024": run(losses=RISING, loss_gradients=(1024.0,)),
    "loss-multiplied by its inverse": run(
        losses=WELL, loss_gradients=INVERSE, loss_of=WELL[::7], layers=LAYERS
    ),
    "state-lost": run(new_state=True),
    "state-lost now and then": run(15, new_state=[i in (4, 8, 12) for i in range(15)]),
    "losses-unused": run(unused_losses=5, loss_gradients=(1.0,)),
    "accumulation-cut": run(loss_counts={4: 5, 6: 2}, loss_gradients=QUARTERS),
    "accumulation-cut for few batches": run(loss_counts={4: 50, 6: 1}, loss_gradients=QUARTERS),
    "rate-falls-back": run(learning_rates=(0.01,), rate_falls=[0, 0, 1, 1, 2, 3]),
    "rate-falls-back of steps that count epochs": run(9, **SLOW_RISE, settings={"max_lr": (0.1,)}),
    "settings-off": run(settings=[{"momentum": (0.9 + 0.05 * i,)} for i in range(6)]),
    "settings-off by a decay that outweighs all": run(
        losses=STILL, settings={"weight_decay": (0.0, 1.0)}, learning_rates=(0.1, 0.1)
    ),
    "group-rates": run(losses=STILL, layers=LAYERS | {"c": reading(update_ratio=2.0)}, **GROUPS),
    "batches-apart": run(9, STILL, every=4, **SPREAD),
    "not-zeroed": run(layers=NOT_ZEROED),
    "not-zeroed before units die": run(
        9, STILL, layers=[LAYERS, *[NOT_ZEROED] * 3, LAYERS, *[LAYERS | DEAD] * 4]
    ),
    "unreached by a loss that is made anew": run(losses=STILL, layers={}, **without(*["ab"] * 6)),
    "unreached since it was frozen": run(
        layers=[LAYERS, LAYERS, *[HEAD] * 4], trainable=[1000, 1000, *[300] * 4]
    ),
    "unreached since it was detached": run(
        layers=[LAYERS, LAYERS, *[HEAD] * 4], **without("", "", *["a"] * 4)
    ),
    "unshuffled": run(losses=STILL, layers=ALIKE),
    "unshuffled by targets": run(losses=STILL, **IN_ORDER),
    "unshuffled where the loss does not halve": run(losses=SLOWLY, layers=ALIKE),
    "not-held since they were unfrozen": run(not_held=[*[{}] * 3, *[{"a": 900}] * 3]),
    "not-held": run(not_held=[{}, *[{"a": 900}] * 5]),
    "unreached": run(cut_off={"a": 400, "b": 20}),
    "zeroed-early": run(removed={"a": 600, "b": 300}, layers={}),
    "zeroed-early by micro-batches": run(zeroed_passes=7),
    "zeroed-early as an epoch begins": run(zeroed_passes=[0, *[3] * 5], loss_gradients=(0.25,) * 7),
    "left-in-eval": run(evaluated=("drop",)),
    "left-in-eval since the first evaluation": run(evaluated=[(), (), *[("drop",)] * 4]),
    "same-batch": run(batch=(3.5, 7.0), next_batch=(3.5, 7.0)),
    "clipping-always": run(losses=STILL, layers=SHORT, loss_gradients=(1.0,)),
    "clipping-always to nothing": run(losses=STILL, layers=CLIPPED_AWAY, loss_gradients=(1.0,)),
    "clipping-always by a scaler": run(
        losses=STILL,
        layers={"a": reading(update_ratio=1e-9, gradient_factor=1e-9)},
        loss_gradients=(65536.0,),
    ),
    "rate-zero": run(learning_rates=(0.0,), losses=STILL),
    "rate-zero of one group": run(**ONE_GROUP, learning_rates=(0.1, 0.0)),
    "settings-off by exchanged betas": run(settings={"beta1": (0.999,), "beta2": (0.9,)}),
    "settings-off by a rate below zero": run(
        losses=RISING, learning_rates=rates(0.1, 0.05, 0.01, -0.01, -0.05, -0.1)
    ),
    "broadcast-loss": run(loss_module="MSELoss", loss_shapes=((64, 1), (64,))),
    "softmax-of-one": run(losses=(0.0,) * 40, layers=FLAT, **(OF_CLASSES | OF_ONE)),
    "double-softmax": run(loss_module="CrossEntropyLoss", outputs="probabilities"),
    "activated-logits": run(loss_module="BCEWithLogitsLoss", outputs="probabilities"),
    "activated-logits by a ReLU": run(loss_module="CrossEntropyLoss", outputs="rectified"),
    "class-untaught": run(labels=(30, 20, 0), **OF_CLASSES),
    "unshuffled by labels": run(
        9, STILL, every=4, labels=[(9, 0), (9, 0), (0, 9)] * 3, **OF_CLASSES, **SPREAD
    ),
    "softmax-over-samples": run(outputs="over samples", loss_shapes=((64, 10), (64,))),
    "samples-mixed": run(layers={"a": UNREAD}, batch=DIFFERENT),
    "running-statistics of one batch": run(norm_momenta={"n": 0.99}),
    "running-statistics that hardly move": run(norm_momenta={"n": 0.001}, norm_passes=1),
    "target-scale": run(losses=HIGH, loss_module="MSELoss", layers=SMALL),
    "target-scale of a sum": run(losses=HIGH, loss_module="CrossEntropyLoss", layers=SMALL),
    "targets-out-of-range": run(losses=BELOW_ZERO, loss_module="BCEWithLogitsLoss"),
    "no-log": run(losses=BELOW_ZERO, loss_module="NLLLoss"),
    "constant-data": run(losses=STILL, batch=(-8e3,), batch_spread=(0.3,), loss_shapes=((), ())),
    "penalty-dominates": run(losses=STILL, layers=ADDED),
    "seed-again": run(random_states=(1, 2)),
    "running-statistics": run(norm_passes=[1, 8, 23, 30, 45, 52]),
    "attention-saturated": run(losses=STILL, attention=LOOKS),
    "attention-saturated by coarse logits": run(
        losses=STILL, attention={"a": replace(LOOKS["a"], attention_entropy=0.6, **COARSE)}
    ),
    "rounded-away": run(losses=STILL, layers=dict.fromkeys("abc", reading(unchanged_share=0.6))),
    "loss-spike": run(spikes=(Spike(5, 9.0, 0.5, 20.0, {"b": 40.0}),)),
    "rate-gone": run(learning_rates=rates(0.1, 1e-5, 1e-8, 1e-9, 1e-12, 0.0)),
    "rate-gone of one group": run(**FADING),
    "rate-gone where the loss stands": run(losses=STILL, learning_rates=FADES),
    "rate-gone where the loss does not halve": run(losses=SLOWLY, learning_rates=FADES),
    "rate-too-high by a first step that a run makes up for": run(
        losses=(2.3, 30.0, 9.0, *(1.0,) * 37), layers=[FAR, *[LAYERS] * 5]
    ),
    "rate-rises": run(losses=UP_AGAIN, learning_rates=rates(0.01, 0.03, 0.1, 0.3, 1, 3)),
    "rate-rises by one group's jump": run(learning_rates=[*[(0.1, 0.01)] * 4, *[(0.1, 0.3)] * 2]),
    "weights-set-back": run(weights_returned=[None, None, 1.0, 1.0, 1.0, 1.0]),
    "weights-set-back half": run(losses=STILL, weights_returned=[None, None, 0.6, 0.7, 0.1, 0.9]),
    "other-optimizer": run(changed_by=[(), *[("Adam",)] * 5], layers=UNDONE),
    "frozen": run(layers=HEAD, trainable=300, frozen={"a": 300, "b": 400}),
    "gradients-summed": run(losses=RISING, layers=LONG, loss_gradients=ONES),
    "gradients-summed as the loss falls": run(loss_gradients=ONES),
    "gradient-reversed by the negative of the loss": run(losses=RISING, loss_gradients=(-1.0,)),
}
MEANT = {
    "losses that are not finite": run(spikes=(Spike(5, math.inf, 0.5, math.inf),)),
    "outputs of their targets' shape": run(loss_module="MSELoss", loss_shapes=((64, 1), (64, 1))),
    "a loss of one's own": run(loss_shapes=((64, 1), (64,)), outputs="probabilities"),
    "probabilities at times": run(loss_module="BCEWithLogitsLoss", outputs=PROBABLE_AT_TIMES),
    "rectified outputs of another loss": run(loss_module="MSELoss", outputs="rectified"),
    "the last time of a layer in reverse": run(layers={"a_reverse": UNREAD}, batch=DIFFERENT),
    "statistics of a trained model": run(norm_momenta={"n": 0.001}, norm_passes=99),
    "a class that is rare": run(labels=(30, 3, 0), **OF_CLASSES),
    "samples of one class": run(labels=(30, 0), **OF_CLASSES),
    "embeddings, not scores": run(labels=(30, 20, 0)),
    "two players": run(labels=[(9, 0), (0, 9)] * 3, other_optimizers=("Adam",), **OF_CLASSES),
    "tokens of one text": run(labels=[(2000, 0), (0, 2000)] * 3, **OF_CLASSES),
    "pixels of one image": run(
        labels=[(900, 0, 0), (0, 90, 0)] * 3, **OF_CLASSES | {"loss_shapes": ((1, 3, 9), (1, 990))}
    ),
    "shuffled, asking for the same": run(losses=STILL, layers=ALIKE, labels=(8, 9), **OF_CLASSES),
    "padding": run(layers=PADDED, batch=DIFFERENT),
    "padding to one length": run(layers={"a": replace(UNREAD, idle_share=0.65)}, batch=DIFFERENT),
    "padding of one batch": run(layers={"a": UNREAD}, batch=(1.0,)),
    "no random numbers": run(random_states=(1, 1)),
    "a seed for each epoch": run(random_states=[(1, 2), (3, 4)] * 3),
    "two passes in each step": run(norm_passes=[2, 16, 30, 44, 58, 72]),
    "the rest of an epoch": run(norm_passes=[1, 8, 15, 23, 30, 37]),
    "the rest of an accumulation": run(norm_passes=[4, 32, 58, 86, 114, 140]),
    "the rest of an accumulation in each step": run(every=1, norm_passes=[3, 6, 7, 10, 13, 14]),
    "an accumulation that grows": run(norm_passes=[1, 8, 15, 22, 50, 78]),
    "outputs that are large at first": run(
        losses=tuple(2e4 * x for x in SLOWLY),
        loss_module="MSELoss",
        layers={"a": reading(activation_rms=200.0)},
    ),
    "probabilities of one's own loss": run(loss_module="BCELoss", outputs="probabilities"),
    "statistics that are frozen": run(norm_passes=[5] * 6),
    "a group that is added later": run(
        groups=[{}, *[ONE_GROUP["groups"]] * 5], learning_rates=[(0.1,), *[(0.1, 0.0)] * 5]
    ),
    "a warm-up at a constant rate": run(learning_rates=rates(0.03, 0.03, 0.03, 0.03, 0.1, 0.1)),
    "a warm-up of epochs": run(learning_rates=rates(*[0.1] * 4, 2, 4), settings={"max_lr": (9,)}),
    "a rise of epochs towards its peak": run(9, **SLOW_RISE, settings={"initial_lr": (0.02,)}),
    "series in order": run(**IN_ORDER),
    "targets of one sample each": run(losses=STILL, target_moments=[(0.0, i) for i in range(6)]),
    "a warm-up over two orders of magnitude": run(learning_rates=rates(1e-3, 0.01, *[0.1] * 4)),
    "a group that begins later": run(**ONE_GROUP, learning_rates=[(0.1, 0.0), *[(0.1, 0.1)] * 5]),
    "attention with a sink": run(attention={"a": replace(LOOKS["a"], attention_first_share=0.9)}),
    "attention of two keys": run(attention={"a": replace(LOOKS["a"], attention_entropy=0.1)}),
    "large logits in float32": run(
        attention={"a": replace(LOOKS["a"], attention_entropy=0.6, attention_logit_step=1e-5)}
    ),
    "weights of which few stay": run(layers=dict.fromkeys("abc", reading(unchanged_share=0.4))),
    "a layer that no step moves": run(layers=dict.fromkeys("abc", reading(unchanged_share=1.0))),
    "one layer whose weights stay": run(
        layers={path: reading(unchanged_share=0.9 * (path == "a")) for path in "abc"}
    ),
    "an objective that is maximized": run(losses=tuple(-x for x in WELL), maximize=True),
    "averages over ranks": run(layers=[LAYERS, LAYERS, OF_WORKERS, LAYERS, OF_WORKERS, LAYERS]),
    "a loss of zero that has a gradient, as of a policy": run(losses=(0.0,) * 40, batch=DIFFERENT),
    "one batch for ever, whose loss stays": run(losses=(1.0,) * 40, batch=(1.0,)),
    "a resumed run with satisfied margins": run(layers=[LAYERS, *[FLAT] * 5]),
    "most targets masked": run(losses=STILL, layers=MASKED),
    "most targets ignored in some steps": run(losses=STILL, layers=[IGNORED, MASKED] * 3),
    "dropout that rises to a half": run(losses=STILL, dropout=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
    "an AMP scale that doubles": run(
        loss_gradients=[(2.0**i,) for i in range(6)],
        layers=[{n: reading(gradient_factor=2.0**-i) for n in "abc"} for i in range(6)],
    ),
    "clipping of rare peaks": run(
        loss_gradients=(1.0,),
        layers=[LAYERS, {n: reading(gradient_factor=0.1) for n in "abc"}] * 3,
    ),
    "a loss that is multiplied, by Adam": run(loss_gradients=(1024.0,), optimizer="AdamW"),
    "a penalty in the loss, as it falls": run(layers=ADDED),
    "a state that is empty at first": run(new_state=[True, *[False] * 5]),
    "a state that is loaded twice": run(new_state=[False, True, False, True, False, False]),
    "a validation with gradients, once": run(unused_losses=[30, *[0] * 5], loss_gradients=(1.0,)),
    "two losses for a table in each step": run(unused_losses=2, loss_gradients=(1.0,)),
    "an epoch's last step of few batches": run(loss_counts={4: 5, 2: 1}, loss_gradients=QUARTERS),
    "as many batches as fit": run(loss_counts={4: 5, 5: 2, 6: 2}, loss_gradients=QUARTERS),
    "two losses in a backward pass, or three": run(loss_counts={2: 5, 3: 2}, loss_gradients=(1.0,)),
    "a generator's step after some of its critic's": run(
        loss_counts={2: 5, 3: 2}, loss_gradients=(1.0, 1.0)
    ),
    "a generator's step after a critic's of three terms": run(
        loss_counts={3: 5, 4: 2}, loss_gradients=ONES[:3], other_optimizers=("Adam",)
    ),
    "a warm-up and a step down": run(learning_rates=(0.01,), rate_falls=1),
    "groups that decay": run(learning_rates=[(0.1 * 0.1**i, 0.001 * 0.1**i) for i in range(6)]),
    "a group fading at last": run(learning_rates=[(0.1 if i < 5 else 0.0, 0.1) for i in range(6)]),
    "momentum that cycles": run(settings=[{"momentum": (0.85 + 0.1 * (i % 2),)} for i in range(6)]),
    "averages of one length": run(settings={"beta1": (0.95,), "beta2": (0.95,)}),
    "a large epsilon, as the loss falls": run(settings={"beta1": (0.9,), "eps": (1e-3,)}),
    "a head with a higher rate": run(layers=LAYERS | {"c": reading(update_ratio=0.2)}, **GROUPS),
    "batches that differ, as the loss falls": run(9, every=4, **SPREAD),
    "rounding below zero": run(losses=(0.7, *(-1e-6,) * 39), loss_module="BCEWithLogitsLoss"),
    "gradients of two passes": run(losses=STILL, layers=ADDED, loss_gradients=(0.5, 0.5)),
    "inputs that hardly differ, as the loss falls": run(batch=(-8e3,), batch_spread=(0.3,)),
    "batches drawn at random": run(9, STILL, every=4, **(SPREAD | {"batch_spread": (30.0,)})),
    "one row with a gradient": run(
        losses=STILL,
        layers={"a": reading(common_share=1.0, scale_cv=0.0, rows_without_gradient=63)},
    ),
    "gradients of other code before the first step": run(
        2, layers={name: reading(earlier_share=0.05) for name in "abc"}
    ),
    "a penalty whose gradient comes first now and then": run(
        layers=[LAYERS, *[NOT_ZEROED, LAYERS, LAYERS] * 2, LAYERS], count=8
    ),
    "most of it unused, as the loss falls": run(layers=HEAD, **without(*["ab"] * 6)),
    "half of it unused": run(losses=STILL, **without(*"aaaaaa")),
    "a small part is frozen": run(trainable=1000, frozen={"a": 100}),
    "frozen by turns": run(frozen=[{"a": 300}, {"b": 300}] * 3),
    "unfrozen by steps": run(layers=[HEAD, HEAD, *[LAYERS] * 4], trainable=[300, 300, *[1000] * 4]),
    "frozen at times": run(layers=[LAYERS, HEAD] * 3, trainable=[1000, 300] * 3),
    "experts by turns": run(losses=STILL, **without(*"ababab")),
    "samples that agree, as the loss falls": run(layers=ALIKE),
    "samples alike, of two players": run(losses=STILL, layers=ALIKE, other_optimizers=("Adam",)),
    "a head that nobody uses": run(not_held=[{}, *[{"a": 9}] * 5]),
    "a gradient in the last step alone": run(not_held=[*[{}] * 5, {"a": 900}]),
    "another network that is trained in turns": run(not_held=[{}, {"a": 900}, {}, *[{"a": 9}] * 3]),
    "idle experts": run(cut_off=[{"a": 400}, {"b": 400}, {}, {"a": 400}, {}, {"b": 400}]),
    "a part without a gradient": run(removed={"a": 400}),
    "one step zeroed, as by an AMP scaler": run(zeroed_passes=[1, 0, 0, 0, 0, 0]),
    "zeroed in half of the steps": run(zeroed_passes=[1, 0, 1, 0, 1, 0]),
    "evaluated once": run(evaluated=[("drop",), (), (), (), (), ()]),
    "evaluated at the end": run(evaluated=[(), (), (), *[("drop",)] * 3]),
    "the same first batch of each epoch": run(batch=(3.5,), next_batch=(4.5,)),
    "batches that are not known": run(batch=(), next_batch=()),
    "clipping, as the loss falls": run(layers=SHORT, loss_gradients=(1.0,)),
    "clipping by Adam": run(losses=STILL, layers=SHORT, loss_gradients=(1.0,), optimizer="AdamW"),
    "a mixed-precision scaler": run(
        losses=STILL, loss_gradients=(65536.0,),
        layers={"a": reading(update_ratio=1e-4, gradient_factor=1 / 65536)},
    ),
    "warm-up from zero": run(learning_rates=rates(0.0, 0.01, 0.1, 0.1, 0.1, 0.1)),
    "cosine to zero": run(learning_rates=rates(0.1, 0.09, 0.06, 0.03, 0.01, 0.0)),
    "exponential decay": run(learning_rates=FADES),
    "a cycle": run(learning_rates=rates(0.1, 0.0, 0.1, 0.0, 0.1, 0.0)),
    "warm-up on a loss that rises from the first step": run(
        losses=UP, learning_rates=rates(0.01, 0.03, 0.1, 0.3, 1, 3)
    ),
    "warm-up that the loss survives": run(learning_rates=rates(0.01, 0.03, 0.1, 0.3, 1, 3)),
    "averages that are swapped in and out": run(weights_returned=[None, None, 0.0, 0.1, 0.0, 0.0]),
    "weights near earlier ones, as the loss falls": run(
        weights_returned=[None, None, 0.6, 0.7, 0.1, 0.9]
    ),
    "tasks in turn, each from a loss of its own": run(
        losses=tuple(x + y for y in (0.0, 2.0, 0.0, 2.0) for x in WELL[:12])
    ),
    "a step uphill by momentum": run(
        layers={name: reading(parameter_cosine=-0.1, update_cosine=-0.1) for name in "abc"}
    ),
    "another optimizer for other weights": run(other_optimizers=("Adam",), layers=UNDONE),
    "another optimizer that takes over": run(changed_by=[(), ("Adam",), *[()] * 4]),
    "a mean of micro-batches": run(losses=RISING, layers=LONG, loss_gradients=(0.25,) * 4),
    "three terms of a critic": run(loss_gradients=ONES[:3], other_optimizers=("Adam",)),
    "micro-batches by Adam": run(losses=RISING, layers=LONG, loss_gradients=ONES, optimizer="Adam"),
    "two terms of a critic": run(losses=RISING, layers=LONG, loss_gradients=(1.0, 1.0)),
    "two reports": run(2, evaluated=("drop",), cut_off={"a": 400}, zeroed_passes=1),
}  # fmt: skip
