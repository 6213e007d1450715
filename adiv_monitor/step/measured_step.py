"""One measured step: from the rows and the parameter step to what the host needs.

Everything stays on the device until `outcome`, which makes one transfer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.processes import processes
from adiv_monitor.capture.selection import Layer, Selection, listed
from adiv_monitor.capture.updates import ParameterSteps, Watch, weight_norms
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.capture.weights.shards import holders, is_shard
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.jacobian import JacobianFeatures
from adiv_monitor.features.rows import exact, joined
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths import totals
from adiv_monitor.maths.ceiling import Ceiling
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.step.attention_step import AttentionStep
from adiv_monitor.step.collectives import Agree
from adiv_monitor.step.measured_layer import MeasuredLayer
from adiv_monitor.step.part import CEILING_SUMS, Looked, Part, learn, make_part
from adiv_monitor.step.plain_step import (
    Change,
    act,
    added,
    changes,
    gram_is_less,
    probe,
    stretch,
)
from adiv_monitor.step.realised import Realised
from adiv_monitor.step.row_vectors import RowVectors
from adiv_monitor.step.transfer import fetch
from adiv_monitor.step.whole_rows import NOT_ALIKE, dealt
from adiv_monitor.step.wholes import WHY_NOT, Wholes, spread


def _is_alone(point: str, *, comes: bool = True) -> bool:
    return processes() == 1


# There is no mean feature, and no telling which of the parameters are a bias.
_WITHOUT_FEATURES = ("common_share", "bias_share")
# Numbers of a layer that a process sends for the ceiling: 8 MiB, eigenvectors in half a second.
_MOST_SUMS = 2**20


class MeasuredStep:
    """Follows one step through gradient, update and what is applied in the end.

    Args:
        capture: the rows; its hooks stay on until the step is taken, which may raise before.
        selection: what is measured.
        watch: what this run was seen to do so far.
        fail: called with a layer's path and the exception met while measuring it.
        generator: the monitor's own source of chance.
        realised: finds out what the step really did, if asked for.
        agree: asks the other processes whether all come to a point of the step.
    """

    def __init__(
        self,
        capture: Capture,
        selection: Selection,
        watch: Watch,
        fail: Callable[[str, Exception], None],
        generator: np.random.Generator,
        realised: Realised | None = None,
        agree: Agree = _is_alone,
    ) -> None:
        self._capture = capture
        self._attention = (
            None if capture.attention is None else AttentionStep(capture.attention, generator)
        )
        self._realised = realised
        self._unreached: dict[str, str] = {}
        self._too_large: list[str] = []  # layers whose sums for the ceiling can't travel
        self._in_parts: list[str] = []  # layers of whose rows no process has all
        self._refused: set[str] = set()  # of those, layers that had rows
        self.skipped: Tensor | None = None  # > 0: a fused optimizer found inf and did nothing
        self._moved: Tensor | None = None  # did the weights move before the gradient was there?
        self._selection = selection
        self._wholes = Wholes(selection, agree)
        self._watch = watch
        self._fail = fail
        self._generator = generator
        self._measured: dict[str, MeasuredLayer] = {}
        self._all_rows: dict[str, AllRows] = {}
        self._weight_sums: dict[str, Tensor] = {}
        self._steps: ParameterSteps | None = None
        self._shared: set[str] = set()
        self._flags: dict[str, Tensor] = {}  # of the step as a whole
        self._notes: list[str] = []

    @torch.no_grad()
    def gradient_is_final(self, gradient_scale: Tensor | float, *, steps: bool) -> None:
        """The gradients are what the optimizer will use: e, and a copy of the parameters.

        Args:
            gradient_scale: what a fused optimizer will divide them by during its step (AMP).
            steps: whether an optimizer step follows.
        """
        self._measured.clear()  # what an earlier attempt at this step, which raised, has left
        self._unreached.clear()
        self._too_large.clear()
        self._in_parts.clear()
        self._all_rows.clear()
        self._flags.clear()
        # An optimizer that unscales AMP gradients itself writes them back.
        scale = gradient_scale if isinstance(gradient_scale, Tensor) else None
        if scale is not None:
            self._flags["gradient_scale"] = scale
        if self._realised is not None and steps:
            self._realised.step_begins()
        reached = self._reached()
        self._shared = self._capture.shared()
        try:
            # Not those of the layers that were reached, of which each process has its own.
            come = self._wholes.gradients({id(p) for p in self._selection.due_parameters})
            self._put_together(reached)
            pieces = [piece for layer in reached for piece in layer.pieces]
            self._steps = ParameterSteps(
                *(pieces, self._watch),
                updates=steps,
                copy_gradient=scale is not None,
                new=not self._watch.knows({layer.path for layer in reached}),
                gradients=self._wholes.parts,
            )
            if steps:
                self._wholes.keep(self._steps)
            factors = self._factors(list(reached), scale)

            def begin(layer: Layer, parts: Parts) -> None:
                self._begin(layer, reached[layer], factors.get(layer.path), scale, parts)

            self._measure(reached, begin, self._wholes.of_gradients if come else None)
        finally:
            self._wholes.settle()
        for path, found in totals.sums(self._all_rows, self._generator, self._lose).items():
            self._measured[path].values |= found
        self._all_rows.clear()
        if self._weight_sums:
            sums = list(self._weight_sums.values())
            if processes() == 1:  # of several, the sums add up before their norm is taken
                sums = list(torch._foreach_norm(sums))
            for path, found_sum in zip(self._weight_sums, sums, strict=True):
                self._measured[path].values["weight_sum"] = found_sum
        self._weight_sums.clear()
        if self._attention is not None:
            self._attention.gradient_is_final(self._steps, updates=steps)
        if not steps:
            for measured in list(self._measured.values()):
                self._try(measured.layer, self._finish_rows, measured)

    def _reached(self) -> dict[Layer, list[Call]]:
        """The layers that a gradient reached, with the calls that it came through."""
        reached: dict[Layer, list[Call]] = {}
        for layer in self._capture.in_order():
            rows = self._capture.rows.get(layer.path)
            if rows is None:
                continue
            calls = rows.finish()
            if calls:
                reached[layer] = calls
            else:
                self._unreached[layer.path] = _why_unreached(layer, called=bool(rows.calls))
        return reached

    def _put_together(self, reached: dict[Layer, list[Call]]) -> None:
        """The rows that processes know together; layers of which that can't be are lost."""
        for layer in self._wholes.rows(reached):
            why = NOT_ALIKE if self._wholes.come or not spread(layer) else WHY_NOT
            self._lose(layer.path, Refused(why))
            self._capture.rows[layer.path].calls.clear()
            del reached[layer]

    def _factors(self, layers: list[Layer], scale: Tensor | None) -> dict[str, Tensor]:
        """‖gradient now‖ / ‖gradient that backward left‖ of the layers where it is known."""
        assert self._steps is not None
        if processes() > 1:  # only all of them together know
            return {}
        left = {x: self._capture.accumulation_of(x).left() for x in layers}
        known = {layer: parts for layer, parts in left.items() if parts is not None}
        if not known:
            return {}
        parts = [self._now(layer.parameters[0]) for layer in known]
        norms = torch._foreach_norm([exact(part) for part in (*parts, *known.values())])
        # 0/0 is 1: then nothing of the gradient is left to be in any units.
        ends = torch._foreach_add(norms, torch.finfo(torch.float32).tiny)
        factors = torch._foreach_div(ends[: len(known)], ends[len(known) :])
        if scale is not None:
            factors = torch._foreach_div(factors, scale)
        return {layer.path: factor for layer, factor in zip(known, factors, strict=True)}

    def _now(self, parameter: nn.Parameter) -> Tensor:
        """As long as the parameter's gradient; of a sharded one, as some of its entries."""
        assert self._steps is not None
        if is_shard(parameter):  # of one process
            return self._steps.entries_of(parameter)
        return self._steps.gamma_norm_of(parameter)

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has stepped: u and d."""
        if self._attention is not None:  # first, while all copies of parameters are there
            self._attention.updated()
        if self._steps is None or not (self._measured or self._wholes.come):
            return
        self._steps.stepped()
        # The largest difference last, when the other layers' rows are gone: that is the peak.
        found = {x.layer: x for x in sorted(self._measured.values(), key=attrgetter("size"))}
        made = partial(self._wholes.of_updates, steps=self._steps)

        def measure(layer: Layer, parts: Parts) -> None:
            self._measure_update(found[layer], parts)

        try:
            self._measure(found, measure, made if self._wholes.updates() else None)
        finally:
            self._wholes.settle()
        self._flags["gradient_changed"] = self._steps.finish_update()

    @torch.no_grad()
    def applied(self) -> None:
        """The next forward pass begins, or there is none: a."""
        if self._steps is not None and (
            "w_w" in self._steps.products or "w_w" in self._steps.norms
        ):
            self._steps.applied()

    def realise(self) -> None:
        """The weights are those of the next step: what has this one really done?"""
        realised, self._realised = self._realised, None
        if realised is None or not self._measured:
            return
        realised.run(self._capture)
        for path, measured in self._measured.items():
            if path in realised.products:
                measured.values["realised"] = realised.products[path]
        if realised.loss_change is not None:
            whole, samples = realised.loss_change
            self._flags["loss_change"] = whole
            if samples is not None:
                self._flags["loss_changes"] = samples
        self._notes += realised.notes

    def weights(self) -> list[Tensor]:
        """Norms of all weights, to be compared by `weights_moved`."""
        return weight_norms(self._selection.parameters)

    def weights_moved(self, before: list[Tensor]) -> None:
        """The closure has run: an optimizer that moved the weights first has no one gradient."""
        if before:
            moved = [x != y for x, y in zip(self.weights(), before, strict=True)]
            self._moved = torch.stack([flag.to(moved[0].device) for flag in moved]).any()

    def discard(self) -> None:
        """The step turned out not to be measurable."""
        self._measured.clear()
        if self._attention is not None:
            self._attention.discard()

    @torch.no_grad()
    def part(self) -> Part:
        """Bring everything to the host at once: what this process knows of the step."""
        for name, flag in (("skipped", self.skipped), ("moved", self._moved)):
            if flag is not None:
                self._flags[name] = flag
        attended = {} if self._attention is None else self._attention.attended()
        values, flags, products, of_attention = fetch(
            {path: m.values for path, m in self._measured.items()},
            self._flags,
            {} if self._steps is None else self._steps.products,
            {} if self._steps is None else self._steps.norms,
            {path: found.values for path, found in attended.items()},
        )
        part = make_part(
            {path: m.looked for path, m in self._measured.items()},
            values,
            flags,
            products,
            unreached=self._unreached,
            notes=[*self._capture_notes(), *self._notes],
            keeps_gradient=self._steps is not None and self._steps.has_copies,
        )
        part.rows_lost |= self._refused
        learn(self._watch, part)
        calls = self._capture.attention
        if calls is not None and not part.refused:
            part.attended = {path: replace(seen, values={}) for path, seen in attended.items()}
            part.attention, part.no_attention = of_attention, dict(calls.refused)
        return part

    def _capture_notes(self) -> list[str]:
        notes = self._capture.notes()
        if self._capture.attention is not None and self._capture.attention.saw_none():
            notes.append(
                "No attention was seen: only scaled_dot_product_attention and "
                "nn.MultiheadAttention are known."
            )
        if self._capture.dropped():
            notes.append(
                "Gradients were zeroed before a step was taken (a step that an AMP scaler "
                "skipped?): their rows are not in this report."
            )
        if self._too_large:
            notes.append(
                f"attainable_cosine of {listed(self._too_large)} is missing: with several "
                "processes it takes sums that are too large to be exchanged."
            )
        if self._in_parts:
            notes.append(
                f"attainable_cosine of {listed(self._in_parts)} is missing: it takes all rows, of "
                "which processes have parts (tensor parallelism)."
            )
        return notes

    def _measure(
        self,
        layers: Iterable[Layer],
        measure: Callable[[Layer, Parts], None],
        made: Callable[[Sequence[Layer]], Iterable[tuple[Layer, Parts]]] | None,
    ) -> None:
        """Measure layers, those last whose parameters must be made whole.

        Args:
            layers: the layers.
            measure: is given the pieces that were made whole.
            made: makes them so, with all other processes; None: they can't be.
        """
        apart = [layer for layer in layers if spread(layer)]
        for layer in layers:
            if layer not in apart:
                self._try(layer, measure, layer, {})
        errors: list[Exception] = []
        for layer, parts in made(tuple(apart)) if made else ():
            apart.remove(layer)
            try:
                self._try(layer, measure, layer, parts)
            except Exception as error:  # raised now, it would keep the other processes waiting
                errors.append(error)
        for layer in apart:
            self._all_rows.pop(layer.path, None)
            self._lose(layer.path, Refused(WHY_NOT))
        if errors:
            raise errors[0]

    def _try(self, layer: Layer, function: Callable[..., None], *args: object) -> None:
        try:
            with without_autocast(layer.parameters[0]):
                function(*args)
        except Exception as error:
            self._all_rows.pop(layer.path, None)
            self._lose(layer.path, error)

    def _lose(self, path: str, error: Exception) -> None:
        """A layer is not measured in this step."""
        self._measured.pop(path, None)
        self._weight_sums.pop(path, None)
        if isinstance(error, Refused):
            self._unreached[path] = str(error)
            self._refused.add(path)
        else:
            self._fail(path, error)

    def _begin(
        self,
        layer: Layer,
        calls: list[Call],
        factor: Tensor | None,
        gradient_scale: Tensor | None,
        parts: Parts,
    ) -> None:
        assert self._steps is not None
        rows, peers = self._capture.rows[layer.path], self._selection.peers
        features = calls[0].features.joined([call.features for call in calls[1:]])
        G = joined([call.gradient for call in calls if call.gradient is not None])
        if isinstance(features, OneHotFeatures):  # nothing trains the padding token: idle
            G = G * features.trained[:, None]
        values: dict[str, Tensor] = {}
        if factor is not None:
            values["gradient_factor"] = factor
        looked = Looked(
            path=layer.path,
            kind=layer.kind,
            pieces=[piece.key for piece in layer.pieces],
            bias_alone=layer.weight is None,
            rows_seen=len(G),
            rows_total=sum(call.total for call in calls),
            groups=features.groups,
            precision=max(call.precision for call in calls),
            from_rows=_why_from_rows(features, shared=layer.path in self._shared),
            undefined=_WITHOUT_FEATURES if isinstance(features, JacobianFeatures) else (),
            features=_fan_in(features),
            shares={p.key: 1 / holders(p.parameter) for p in layer.pieces} if parts else {},
            dealt=dealt(calls, peers, come=self._wholes.come),
        )
        accumulated, lead = self._capture.accumulation_of(layer), layer.parameters[0]
        # What it left of the gradient: of processes that compute the same, the first one's counts.
        counts = looked.dealt is None or looked.dealt.place == 0 or accumulated.is_term
        if accumulated.entries is not None and counts:
            values["then"] = accumulated.entries
            entries = self._wholes.entries.get(id(lead))
            values["now"] = self._steps.entries_of(lead) if entries is None else entries
        if accumulated.foreign is not None:
            values["foreign"] = accumulated.foreign
        if rows.linear is not None:
            values["rule_error"] = rows.linear
        replay_errors = [call.replay_error for call in calls if call.replay_error is not None]
        if replay_errors:
            values["replay_error"] = torch.stack(replay_errors).amax()
        if not (rows.ceiling_is_whole or looked.dealt is None):
            self._in_parts.append(layer.path)
        if rows.ceiling is not None and rows.ceiling_is_whole:
            alike = 1 if looked.dealt is None else looked.dealt.count
            values |= self._of_ceiling(layer.path, rows.ceiling, alike)
        self._add_all_rows(layer.path, calls, values)
        makings = [
            (made, sum(len(call.z) for call in alike))
            for made, alike in groupby(calls, key=lambda call: call.layer)
        ]
        gamma = {**{piece.key: self._steps.gamma(piece) for piece in layer.pieces}, **parts}
        if gradient_scale is not None:
            gamma = {key: g / gradient_scale for key, g in gamma.items()}
        # With several processes γ holds other rows, too.
        trusted = processes() == 1 and not looked.from_rows
        trusted = trusted and layer.path not in self._watch.distrusted
        if looked.rows_seen == looked.rows_total and trusted and gram_is_less(features, layer, G):
            if factor is not None:
                G, factor = G * factor.to(G), None
            e: Change = features.gram() @ G, None
            values["probe"] = probe(layer, features, G, gamma, self._generator)
        else:
            changed = changes(makings, gamma)
            gradients = [piece.gradient() for piece in layer.pieces]
            by_weight, by_bias = act(makings, changed, features)
            e = _apart(by_weight, gradients), _apart(by_bias, gradients)
            if not layer.is_direct:
                values["stretch"] = stretch(changed, gamma)
        vectors = RowVectors(G, factor, joined([call.z for call in calls]), e)
        places = [(call.place, call.rows) for call in calls]
        measured = MeasuredLayer(layer, makings, looked, features, vectors, places, values)
        measured.choose_entries(self._generator)
        self._measured[layer.path] = measured
        rows.calls.clear()

    def _of_ceiling(self, path: str, ceiling: Ceiling, alike: int) -> dict[str, Tensor]:
        """What is to be known of it: its cosine, or of several processes, the sums for that.

        Args:
            path: of the layer.
            ceiling: of all rows that this process has.
            alike: how many processes have the same rows.
        """
        if processes() == 1:
            return {"attainable_cosine": ceiling.cosine()}
        sums = [part / alike for part in ceiling.sums()]
        if sum(part.numel() for part in sums) > _MOST_SUMS:
            self._too_large.append(path)
            return {}
        return dict(zip(CEILING_SUMS, sums, strict=True))

    def _add_all_rows(self, path: str, calls: list[Call], values: dict[str, Tensor]) -> None:
        """What one pass said of all rows, if it did of all calls; else ‖G‖² alone."""
        squares = [call.size.reshape(-1) for call in calls if call.size is not None]
        if len(squares) < len(calls):  # two passes through one graph: only the sample has their sum
            return
        whole = [call.whole for call in calls if call.whole is not None]
        if len(whole) < len(calls) or not sum(call.total for call in calls):
            values["G_norms"] = joined(squares)
            return
        for i, all_rows in enumerate(whole):
            if all_rows.trained is not None:
                squares[i] = squares[i] * all_rows.trained
        weight_squares = [w.weight_square for w in whole if w.weight_square is not None]
        bias_squares = [w.bias_square for w in whole if isinstance(w.bias_square, Tensor)]
        self._all_rows[path] = AllRows(
            joined([part.reshape(-1) for part in weight_squares]),
            joined([b.reshape(-1) for b in bias_squares]) if bias_squares else whole[0].bias_square,
            joined(squares),
        )
        sums = [w.weight_sum.flatten() for w in whole if w.weight_sum is not None]
        if len(sums) == len(calls):
            self._weight_sums[path] = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def _measure_update(self, measured: MeasuredLayer, parts: Parts) -> None:
        steps, layer = self._steps, measured.layer
        assert steps is not None
        taken = {piece.key: steps.taken(piece) for piece in layer.pieces}
        whole = {**taken, **parts}
        changed = changes(measured.makings, whole, whole)
        measured.rows.d = act(measured.makings, changed, measured.features)
        self._finish_rows(measured)  # first: the bias's part of d may be the difference itself
        for piece in layer.pieces:
            steps.take_products(piece, taken[piece.key])

    def _finish_rows(self, measured: MeasuredLayer) -> None:
        rows, values = measured.rows, measured.values
        measured.add_products()
        path = measured.looked.path
        if self._realised is not None and rows.d is not None:
            vectors = rows.scaled(), added(*rows.d), rows.z
            self._realised.keep(path, *vectors, measured.calls)
        expected = self._watch.expects_idle(path) or "weight_sum" not in values
        if expected or processes() > 1:  # idle rows may be another process's
            measured.add_common()
        measured.release()


def _apart(part: Tensor | None, gradients: Iterable[Tensor]) -> Tensor | None:
    """The same; a copy of what is a view of gradients, which the optimizer may write to."""
    if part is None:
        return None
    memory = part.untyped_storage().data_ptr()
    is_view = any(gradient.untyped_storage().data_ptr() == memory for gradient in gradients)
    return part.clone() if is_view else part


def _fan_in(features: Features) -> int | None:
    if isinstance(features, DenseFeatures) and features.phi is not None:
        return features.phi.shape[-1]
    return None


def _why_from_rows(features: Features, *, shared: bool) -> str:
    """Why γ is not GᵀΦ of this layer's rows, as far as that is known beforehand."""
    if shared:
        return "shared"
    weighs = isinstance(features, DenseFeatures) and (
        features.mixes_rows or features.weight_gain is not None
    )
    return "weighed" if weighs else ""  # gradient-only layers do so on purpose


def _why_unreached(layer: Layer, *, called: bool) -> str:
    if any(parameter.grad is not None for parameter in layer.parameters):
        if called:
            return (
                "its parameters have a gradient, but none came through the output of its forward: "
                "that was changed in place as a view, or the gradient is of an earlier step"
            )
        return (
            "its parameters have a gradient, but its forward was not called: another module, or "
            "compiled code, uses them directly"
        )
    return "no gradient reached it in this step"
