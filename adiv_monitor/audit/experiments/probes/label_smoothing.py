"""How much of a target's weight does label smoothing take from the right class?"""

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.questions import of_each_call
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact

_SAME = 1e-5  # rounding of a target's smallest probabilities


@of_each_call("label-smoothing")
def smoothed(call: Call, fork: Fork) -> Fact | None:
    """Return label smoothing, and the number of classes, of a loss that uses any."""
    share, classes = smoothing_of(call)
    return Fact(call.place, {"share": share, "classes": float(classes)}) if share > 0 else None


def smoothing_of(call: Call) -> tuple[float, int]:
    """Return ε of targets (1 − ε) · one-hot + ε / classes, and the number of classes.

    ε is an argument, or follows from targets that are probabilities: all but the largest are ε /
    classes. 0: there is no smoothing, or the targets are of another kind.
    """
    outputs, target = call.argument(0, "input"), call.argument(1, "target")
    if call.name not in ("cross_entropy", "kl_div") or not isinstance(target, Tensor):
        return 0.0, 0
    classes = outputs.shape[1 if outputs.ndim > 1 else 0]
    if call.name == "cross_entropy" and not target.is_floating_point():
        return float(call.argument(7, "label_smoothing", 0.0)), classes
    if target.shape != outputs.shape or target.ndim < 2 or classes < 3 or not target.numel():
        return 0.0, 0
    shares = target.float().exp() if call.argument(5, "log_target", False) is True else target
    sorted_ = shares.detach().float().movedim(1, -1).flatten(0, -2).sort(-1).values
    others = sorted_[:, :-1]
    is_spread = bool((others[:, -1] - others[:, 0]).max() < _SAME)
    is_whole = bool((sorted_.sum(-1) - 1).abs().max() < classes * _SAME)
    return (float(others.mean()) * classes if is_spread and is_whole else 0.0), classes
