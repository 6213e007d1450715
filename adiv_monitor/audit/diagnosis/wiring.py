"""Rules about wiring: whether all that should take part in training does."""

from collections.abc import Iterator

from adiv_monitor.audit.diagnosis.units import ALL_DEAD, dead_share
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# Below this relative change of the loss when inputs are exchanged between samples, the model does
# not look at them: rounding alone gives 1e-7.
INPUT_MATTERS = 1e-4


def not_held(record: Record) -> Iterator[Finding]:
    """Trainable parameters with a gradient that the optimizer does not hold."""
    names = record.wiring.not_held
    if names:
        yield Finding(
            "not-held",
            names,
            "act",
            (Evidence("parameters not held", len(names), 0),),
            (
                Advice(
                    "give the optimizer these parameters: make it after the model is complete, or "
                    "add a parameter group",
                    "hold-parameters",
                ),
                Advice("if they are meant to stay as they are, set requires_grad=False"),
            ),
            f"{_several(names)} receive gradients, but the optimizer does not hold them: they "
            "never change.",
            "Another learning rate changes nothing for them.",
        )


def unreached(record: Record) -> Iterator[Finding]:
    """Trainable parameters that no gradient ever comes to."""
    unused = set(record.wiring.unused)
    names = tuple(n for n in record.wiring.unreached if n not in unused)
    if names:
        yield Finding(
            "unreached",
            names,
            "act",
            (Evidence("parameters without a gradient", len(names), 0),),
            (
                Advice("look for .detach(), .data, .item(), torch.no_grad() or argmax on the way "
                       "from these layers to the loss"),
            ),
            f"The loss sends no gradient to {_several(names)}, though their modules run: the way "
            "back to them is cut.",
            "No optimizer and no learning rate can train what has no gradient.",
        )  # fmt: skip
    if unused:
        yield Finding(
            "unreached",
            tuple(n for n in record.wiring.unreached if n in unused),
            "watch",
            (Evidence("parameters of modules that never ran", len(unused), 0),),
            (Advice("call these modules in forward(), or take them out"),),
            f"{_several(tuple(unused))} belong to modules that never ran.",
        )


def frozen(record: Record) -> Iterator[Finding]:
    """Parameters with requires_grad=False, which may be meant."""
    names = record.wiring.frozen
    if names:
        yield Finding(
            "frozen",
            names,
            "watch",
            (Evidence("frozen parameters", len(names)),),
            (
                Advice("set requires_grad=True, unless they are meant to stay as they are",
                       "unfreeze"),
            ),
            f"{_several(names)} are frozen (requires_grad=False) and stay as they are.",
        )  # fmt: skip


def input_ignored(record: Record) -> Iterator[Finding]:
    """A model that gives the same, whatever its inputs are; unless it is because units are dead."""
    matters = record.wiring.input_matters
    if matters < INPUT_MATTERS and not dead_share(record) > ALL_DEAD:
        yield Finding(
            "input-ignored",
            (),
            "act",
            (Evidence("input_matters", matters, INPUT_MATTERS),),
            (
                Advice("follow one batch through forward(): look for inputs that are multiplied by "
                       "zero, overwritten or not used, and for labels shuffled apart from them"),
            ),
            "The loss hardly changes when inputs are exchanged between samples: the model does not "
            "look at them.",
            "More steps or another learning rate teach at best how often each answer is right.",
        )  # fmt: skip


def _several(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more parameters"
