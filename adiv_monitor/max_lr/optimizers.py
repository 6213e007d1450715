"""How large an optimizer's update is, as an exponent of width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import optim
from torch.optim import Optimizer


@dataclass(frozen=True)
class UpdateRule:
    """The size of multiplier × update of a layer is n^(−k), k = p + c + s·G.

    p = from_a·a + from_b·b + h, c is the exponent of the learning rate, and G that of the gradient
    of the features, on which the update depends (s = 1) only where it is proportional to the
    gradient, and then in all layers but readouts.

    Attributes:
        name: what it is called.
        from_a: how often the multiplier enters: 1 by itself, 2 where the gradient's comes on top.
        from_b: 1 where learning rates are relative to the size of the weights.
        follows_gradient: whether the update is proportional to the gradient.
        h: (embedding, hidden, readout): the update's RMS at rate 1 is n^(−h).
        relative: whether a rate that grows with width (c < 0) would outgrow the weights themselves.
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
    """An optimizer's rule, by its name, class or instance, or by exponents h of its updates.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(given, UpdateRule):
        return given
    if isinstance(given, str) and given.lower() in _BY_CLASS:
        return _BY_CLASS[given.lower()]
    if isinstance(given, type) or hasattr(given, "param_groups"):
        return rule_of(given)
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 3:
        return UpdateRule("updates", h=(float(given[0]), float(given[1]), float(given[2])))
    raise ValueError(
        f"optimizer={given!r}: expected one of {', '.join(map(repr, _RULES))}, an UpdateRule, an "
        "optimizer, or three exponents h (embedding, hidden, readout) of updates with an RMS of "
        "n^(−c−h)"
    )


def rule_of(optimizer: object) -> UpdateRule:
    """The update rule of an optimizer of torch's, of its class, or of one that is named as these.

    Raises:
        ValueError: it is not known.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    for base in kind.__mro__:
        if base.__name__ == "Muon":
            groups = getattr(optimizer, "param_groups", ())
            adjusted = {group.get("adjust_lr_fn") for group in groups}
            return ADAM if adjusted == {"match_rms_adamw"} else MUON
        if base.__name__ == "Adafactor" and _is_absolute(optimizer):
            return ADAM
        if base.__name__.lower() in _BY_CLASS:
            return _BY_CLASS[base.__name__.lower()]
    raise ValueError(
        f"rule=None: how updates of {kind.__name__} grow with width is not known, "
        "expected its rule: 'sgd', 'adam', 'adafactor', 'muon', an UpdateRule, or three exponents"
    )


def _is_absolute(adafactor: object) -> bool:
    """Whether rates of an Adafactor (Hugging Face's can be such) are not relative to weights.

    Raises:
        ValueError: those of some groups are.
    """
    groups = getattr(adafactor, "param_groups", ())
    relative = {bool(group.get("scale_parameter", True)) for group in groups}
    if len(relative) > 1:
        raise ValueError(
            "Adafactor: got groups with scale_parameter=True and others with False, expected "
            "one of them: updates of both grow with width each in its own way"
        )
    return relative == {False}


# Of these, weight decay is part of the gradient, unless a group says otherwise.
_COUPLED = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop)


def couples_decay(optimizer: AnyRule, group: Mapping[str, Any] | None = None) -> bool:
    """Whether weight decay is part of the gradient that is normalised: no longer rate × decay.

    Args:
        optimizer: an optimizer or its class; of others nothing is known, and the answer is no.
        group: of its parameters; None: the first.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    groups = getattr(optimizer, "param_groups", None) or [{}]
    chosen = groups[0] if group is None else group
    decoupled = chosen.get("decoupled_weight_decay", kind is optim.AdamW)
    return issubclass(kind, _COUPLED) and not decoupled
