"""What the final gradient tells of every layer: e, what is known of all rows, and what d takes."""

from collections.abc import Container, Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.names import class_name
from adiv_monitor.capture.processes import processes
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.updates import ParameterSteps, Watch
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.capture.weights.shards import holders, is_shard
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.jacobian import JacobianFeatures
from adiv_monitor.features.rows import exact, joined, shares_memory
from adiv_monitor.maths import totals
from adiv_monitor.maths.alike import Fail
from adiv_monitor.maths.ceiling import KNOWN, Ceiling
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.step.gradient_check import NOW, OWN
from adiv_monitor.step.makings import MAKINGS, with_own_scales
from adiv_monitor.step.measured_layer import MeasuredLayer, products
from adiv_monitor.step.part import CEILING_SUMS, Looked
from adiv_monitor.step.plain_step import Change, act, changes, gram_is_less, probe
from adiv_monitor.step.row_vectors import RowVectors
from adiv_monitor.step.whole_rows import dealt
from adiv_monitor.step.wholes import Wholes

# There is no mean feature, and no telling which of the parameters are a bias.
_WITHOUT_FEATURES = ("common_share", "bias_share")
# Numbers of a layer that a process sends for the ceiling: 8 MiB, eigenvectors in half a second.
_MOST_SUMS = 2**20


class FinalGradient:
    """Begins the measured layers when the gradients are what the optimizer will use.

    Args:
        capture: the rows.
        reached: the layers that a gradient reached.
        selection: what is measured.
        watch: what this run was seen to do so far.
        wholes: what processes know together.
        steps: the gradients of all pieces.
        scale: what a fused optimizer will divide them by during its step (AMP); None: nothing.
        generator: the monitor's own source of chance.

    Attributes:
        measured: by path, the layers that have begun.
        too_large: paths of layers whose sums for the ceiling can't travel.
        in_parts: paths of layers of whose rows no process has all.
        summed: paths of layers of which several passes through one graph told sums alone.
        moved: paths of layers whose parameters were written to since the backward pass.
    """

    def __init__(
        self,
        capture: Capture,
        reached: Container[Layer],
        selection: Selection,
        watch: Watch,
        wholes: Wholes,
        steps: ParameterSteps,
        scale: Tensor | None,
        generator: np.random.Generator,
    ) -> None:
        self.measured: dict[str, MeasuredLayer] = {}
        self.too_large: list[str] = []
        self.in_parts: list[str] = []
        self.summed: list[str] = []
        self.moved: list[str] = []
        self._capture = capture
        self._peers = selection.peers
        self._watch = watch
        self._wholes = wholes
        self._steps = steps
        self._scale = scale
        self._generator = generator
        self._shared = capture.shared(reached)
        self._all_rows: dict[str, AllRows] = {}
        self._weight_sums: dict[str, Tensor] = {}

    def forget(self, path: str) -> None:
        """A layer is not measured in this step."""
        for known in (self.measured, self._all_rows, self._weight_sums):
            known.pop(path, None)

    def factors(self, layers: Iterable[Layer]) -> dict[str, Tensor]:
        """‖gradient now‖ / ‖gradient that backward left‖ of the layers where it is known."""
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
        if self._scale is not None:
            factors = torch._foreach_div(factors, self._scale)
        return {layer.path: factor for layer, factor in zip(known, factors, strict=True)}

    def _now(self, parameter: nn.Parameter) -> Tensor:
        """As long as the parameter's gradient; of a sharded one, as some of its entries."""
        if is_shard(parameter):  # of one process
            return self._steps.entries_of(parameter)
        return self._steps.gamma_norm_of(parameter)

    def begin(
        self, layer: Layer, calls: Sequence[Call], factor: Tensor | None, parts: Parts
    ) -> None:
        """A layer's rows and e.

        Args:
            layer: the layer.
            calls: that its gradient came through; their rows are let go.
            factor: see `factors`.
            parts: γ of the pieces that were made whole.
        """
        features = calls[0].features.joined([call.features for call in calls[1:]])
        G = joined([call.gradient for call in calls if call.gradient is not None])
        if isinstance(features, OneHotFeatures):  # nothing trains the padding token: idle
            G = G * features.trained[:, None]
        own = None
        if layer.path in self._shared and self._peers is None:
            own = self._capture.own_gradient(layer)
        is_shared = layer.path in self._shared and own is None
        looked = self._looked(layer, calls, features, sharded=bool(parts), shared=is_shared)
        values = self._seen(layer, calls, looked)
        self._keep_all_rows(layer.path, calls)
        if factor is not None:
            values["gradient_factor"] = factor
        makings = [
            (made, sum(len(call.z) for call in alike))
            for made, alike in groupby(calls, key=lambda call: call.layer)
        ]
        gamma = {**{piece.key: self._steps.gamma(piece) for piece in layer.pieces}, **parts}
        if self._scale is not None:
            gamma = {key: g / self._scale for key, g in gamma.items()}
        if own is not None:
            values["own_gamma"] = products(own, gamma)
        # With several processes γ holds other rows, too.
        trusted = processes() == 1 and not looked.from_rows and own is None
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
                looked.weight_groups = features.groups
                features, values[MAKINGS] = with_own_scales(
                    makings, changed, features, self._generator
                )
                looked.groups = features.groups
        vectors = RowVectors(G, factor, joined([call.z for call in calls]), e)
        places = [(call.place, call.rows) for call in calls]
        measured = MeasuredLayer(layer, makings, looked, features, vectors, places, values, own)
        measured.choose_entries(self._generator)
        self.measured[layer.path] = measured
        self._capture.rows[layer.path].release()

    def add_sums(self, lose: Fail) -> None:
        """All layers have begun: sums over all of their rows.

        Args:
            lose: called with a layer's path and the exception met.
        """
        for path, found in totals.sums(self._all_rows, self._generator, lose).items():
            values = self.measured[path].values
            values |= found
            if MAKINGS in values:  # its own scales are those of sampled rows, maybe
                values["G_concentration"] = totals.concentration(self._all_rows[path].square)
        self._all_rows.clear()
        if self._weight_sums:
            sums = list(self._weight_sums.values())
            if processes() == 1:  # of several, the sums add up before their norm is taken
                sums = list(torch._foreach_norm(sums))
            for path, found_sum in zip(self._weight_sums, sums, strict=True):
                self.measured[path].values["weight_sum"] = found_sum
        self._weight_sums.clear()

    def _looked(
        self,
        layer: Layer,
        calls: Sequence[Call],
        features: Features,
        *,
        sharded: bool,
        shared: bool,
    ) -> Looked:
        pieces = layer.pieces
        return Looked(
            path=layer.path,
            kind=layer.kind,
            pieces=[piece.key for piece in pieces],
            bias_alone=layer.weight is None,
            rows_seen=sum(len(call.z) for call in calls),
            rows_total=sum(call.total for call in calls),
            groups=features.groups,
            precision=max(call.precision for call in calls),
            from_rows=_why_from_rows(features, shared=shared),
            undefined=_WITHOUT_FEATURES if isinstance(features, JacobianFeatures) else (),
            features=_fan_in(features),
            shares={p.key: 1 / holders(p.parameter) for p in pieces} if sharded else {},
            dealt=dealt(calls, self._peers, come=self._wholes.come),
            module=class_name(layer.module),
        )

    def _seen(self, layer: Layer, calls: Sequence[Call], looked: Looked) -> dict[str, Tensor]:
        """What was seen of a layer while its rows were gathered."""
        values: dict[str, Tensor] = {}
        accumulated, lead = self._capture.accumulation_of(layer), layer.parameters[0]
        since = None if processes() == 1 else accumulated.since_ended()
        if since is not None:
            values["since"] = since
        # What it left of the gradient: of processes that compute the same, the first one's counts.
        counts = looked.dealt is None or looked.dealt.place == 0 or accumulated.is_term
        if accumulated.entries is not None and counts:
            values["then"] = accumulated.entries
            entries = self._wholes.entries.get(id(lead))
            values[f"{NOW}0"] = self._steps.entries_of(lead) if entries is None else entries
        contributions = self._capture.contributions_of(layer)
        if any(contribution.is_moved for contribution in contributions):
            self.moved.append(layer.path)
        looked.followed = bool(contributions) and layer.is_direct and processes() == 1
        for place, contribution in enumerate(contributions):
            looked.followed &= contribution.is_known and contribution.has_rows
            own = contribution.entries()
            if own is not None and counts:
                values[f"{OWN}{place}"] = own
                values[f"{NOW}{place}"] = self._steps.entries_of(contribution.parameter)
        if accumulated.foreign is not None:
            values["foreign"] = accumulated.foreign
        rows = self._capture.rows[layer.path]
        if rows.linear is not None:
            values["rule_error"] = rows.linear
        replay_errors = [call.replay_error for call in calls if call.replay_error is not None]
        if replay_errors:
            values["replay_error"] = torch.stack(replay_errors).amax()
        if not (rows.ceiling_is_whole or looked.dealt is None):
            self.in_parts.append(layer.path)
        elif isinstance(calls[0].features, KNOWN) and not rows.ceiling_is_whole:
            self.summed.append(layer.path)
        elif rows.ceiling is not None:
            alike = 1 if looked.dealt is None else looked.dealt.count
            values |= self._of_ceiling(layer.path, rows.ceiling, alike)
        return values

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
            self.too_large.append(path)
            return {}
        return dict(zip(CEILING_SUMS, sums, strict=True))

    def _keep_all_rows(self, path: str, calls: Sequence[Call]) -> None:
        """Keeps what one pass said of all rows, and of all their scales if it did of all calls."""
        sizes = [call.size for call in calls if call.size is not None]
        if len(sizes) < len(calls):  # two passes through one graph: only the sample has their sum
            return
        squares = [size[0] for size in sizes]
        whole = [call.whole for call in calls if call.whole is not None]
        if len(whole) < len(calls) or not sum(call.total for call in calls):
            own = [size[1:] for size in sizes if len(size) > 1]
            every = joined([part.T for part in own]).T if len(own) == len(sizes) else None
            self._all_rows[path] = AllRows(None, 0.0, joined(squares), every)
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


def _apart(part: Tensor | None, gradients: Iterable[Tensor]) -> Tensor | None:
    """The same; a copy of what is a view of gradients, which the optimizer may write to."""
    if part is None:
        return None
    return part.clone() if any(shares_memory(part, gradient) for gradient in gradients) else part


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
