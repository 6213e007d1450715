"""What a measured step does to the scores of attentions: replays on a few samples of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

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
from adiv_monitor.capture.updates import ParameterSteps
from adiv_monitor.features.rows import Index, exact, to_device
from adiv_monitor.features.scores import Attention, Move, of_heads, scale_sums, sums
from adiv_monitor.rerun.derivatives import Parameters
from adiv_monitor.step.attention_outcome import Attended

# Diagonals of scores, of all heads together, whose scale is looked at: each takes two backward
# passes through what lies between projections and scores.
_MOST_DIAGONALS = 32


@dataclass
class _Replayed:
    """One call of an attention, made again.

    Attributes:
        attends: what was run.
        call: the call, on the samples that are looked at.
        score_gradient: G of some of its queries.
        keys: the scores whose scale is looked at, of all samples that were gathered.
        of_each: samples of the queries, for one of the module.
        values: for the host, by name; if of samples, of those of the module.
    """

    attends: AttentionModule
    call: Attention
    score_gradient: Callable[[slice], Tensor]
    keys: Index
    of_each: int
    values: dict[str, Tensor] = field(default_factory=dict)
    active: Tensor | None = None

    def add(self, moves: Mapping[str, Move]) -> None:
        """How the scores move."""
        keys = self._looked_at(to_device(self.keys, self.call.query.device))
        found = sums(self.call, self.score_gradient, moves, keys)
        self.active = found.pop("active")
        self._add(found)

    def add_scales(self, pivot: Tensor | None) -> Tensor:
        """The attention scale of some of the scores; gives what they are relative to."""
        assert self.active is not None
        calls, leaves = scores_with_graph(self.attends)
        with torch.enable_grad():
            scale, error = scales(calls[-1], leaves, self.keys)
        found = scale_sums(self._looked_at(scale), self.active, pivot)
        share = self.keys.shape[3] / max(self.call.lengths)
        self._add({**found, "scale_error": error, "scale_share": torch.full_like(error, share)})
        return found["scale_pivot"]

    def _looked_at(self, tensor: Tensor) -> Tensor:
        samples = self.attends.samples
        return tensor if samples is None else tensor.index_select(0, samples)

    def _add(self, found: Mapping[str, Tensor]) -> None:
        for name, tensor in found.items():
            if tensor.dim() == 2:
                tensor = tensor.view(-1, self.of_each, tensor.shape[1]).sum(1)
            self.values[name] = tensor


@dataclass
class _Measured:
    """What is known of one attention so far."""

    held: Mapping[str, nn.Parameter]
    before: Parameters  # θ before the step
    replayed: list[_Replayed]
    attended: Attended


class AttentionStep:
    """Follows the attentions of one step through gradient and update, all on the device.

    Args:
        calls: the samples.
        generator: the monitor's own source of chance.
    """

    def __init__(self, calls: AttentionCalls, generator: np.random.Generator) -> None:
        self._calls = calls
        self._generator = generator
        self._measured: dict[str, _Measured] = {}
        self._attended: dict[str, Attended] = {}

    def gradient_is_final(self, steps: ParameterSteps, *, updates: bool) -> None:
        """The gradients are what the optimizer will use: e, the scales, and θ before the step."""
        self.discard()
        for path, attending in list(self._calls.attending.items()):
            with self._calls.guarded(path), without_autocast(next(iter(attending.held.values()))):
                self._measured[path] = self._begin(attending, steps)
                if not updates:
                    self._finish(path)

    def updated(self) -> None:
        """The optimizer has stepped: d."""
        for path, measured in list(self._measured.items()):
            held, before = measured.held, measured.before
            with self._calls.guarded(path), without_autocast(next(iter(held.values()))):
                taken = {n: exact(before[n]) - exact(p.detach()) for n, p in held.items()}
                for replayed in measured.replayed:
                    attends = replace(replayed.attends, parameters=before)
                    replayed.add(moves_of_scores(attends, {"d": taken})[-1][1])
                self._finish(path)
        self._measured.clear()

    def discard(self) -> None:
        """The step turned out not to be measurable, or is tried again."""
        self._measured.clear()
        self._attended.clear()

    def attended(self) -> dict[str, Attended]:
        """What is known of each attention, by path."""
        return {p: found for p, found in self._attended.items() if p not in self._calls.refused}

    def _begin(self, attending: Attending, steps: ParameterSteps) -> _Measured:
        calls = attending.finish()
        if not calls:
            raise ValueError("no gradient reached it in this step")
        held = attending.held
        now = {name: parameter.detach() for name, parameter in held.items()}
        gamma = {name: p.grad for name, p in held.items() if p.grad is not None}
        replayed = [self._replay(attending, c, now, gamma) for c in calls if c.looked_at]
        attended = Attended(
            samples=sum(call.rows.total for call in calls),
            precision=max(max(call.seen.precision, call.precision) for call in calls),
        )
        try:
            pivot = None
            for each in replayed:
                pivot = each.add_scales(pivot)
        except (RuntimeError, ValueError) as error:
            attended.no_scale = str(error)
        copies = {name: steps.before(parameter) for name, parameter in held.items()}
        before = {name: now[name].clone() if c is None else c for name, c in copies.items()}
        return _Measured(held, before, replayed, attended)

    def _finish(self, path: str) -> None:
        """Keep no more than the numbers for the host."""
        measured = self._measured.pop(path)
        parts = [replayed.values for replayed in measured.replayed]
        shared = set.intersection(*map(set, parts))
        measured.attended.values = {
            name: _joined(name, [p[name] for p in parts]) for name in shared
        }
        self._attended[path] = measured.attended

    def _replay(
        self, attending: Attending, made: AttentionCall, now: Parameters, gamma: Parameters
    ) -> _Replayed:
        """What the call was, and how a plain gradient step moves its scores."""
        seen = made.seen
        gathered, of_each = seen.query.shape[:2]
        samples = None
        if made.picked is not None:
            within = torch.arange(of_each, device=made.picked.device)
            samples = (made.picked[:, None] * of_each + within).flatten()
        twin = twin_of(attending.module, seen.args, seen.kwargs, now, seen.written)
        attends = AttentionModule(twin, now, attending.number, samples)
        call, moves = moves_of_scores(attends, {"e": gamma})[-1]
        call = replace(call, kept=_looked_at(made, seen.kept))
        heads, lengths = call.query.shape[1], call.lengths
        draws = max(1, _MOST_DIAGONALS // heads)
        keys = some_keys(gathered * of_each, heads, *lengths, draws, self._generator)
        replayed = _Replayed(attends, call, _score_gradient(made, call), keys, of_each)
        replayed.add(moves)
        replayed.values |= _errors(made, call)
        return replayed


def _looked_at(made: AttentionCall, tensor: Tensor | None) -> Tensor | None:
    """What was kept of a call, of those samples that are looked at, as samples of the queries."""
    if tensor is not None and made.picked is not None:
        tensor = tensor.index_select(0, made.picked)
    return None if tensor is None else tensor.flatten(0, 1)


def _score_gradient(made: AttentionCall, call: Attention) -> Callable[[slice], Tensor]:
    """G of the call from the gradient that came: of its output, or of scale·Y + mask."""
    assert made.gradient is not None
    gradient = made.gradient.flatten(0, 1)
    if made.seen.output is not None:
        return call.score_gradient(gradient)
    whole = call.scale * gradient.reshape(*call.query.shape[:3], -1)
    return lambda queries: whole[:, :, queries]


def _errors(made: AttentionCall, call: Attention) -> dict[str, Tensor]:
    """How far the module, run once more, was from what it did in the forward pass."""
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
    return {"key_error": found[0], "query_error": found[1], "output_error": found[-1]}


def _relative(again: Tensor, then: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm
    off: Tensor = norm(again - then) / (norm(then) + torch.finfo(then.dtype).tiny)
    return off


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    """One number of all calls: of samples side by side, else the worst, or what they share."""
    if parts[0].dim():
        return torch.cat(parts)
    if name == "scale_pivot":
        return parts[0]
    stacked = torch.stack(parts)
    return stacked.amin() if name == "scale_share" else stacked.amax()
