"""Which layers of a model are measured, which parameters of theirs, and why the others are not."""

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adiv_monitor.capture.weights.pieces import (
    NOTHING,
    ConcatenatedParameters,
    Parts,
    Piece,
    Source,
    covered,
)
from adiv_monitor.capture.weights.shards import (
    Peers,
    held_in_place_of,
    is_shard,
    managed,
    peers,
    why_unusable,
)
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.registry import Rule, find_rule, known_rules
from adiv_monitor.features.uses import as_it_is

LayerChoice = Sequence[str] | Callable[[str, nn.Module], bool] | None

_WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Fabric
)
_MOST_MODULES = 10**6
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True, eq=False)
class Layer:
    """One use of trained parameters, or of pieces of them.

    Attributes:
        path: of the module that owns the weight, as reports name it; with the parameter's name if
            that is not `weight` or `bias`, and with who uses it (`embed@head`) if another use has
            that name already. Of several parameters: of the module that holds them all; if only
            the model does, their names (`query+key`), or the model's class if they are many.
        module: that module; of several parameters that are measured through a module, this one.
        kind: what reports call it.
        weight: what the weight is made of, if this optimizer trains any of it.
        bias: the same of the bias.
        shaped: brings the weight into the shape that the features expect.
        place: of the parameter in the model, for the order of layers.
        form: see `Use`.
    """

    path: str
    module: nn.Module
    kind: str
    weight: Source | None
    bias: Source | None
    shaped: Callable[[Tensor], Tensor] = as_it_is
    place: int = 0
    form: object = None

    @cached_property
    def pieces(self) -> list[Piece]:
        """What is trained, weight first; never empty."""
        sources = [source for source in (self.weight, self.bias) if source is not None]
        return list(dict.fromkeys(piece for source in sources for piece in source.pieces))

    @cached_property
    def is_direct(self) -> bool:
        """Whether it uses pieces as they are, so that their gradient is that of its rows."""
        return all(source is None or source.is_view for source in (self.weight, self.bias))

    def is_through(self, module: nn.Module) -> bool:
        """Whether it is all that parameters do to the output of this module."""
        return isinstance(self.weight, ConcatenatedParameters) and self.weight.through is module

    def made_of(self, weight: Source | None, bias: Source | None) -> "Layer":
        """The layer as another call uses it: itself, or with weights made of other constants."""
        same = all(
            mine is None or mine.is_as(other)
            for mine, other in ((self.weight, weight), (self.bias, bias))
        )
        return self if same else replace(self, weight=weight, bias=bias)

    def change(self, parts: Parts, taken: Parts = NOTHING) -> tuple[Tensor | None, Tensor | None]:
        """How weight and bias change when the pieces do; None for what is not trained.

        Args:
            parts: a change of the pieces.
            taken: what a step has taken away from the pieces since the layer used them.
        """
        weight = None if self.weight is None else self.shaped(self.weight.of(parts, taken))
        return weight, None if self.bias is None else self.bias.of(parts, taken)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the pieces belong to, once each."""
        return list(dict.fromkeys(piece.parameter for piece in self.pieces))


@dataclass(frozen=True)
class Place:
    """Where a parameter is: in which module, under which name."""

    path: str
    module: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def home(self) -> tuple[str, str]:
        """Path and name before torch moved it, to put what is made of it in its place."""
        owner, moved, rest = f".{self.full_name}".partition(".parametrizations.")
        if moved:
            return owner.removeprefix("."), rest.partition(".")[0]
        return self.path, self.name.removesuffix("_orig")


@dataclass(frozen=True)
class Selection:
    """The parameters to measure, and why others that were asked for can't be.

    Attributes:
        places: id → where it is, of every parameter to be measured, in the model's order.
        held: id → the parameter, which may be replaced in the model before the report is made.
        rules: modules that are measured as a whole by a rule of their class, or why they refuse.
        modules: module → path, of all modules that hold these parameters, be it further below.
        closed: the outermost modules that hold parameters, but none that is trained.
        unsupported: module or parameter → why it can't be.
        trained: the parameters that the step trains. What is trainable is read in time, because it
            may be switched off when the report is made.
        names: id → name, of the parameters that were asked for.
        peers: the ranks that are given the same data as this one (tensor parallelism).
        due: ids of the parameters whose turn it is; None: all layers are measured in every step.
    """

    places: dict[int, list[Place]]
    held: dict[int, nn.Parameter]
    rules: dict[nn.Module, Rule]
    modules: dict[nn.Module, str]
    closed: list[nn.Module]
    unsupported: dict[str, str]
    trained: list[Tensor]
    names: dict[int, str]
    peers: Peers | None = None
    due: Collection[int] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters to measure."""
        return list(self.held.values())

    @property
    def due_parameters(self) -> list[nn.Parameter]:
        """Of those, the ones whose turn it is."""
        return [p for key, p in self.held.items() if self.due is None or key in self.due]

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that hold them themselves, and can have hooks."""
        places = (place for several in self.places.values() for place in several)
        modules = dict.fromkeys(place.module for place in places)
        return [module for module in modules if module in self.modules]

    @property
    def paths(self) -> list[str]:
        """Paths of the modules that hold them."""
        return list(
            dict.fromkeys(place.path for places in self.places.values() for place in places)
        )

    def is_due(self, layer: Layer) -> bool:
        """Whether it is a layer's turn, which is that of its first parameter."""
        return self.due is None or id(layer.pieces[0].parameter) in self.due

    @cached_property
    def _trained_now(self) -> list[Tensor]:
        """Those whose turn it is."""
        return [p for p in self.trained if self.due is None or id(p) in self.due]

    def accountable(self, layers: Iterable[Layer]) -> "Selection":
        """With those due that the report is to account for.

        Where several parameters make one layer, all of them have the turn of the first.

        Args:
            layers: all that were seen.
        """
        if self.due is None:
            return self
        ids = {True: set[int](), False: set[int]()}
        for layer in layers:
            ids[self.is_due(layer)].update(map(id, layer.parameters))
        return replace(self, due=(set(self.due) - ids[False]) | ids[True])

    def knows(self, parameters: Iterable[Tensor]) -> bool:
        """Whether none of these is trained now but those that were when they were looked at."""
        return self._trained_ids.issuperset([id(p) for p in parameters if p.requires_grad])

    @cached_property
    def _trained_ids(self) -> set[int]:
        return set(map(id, self.trained))

    def stepped(self, parameters: Iterable[Tensor]) -> "Selection":
        """With those as trained that a step has moved: it leaves alone what was frozen since.

        Args:
            parameters: all that the optimizer holds.
        """
        trained = [p for p in parameters if p.requires_grad or p.grad is not None]
        same = [*map(id, trained)] == [*map(id, self.trained)]
        return self if same else replace(self, trained=trained)

    def unmeasured(self, missing: Mapping[int, int]) -> dict[str, int]:
        """Elements of the trained parameters that were asked for and lie in no measured layer.

        Args:
            missing: see `missing`, of the measured layers.
        """
        return {self.names[key]: n for key, n in missing.items() if key in self.names}

    @cached_property
    def elements(self) -> int:
        """Of all parameters that are trained, those whose turn it is."""
        return sum(map(_elements, self._trained_now))

    def coverage(self, missing: Mapping[int, int]) -> float:
        """Share of the trained elements that lie in the measured layers, 0 to 1.

        Args:
            missing: see `missing`, of the measured layers.
        """
        whole = self.elements
        return (whole - sum(missing.values())) / whole if whole else 0.0

    def missing(self, layers: Iterable[Layer]) -> dict[int, int]:
        """By id of a trained parameter, how many of its elements lie in none of these layers."""
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for layer in layers:
            for piece in layer.pieces:
                pieces[id(piece.parameter)].append(piece)
        found = {}
        for p in self._trained_now:
            of_parameter = pieces.get(id(p), ())
            if of_parameter and of_parameter[0].view is None:  # all of it
                continue
            count = _elements(p) - covered(p, of_parameter)
            if count or is_lazy(p):
                found[id(p)] = count
        return found

    def unexplained(
        self,
        missing: Container[int],
        known: Collection[str],
        why: Callable[[nn.Parameter], str],
    ) -> dict[str, str]:
        """Module, or parameter where the module is measured in part → why there is no reading.

        Args:
            missing: see `missing`, of layers with a reading, or whose reason is known already.
            known: paths whose reason is known already.
            why: a parameter's reason.
        """
        by_module: dict[str, list[tuple[Place, int]]] = defaultdict(list)
        for parameter in self.due_parameters:
            place = self.places[id(parameter)][0]
            by_module[place.path].append((place, id(parameter)))
        found = {}
        for path, held in by_module.items():
            lacking = [(place, key) for place, key in held if key in missing]
            reasons = {key: why(self.held[key]) for _, key in lacking}
            if path in known:
                continue
            if path and len(lacking) == len(held) and len(set(reasons.values())) == 1:
                found[path] = reasons[lacking[0][1]]
                continue
            names = {place.full_name: reasons[key] for place, key in lacking}
            found |= {name: reason for name, reason in names.items() if name not in known}
        return found


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules; paths without what DDP, compile, FSDP, checkpoint and Fabric wrappers add."""
    found: dict[str, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():  # parents first
        name = ""
        if path:
            head, _, last = path.rpartition(".")
            name, parent = found[head]
            if last not in _WRAPPERS and not (last == "module" and isinstance(parent, _PARALLEL)):
                name = f"{name}.{last}" if name else last
        found[path] = name, module
        yield name, module


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module calls the one inside with what it got, and does no more to it."""
    return isinstance(module, _PARALLEL) or "_orig_mod" in module._modules


def inside_wrappers(model: nn.Module) -> nn.Module:
    """The module that such wrappers call in the end."""
    while is_wrapper(model):
        model = next(model.children())
    return model


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """Every trainable parameter of the model, tied ones once."""
    held = held_in_place_of(model)
    return (held.get(id(p), p) for p in model.parameters() if p.requires_grad)


def structure(model: nn.Module, held: Mapping[int, Tensor] | None) -> object:
    """What `select` goes by: equal as long as nothing is added, replaced, frozen or unfrozen.

    None, which is to be asked anew each time, where modules hold other parameters by turns.
    """
    if world_size() > 1:
        return None
    modules, found = [model], list[object](known_rules())
    for module in modules:  # which grows meanwhile
        found += (id(module), type(module), *module._modules)
        for name, p in module._parameters.items():
            if p is not None:
                found += (name, id(p), type(p), p.requires_grad, p.dtype, p.device)
        modules += [child for child in module._modules.values() if child is not None]
        if len(modules) > _MOST_MODULES:  # one that holds itself has no end
            return None
    every = () if held is None else held.values()
    return found, [part for p in every for part in (id(p), p.requires_grad)]


def select(model: nn.Module, held: Mapping[int, Tensor] | None, choice: LayerChoice) -> Selection:
    """Sort the modules that have trainable parameters of their own.

    Args:
        model: the model.
        held: by id, the parameters that the optimizer holds; None: all are looked at.
        choice: glob patterns over module paths, a predicate, or None for every module.
    """
    places: dict[int, list[Place]] = {}
    kept: dict[int, nn.Parameter] = {}
    rules: dict[nn.Module, Rule] = {}
    unsupported: dict[str, str] = {}
    names: dict[int, str] = {}
    made_whole, sharded, parallel = managed(model), held_in_place_of(model), peers(model)
    modules = {module: path for path, module in named_modules(model)}
    for module, path in modules.items():
        own = {
            name: sharded.get(id(p), p)
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        }
        if not own or not is_chosen(path, module, choice):
            continue
        held_here, here = {}, {}
        for name, parameter in own.items():
            here[name] = place = Place(path, module, name)
            names.setdefault(id(parameter), place.full_name)
            if held is None or id(parameter) in held:
                held_here[name] = parameter
        if not held_here:
            unsupported[path] = "the optimizer holds none of its parameters"
            continue
        rule = find_rule(module)
        if isinstance(rule, str):
            unsupported[path] = f"{type(module).__module__}.{type(module).__qualname__}: {rule}"
            continue
        unusable = {
            n: why for n, p in held_here.items() if (why := _unusable(p, made_whole, parallel))
        }
        if unusable:
            unsupported[path] = "; ".join(f"its {name} {why}" for name, why in unusable.items())
        if rule is not None:
            if unusable:
                continue
            if parallel and any(id(p) in parallel.placements for p in held_here.values()):
                unsupported[path] = (
                    f"{type(module).__module__}.{type(module).__qualname__}: its rule was not told "
                    "how its rows lie on the ranks (tensor parallelism)"
                )
                continue
            rules[module] = rule
        for name, parameter in held_here.items():
            if name not in unusable:
                places.setdefault(id(parameter), []).append(here[name])
                kept[id(parameter)] = parameter
    for index, tensor in enumerate(held.values() if held and choice is None else ()):
        if tensor.requires_grad and id(tensor) not in names:
            names[id(tensor)] = path = f"optimizer parameter {index}"
            unsupported[path] = "the optimizer trains it, but it is not in the monitored model"
    stepped = trainable(model) if held is None else held.values()
    trained: list[Tensor] = [p for p in stepped if p.requires_grad]
    holders, closed = _holders(modules, places, sharded)
    return Selection(places, kept, rules, holders, closed, unsupported, trained, names, parallel)


def _holders(
    modules: Mapping[nn.Module, str], places: Container[int], sharded: Mapping[int, nn.Parameter]
) -> tuple[dict[nn.Module, str], list[nn.Module]]:
    """The modules that hold any of the parameters, be it below, and those closed to the watch."""
    holders: dict[nn.Module, str] = {}
    closed: list[nn.Module] = []
    within: set[nn.Module] = set()
    known: dict[nn.Module, _Held] = {}
    for module, path in modules.items():
        if isinstance(module, torch.jit.ScriptModule) or module in within:
            continue
        held = _held(module, places, sharded, known)
        if held.measured:
            holders[module] = path
        elif held.any and not held.trained:
            closed.append(module)
            within.update(module.modules())
    return holders, closed


class _Held(NamedTuple):
    """Which parameters a module holds, be it below."""

    any: bool
    trained: bool
    measured: bool


def _held(
    module: nn.Module,
    places: Container[int],
    sharded: Mapping[int, nn.Parameter],
    known: dict[nn.Module, _Held],
) -> _Held:
    found = known.get(module)
    if found is None:
        known[module] = _Held(any=False, trained=False, measured=False)  # where it holds itself
        own = [sharded.get(id(p), p) for p in module._parameters.values() if p is not None]
        below = [_held(child, places, sharded, known) for child in module.children()]
        found = known[module] = _Held(
            any=bool(own) or any(held.any for held in below),
            trained=any(p.requires_grad for p in own) or any(held.trained for held in below),
            measured=any(id(p) in places for p in own) or any(held.measured for held in below),
        )
    return found


def is_chosen(path: str, module: nn.Module, choice: LayerChoice) -> bool:
    """Whether the patterns or the predicate take the module at this path."""
    if choice is None:
        return True
    if callable(choice):
        return bool(choice(path, module))
    return any(fnmatchcase(path, pattern) for pattern in choice)


def listed(paths: Sequence[str]) -> str:
    """Paths as a part of a sentence; not all if they are many."""
    shown = ", ".join(path or "the model itself" for path in paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def _elements(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _unusable(parameter: Tensor, made_whole: Collection[int], parallel: Peers | None) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet: the layer is lazy and has not run"
    if is_shard(parameter):
        if (why := why_unusable(parameter, made_whole, parallel)) is not None:
            return why
    elif type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}, of which one rank sees only a part"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: only real floating-point parameters are measured"
    if parameter.is_meta:
        return "is on the meta device"
    return None
