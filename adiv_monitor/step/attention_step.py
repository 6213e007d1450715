"""The effect of a measured step on the scores of attentions, by reruns on a few samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.attention.attention_calls import Attending, AttentionCall, AttentionCalls
from adiv_monitor.capture.attention.score_moves import (
    AttentionModule,
    moves_of_scores,
    scores_with_graph,
    twin_of,
)
from adiv_monitor.capture.attention.score_scales import scales, some_keys
from adiv_monitor.features.rows import Index, to_compute_dtype, to_device
from adiv_monitor.features.scores import Attention, Move, of_heads
from adiv_monitor.maths.attention_sums import (
    AttentionSums,
    RerunErrors,
    ScaleSums,
    map_samples,
    move_sums,
    scale_sums,
)
from adiv_monitor.maths.records import replaced
from adiv_monitor.rerun.derivatives import Parameters
from adiv_monitor.step.parameter_steps import ParameterSteps

# Largest number of diagonals of scores, of all heads together, whose scale is computed: each takes
# two backward passes through the functions between projections and scores.
_MOST_DIAGONALS = 32


@dataclass
class _Replayed:
    """One rerun call of an attention.

    Attributes:
        attends: the module that was rerun.
        call: the call, on the chosen samples.
        score_gradient: returns G of a slice of its queries.
        keys: for each query of these samples, the keys whose scores' scale is computed.
        of_each: number of samples of the queries per sample of the module.
        sums: the sums so far, of every sample of the queries.
    """

    attends: AttentionModule
    call: Attention
    score_gradient: Callable[[slice], Tensor]
    keys: Tensor
    of_each: int
    sums: AttentionSums[Tensor]

    def stepped(self, d: Move) -> None:
        """Add the sums of the optimizer's step."""
        _, sums, _ = move_sums(self.call, self.score_gradient, d, self.keys)
        self.sums = replaced(self.sums, d=sums)


@dataclass(frozen=True)
class _Measured:
    """The state of one attention between gradient and update.

    Attributes:
        held: its parameters, by their names in its module.
        before: their values before the step.
        replayed: its rerun calls, which have chosen samples.
        samples: number of samples that received a gradient in other calls.
    """

    held: Mapping[str, nn.Parameter]
    before: Parameters
    replayed: Sequence[_Replayed]
    samples: int


class AttentionStep:
    """Measurement of the attentions of one step, through gradient and update, on the device.

    Args:
        calls: the calls with their samples.
        generator: the monitor's own random generator.
    """

    def __init__(self, calls: AttentionCalls, generator: np.random.Generator) -> None:
        self._calls = calls
        self._generator = generator
        self._measured: dict[str, _Measured] = {}
        self._sums: dict[str, tuple[AttentionSums[Tensor], ...]] = {}

    def gradient_is_final(self, steps: ParameterSteps, *, updates: bool) -> None:
        """Compute e and the scales, and keep θ before the step, once the gradients are final."""
        self.discard()
        for path, attending in list(self._calls.attending.items()):
            with self._calls.guarded(path), without_autocast(next(iter(attending.held.values()))):
                self._measured[path] = self._begin(attending, steps)
                if not updates:
                    self._finish(path)

    def updated(self) -> None:
        """Compute d, after the optimizer's step."""
        for path, measured in list(self._measured.items()):
            held, before = measured.held, measured.before
            with self._calls.guarded(path), without_autocast(next(iter(held.values()))):
                taken = {
                    n: to_compute_dtype(before[n]) - to_compute_dtype(p.detach())
                    for n, p in held.items()
                }
                for replayed in measured.replayed:
                    attends = replace(replayed.attends, parameters=before)
                    replayed.stepped(moves_of_scores(attends, taken)[-1][1])
                self._finish(path)
        self._measured.clear()

    def discard(self) -> None:
        """Drop all results: the step can't be measured, or is tried again."""
        self._measured.clear()
        self._sums.clear()

    def sums(self) -> dict[str, tuple[AttentionSums[Tensor], ...]]:
        """Return the records of the calls of each attention, by path."""
        return {path: sums for path, sums in self._sums.items() if path not in self._calls.refused}

    def _begin(self, attending: Attending, steps: ParameterSteps) -> _Measured:
        calls = attending.finish()
        if not calls:
            raise ValueError("no gradient reached it in this step")
        held = attending.held
        now = {name: parameter.detach() for name, parameter in held.items()}
        gamma = {name: p.grad for name, p in held.items() if p.grad is not None}
        replayed = [self._replay(attending, c, now, gamma) for c in calls if c.rows.count]
        copies = {name: steps.before(parameter) for name, parameter in held.items()}
        before = {name: now[name].clone() if c is None else c for name, c in copies.items()}
        others = sum(call.rows.total for call in calls if not call.rows.count)
        return _Measured(held, before, replayed, others)

    def _finish(self, path: str) -> None:
        """Keep only the numbers for the host."""
        measured = self._measured.pop(path)
        first, *others = [_of_module(each.sums, each.of_each) for each in measured.replayed]
        first = replaced(first, samples=first.samples + measured.samples)
        self._sums[path] = first, *others

    def _replay(
        self, attending: Attending, made: AttentionCall, now: Parameters, gamma: Parameters
    ) -> _Replayed:
        """Rerun a call; compute its scores' move by a plain gradient step, and their scale."""
        seen = made.seen
        gathered, of_each = seen.query.shape[:2]
        samples = None
        if made.picked is not None:
            within = torch.arange(of_each, device=made.picked.device)
            samples = (made.picked[:, None] * of_each + within).flatten()
        twin = twin_of(attending.module, seen.args, seen.kwargs, now, seen.written)
        attends = AttentionModule(twin, now, attending.number, samples)
        call, plain_step = moves_of_scores(attends, gamma)[-1]
        call = replace(call, kept=_looked_at(made, seen.kept))
        heads, lengths = call.query.shape[1], call.lengths
        draws = max(1, _MOST_DIAGONALS // heads)
        every = some_keys(gathered * of_each, heads, *lengths, draws, self._generator)
        keys = _taken(to_device(every, call.query.device), samples)
        score_gradient = _score_gradient(made, call)
        G_G, e, active = move_sums(call, score_gradient, plain_step, keys)
        scale, no_scale = _scale(attends, every, active)
        sums = AttentionSums(
            samples=made.rows.total,
            G_G=G_G,
            e=e,
            errors=_errors(made, call),
            scale=scale,
            no_scale=no_scale,
        )
        return _Replayed(attends, call, score_gradient, keys, of_each, sums)


def _scale(
    attends: AttentionModule, keys: Index, active: Tensor
) -> tuple[ScaleSums[Tensor] | None, str]:
    """Return the attention scale of the scores with some keys, or why it is not known.

    Args:
        attends: the module to rerun.
        keys: the keys, for every gathered sample.
        active: which of these scores are active, for the chosen samples.
    """
    try:
        calls, leaves = scores_with_graph(attends)
        if not (calls[-1].query.requires_grad or calls[-1].key.requires_grad):
            return None, "no trained parameter makes its queries or keys"
        with torch.enable_grad():
            scale, off = scales(calls[-1], leaves, keys)
    except (RuntimeError, ValueError) as error:
        return None, str(error)
    share = keys.shape[3] / max(calls[-1].query.shape[2], calls[-1].key.shape[2])
    return scale_sums(_taken(scale, attends.samples), active, off, share), ""


def _taken(tensor: Tensor, samples: Tensor | None) -> Tensor:
    return tensor if samples is None else tensor.index_select(0, samples)


def _of_module(sums: AttentionSums[Tensor], of_each: int) -> AttentionSums[Tensor]:
    """Return the record by samples of the module, each with `of_each` samples of the queries."""
    return map_samples(sums, lambda x: x.view(-1, of_each, x.shape[1]).sum(1))


def _looked_at(made: AttentionCall, tensor: Tensor | None) -> Tensor | None:
    """Return a saved tensor of a call for the chosen samples, as samples of the queries."""
    if tensor is not None and made.picked is not None:
        tensor = tensor.index_select(0, made.picked)
    return None if tensor is None else tensor.flatten(0, 1)


def _score_gradient(made: AttentionCall, call: Attention) -> Callable[[slice], Tensor]:
    """Return a function that computes G from the gradient of the output, or of scale·Y + mask."""
    assert made.gradient is not None
    gradient = made.gradient.flatten(0, 1)
    if made.seen.output is not None:
        return call.score_gradient(gradient)
    whole = call.scale * gradient.reshape(*call.query.shape[:3], -1)
    return lambda queries: whole[:, :, queries]


def _errors(made: AttentionCall, call: Attention) -> RerunErrors[Tensor]:
    """Return the relative differences between the module's rerun and its forward pass."""
    query, key = _looked_at(made, made.seen.query), _looked_at(made, made.seen.key)
    assert query is not None
    assert key is not None
    key = of_heads(key, query.shape[1])
    if query.numel() != call.query.numel() or key.numel() != call.key.numel():
        raise ValueError(
            f"got queries and keys of shapes {tuple(call.query.shape)} and {tuple(call.key.shape)} "
            f"when it was run once more, but {tuple(query.shape)} and {tuple(key.shape)} in the "
            "forward pass (of which a cache may have been a part)"
        )
    pairs = [(key, call.key)]
    output = _looked_at(made, made.seen.output)
    # Scores that are made explicitly are scaled before the product.
    pairs.append((query, call.query if output is not None else call.scale * call.query))
    if output is not None:
        pairs.append((output, call.output()))
    found = [_relative(again.reshape(then.shape), then) for then, again in pairs]
    precision = max(made.seen.precision, made.precision)
    return RerunErrors(found[1], found[0], found[-1], precision)


def _relative(again: Tensor, then: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm
    off: Tensor = norm(again - then) / (norm(then) + torch.finfo(then.dtype).tiny)
    return off
