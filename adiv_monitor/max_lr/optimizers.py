"""Rules of how an optimizer's update scales with the width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import optim
from torch.optim import Optimizer


@dataclass(frozen=True)
class UpdateRule:
    """The scaling of an optimizer's update: multiplier × update is n^(−k), k = p + c + s·G.

    p = from_a·a + from_b·b + h. c is the exponent of the learning rate, and G that of the gradient
    of the features. s is 1 in all layers but readouts if the update is proportional to the
    gradient, else 0.

    Attributes:
        name: name of the rule.
        from_a: power of the multiplier: 1, or 2 if the update is proportional to the gradient,
            which contains the multiplier too.
        from_b: 1 if learning rates are relative to the size of the weights.
        follows_gradient: whether the update is proportional to the gradient.
        h: (embedding, hidden, readout): the RMS of the update at learning rate 1 is n^(−h).
        relative: whether a learning rate that grows with width (c < 0) would make updates larger
            than the weights.
    """

    name: str
    from_a: int = 1
    from_b: int = 0
    follows_gradient: bool = False
    h: tuple[float, float, float] = (0, 0, 0)
    relative: bool = False


AnyRule: TypeAlias = str | UpdateRule | Sequence[float] | Optimizer | type[Optimizer]

SGD = UpdateRule("sgd", from_a=2, follows_gradient=True)  # with momentum too
ADAM = UpdateRule("adam")  # and all others whose updates have an RMS near 1: sign, Lion, …
ADAFACTOR = UpdateRule("adafactor", from_b=1, relative=True)
MUON = UpdateRule("muon", h=(0, 0.5, 0))  # hidden updates of unit spectral norm, others by Adam
_RULES: Mapping[str, UpdateRule] = MappingProxyType(
    {rule.name: rule for rule in (SGD, ADAM, ADAFACTOR, MUON)}
)
_OTHERS = ("AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Lion", "AdamW8bit")
_BY_CLASS: Mapping[str, UpdateRule] = MappingProxyType(
    {**_RULES, **dict.fromkeys(map(str.lower, _OTHERS), ADAM)}
)


def update_rule(given: AnyRule) -> UpdateRule:
    """Return the rule for the name, class or instance of an optimizer, or for exponents h.

    Raises:
        ValueError: `given` is none of these, or an optimizer whose rule is not known.
    """
    if isinstance(given, UpdateRule):
        return given
    if isinstance(given, str) and given.lower() in _BY_CLASS:
        return _BY_CLASS[given.lower()]
    if isinstance(given, type) or hasattr(given, "param_groups"):
        return _rule_of(given)
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 3:
        return UpdateRule("updates", h=(float(given[0]), float(given[1]), float(given[2])))
    raise ValueError(
        f"optimizer={given!r}: expected one of {', '.join(map(repr, _RULES))}, an UpdateRule, an "
        "optimizer, or three exponents h (embedding, hidden, readout) of updates with an RMS of "
        "n^(−c−h)"
    )


def _rule_of(optimizer: object) -> UpdateRule:
    """Return the rule of a torch optimizer, of its class, or of one with the same name."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    first: Mapping[str, Any] = next(iter(getattr(optimizer, "param_groups", ())), {})
    for name in (base.__name__.lower() for base in kind.__mro__):
        if name == "muon" and first.get("adjust_lr_fn") == "match_rms_adamw":
            return ADAM
        if name == "adafactor" and not first.get("scale_parameter", True):
            return ADAM  # its rates are absolute, as those of Hugging Face's may be
        if name in _BY_CLASS:
            return _BY_CLASS[name]
    raise ValueError(
        f"rule=None: how updates of {kind.__name__} grow with width is not known, "
        "expected its rule: 'sgd', 'adam', 'adafactor', 'muon', an UpdateRule, or three exponents"
    )


# These add weight decay to the gradient, unless a group says otherwise.
_COUPLED = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop)


def couples_decay(optimizer: AnyRule, group: Mapping[str, Any] | None = None) -> bool:
    """Whether the optimizer normalises a gradient that includes weight decay.

    Decay is then not proportional to rate × decay.

    Args:
        optimizer: an optimizer or its class; False for anything else.
        group: one of its parameter groups; None: the first.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    groups = getattr(optimizer, "param_groups", None) or [{}]
    chosen = groups[0] if group is None else group
    decoupled = chosen.get("decoupled_weight_decay", kind is optim.AdamW)
    return issubclass(kind, _COUPLED) and not decoupled
