"""Fixes that let the optimizer hold parameters, unfreeze them, or draw weights anew."""

from collections.abc import Sequence

from torch import Tensor, nn

from adiv_monitor.audit.experiments.beginning import bare_weights
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.audit.trials.fixes.places import AFFINE, affine_at, modules_at, parameters_at
from adiv_monitor.diagnosis.record import Record


def _hold(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Add missing trainable parameters to the optimizer, with the settings of its first group."""
    trainable = [p for p in fork.model.parameters() if p.requires_grad]
    if not hold(fork, trainable):
        raise DoesNotApply("the optimizer holds all trainable parameters")


def _unfreeze(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    frozen = [
        p
        for p in parameters_at(fork.model, layers)
        if not p.requires_grad and p.is_floating_point()
    ]
    if not frozen:
        raise DoesNotApply("nothing is frozen here")
    for parameter in frozen:
        parameter.requires_grad_(True)
    hold(fork, frozen)


def hold(fork: Fork, parameters: Sequence[Tensor]) -> bool:
    """Let the optimizer hold the parameters; return whether it lacked any."""
    groups = fork.optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"]}
    missing = [p for p in parameters if id(p) not in held]
    if missing:
        if hasattr(fork.optimizer, "_params"):  # LBFGS
            raise DoesNotApply(f"{type(fork.optimizer).__name__} takes no further parameters")
        fork.optimizer.add_param_group({**groups[0], "params": missing})
    return bool(missing)


def _reinitialise(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Draw weights from N(0, gain²/fan-in), biases as 0; reset other modules as torch does.

    Weights are those of affine layers, and parameters that no such layer holds, if they are named.

    The initialisation is that of He et al. 2015 and Glorot and Bengio 2010. The gain is √2, but 1
    if the model has saturating activations, and for the layer that runs last; if that is unknown,
    for the one that is registered last.
    """
    saturating = any(isinstance(m, (nn.Tanh, nn.Sigmoid)) for m in fork.model.modules())
    bare = {name: rows for name, rows in bare_weights(fork).items() if name in layers}
    for rows in bare.values():
        nn.init.normal_(rows, std=(1 if saturating else 2) ** 0.5 * rows.shape[-1] ** -0.5)
    layers = [path for path in layers if path not in bare]
    if bare and not layers:
        return
    named = list(modules_at(fork.model, layers).values()) if layers else []
    others = [m for m in named if hasattr(m, "reset_parameters") and not isinstance(m, AFFINE)]
    for module in others:
        module.reset_parameters()  # type: ignore[operator]
    if others and len(others) == len(named):
        return
    last = _last(fork.model, record)
    for module in affine_at(fork.model, layers):
        assert isinstance(module, AFFINE)
        linear = saturating or module is last
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if linear else "relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _last(model: nn.Module, record: Record | None) -> nn.Module | None:
    affine = {path: m for path, m in model.named_modules() if isinstance(m, AFFINE)}
    ran = [] if record is None or not record.reports else list(record.reports[0].layers)
    order = [path for path in ran if path in affine] or list(affine)
    return affine[order[-1]] if order else None


FIXES = [
    Fix("hold-parameters", "give the optimizer all trainable parameters", _hold),
    Fix("unfreeze", "train what is frozen", _unfreeze),
    Fix("reinitialise", "draw the weights anew, by their fan-in", _reinitialise),
]
