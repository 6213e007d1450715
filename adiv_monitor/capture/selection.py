"""Selects the layers and parameters to measure, with reasons for those that are not measured."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adiv_monitor.capture.weights.pieces import Parts, Piece, Source
from adiv_monitor.capture.weights.shards import (
    Sharded,
    is_parallel,
    is_shard,
    why_unusable,
    world_size,
)
from adiv_monitor.features.registry import Rule, find_rule
from adiv_monitor.features.uses import as_it_is
from adiv_monitor.printable import quoted

LayerChoice = Sequence[str] | Callable[[str, nn.Module], bool] | None

_WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Fabric
)
_IS_TRAINED = attrgetter("requires_grad")
_STATE = attrgetter("requires_grad", "dtype", "device")
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True, eq=False)
class Layer:
    """One use of trained parameters, or of pieces of them.

    Attributes:
        path: the path of the module that owns the weight, as in reports; followed by the
            parameter's name if that is not `weight` or `bias`, and by the user (`embed@head`) if
            another use has that name already. For several parameters: the path of the module that
            holds them all; if only the model does, their names (`query+key`), or the model's class
            if they are many.
        module: that module; for parameters that are measured through a module, the latter.
        kind: the kind of layer, as in reports.
        weight: the source of the weight, if this optimizer trains any of it.
        bias: the source of the bias, if this optimizer trains any of it.
        shaped: brings the weight into the shape that the features expect.
        place: the parameter's position in the model, which orders the layers.
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
        """The trained pieces, those of the weight first; never empty."""
        sources = [source for source in (self.weight, self.bias) if source is not None]
        return list({p.key: p for source in sources for p in source.pieces}.values())

    @cached_property
    def trained(self) -> dict[str, bool]:
        """Whether its weight and its bias are trained, as `Features.restrict` takes it."""
        return {"weight": self.weight is not None, "bias": self.bias is not None}

    @cached_property
    def identity(self) -> object:
        """Equal for uses of the same parameters in the same way."""
        weight, bias = self.weight and self.weight.identity, self.bias and self.bias.identity
        return self.kind, self.form, weight, bias

    def change(self, parts: Parts) -> tuple[Tensor | None, Tensor | None]:
        """Return the change of weight and bias with the pieces; None where not trained."""
        weight = None if self.weight is None else self.shaped(self.weight.of(parts))
        return weight, None if self.bias is None else self.bias.of(parts)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the pieces belong to, without duplicates."""
        return list(dict.fromkeys(piece.parameter for piece in self.pieces))


@dataclass(frozen=True)
class Place:
    """The module and the name under which a model holds a parameter, and its position in there."""

    path: str
    module: nn.Module
    name: str
    position: int = 0

    @cached_property
    def full_name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @cached_property
    def home(self) -> tuple[str, str]:
        """The path and name of the parameter before torch's parametrization moved it."""
        owner, moved, rest = f".{self.full_name}".partition(".parametrizations.")
        if moved:
            return owner.removeprefix("."), rest.partition(".")[0]
        return self.path, self.name.removesuffix("_orig")


@dataclass(frozen=True)
class Selection:
    """The parameters to measure, and the reasons for those that can't be measured.

    Attributes:
        places: id → places of every parameter to be measured, in the model's order.
        held: id → the parameter, which may be replaced in the model before the report is made.
        rules: the modules that a rule of their class measures as a whole.
        modules: module → path, for all modules that hold the parameters directly or below.
        below: module → ids of these parameters that it holds at any depth, for modules with any.
        unsupported: module or parameter → the reason why it can't be measured.
        trained: the parameters that the step trains. `requires_grad` is read at selection, because
            it may be switched off when the report is made.
        names: id → name, for the requested parameters.
        due: ids of the parameters that are due in this step; None: all layers are measured in
            every step.
    """

    places: dict[int, list[Place]]
    held: dict[int, nn.Parameter]
    rules: dict[nn.Module, Rule]
    modules: dict[nn.Module, str]
    below: dict[nn.Module, set[int]]
    unsupported: dict[str, str]
    trained: list[Tensor]
    names: dict[int, str]
    due: Collection[int] | None = None

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters to measure."""
        return list(self.held.values())

    @cached_property
    def shards(self) -> list[nn.Parameter]:
        """The parameters to measure that are partitioned across ranks."""
        return [p for p in self.parameters if is_shard(p)]

    @cached_property
    def due_parameters(self) -> list[nn.Parameter]:
        """The parameters to measure that are due in this step."""
        return [p for key, p in self.held.items() if self.due is None or key in self.due]

    @cached_property
    def owners(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The modules that hold the parameters directly, with these."""
        found: dict[nn.Module, list[nn.Parameter]] = defaultdict(list)
        for key, places in self.places.items():
            for place in places:
                found[place.module].append(self.held[key])
        return dict(found)

    @property
    def paths(self) -> list[str]:
        """The paths of the modules that hold the parameters directly."""
        return list(
            dict.fromkeys(place.path for places in self.places.values() for place in places)
        )

    def is_due(self, layer: Layer) -> bool:
        """Return whether a layer is due in this step, as its first parameter is."""
        return self.due is None or id(layer.pieces[0].parameter) in self.due

    def by_module(self, parameters: Iterable[Tensor]) -> dict[str, int]:
        """Return the element counts of parameters to measure, by the paths of their modules."""
        found = Counter[str]()
        for p in dict.fromkeys(parameters):
            found[self.places[id(p)][0].home[0]] += elements(p)
        return dict(found)

    def knows(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether every parameter trained now was also trained when it was selected."""
        return {*map(id, self.trained)}.issuperset(map(id, filter(_IS_TRAINED, parameters)))

    def stepped(self, parameters: Iterable[Tensor]) -> "Selection":
        """Return the selection with the parameters that are trained as a step ends."""
        trained = [*filter(_IS_TRAINED, parameters)]
        is_same = [*map(id, trained)] == [*map(id, self.trained)]
        return self if is_same else replace(self, trained=trained)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules; paths omit the names that DDP, compile, FSDP and other wrappers add."""
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
    """Return whether a module only passes its arguments to the module inside."""
    return isinstance(module, _PARALLEL) or "_orig_mod" in module._modules


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the innermost module inside such wrappers."""
    while is_wrapper(model):
        model = next(model.children())
    return model


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return an iterator over the model's trainable parameters, each once."""
    held = Sharded(model).replaced()
    every = [p for module in model.modules() for p in module._parameters.values()]
    found = {id(p): p for p in every if p is not None and p.requires_grad}
    return iter((found | {key: held[key] for key in held if key in found}).values())


def paths_of_parameters(model: nn.Module) -> dict[int, str]:
    """Return by id of each parameter the path of the first module that holds it."""
    sharded, found = Sharded(model).replaced(), dict[int, str]()
    for path, module in named_modules(model):
        for name, p in module._parameters.items():
            if p is not None:
                found.setdefault(id(sharded.get(id(p), p)), Place(path, module, name).home[0])
    return found


def unregistered(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return by id, with their names, the trainable leaves that are in plain attributes.

    They may be in modules in lists and dictionaries.
    """
    return {
        id(x): (f"{path}.{name}".lstrip("."), x)
        for path, module in named_modules(model)
        for attribute, value in vars(module).items()
        if not attribute.startswith(("_parameters", "_buffers", "_modules"))
        for name, x in _tensors(attribute, value)
        if x.requires_grad and x.is_leaf
    }


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", p) for inner, p in value.named_parameters())
    elif isinstance(value, (list, tuple, dict)):  # other mappings may compute their values
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}[{key!r}]", item)


def structure(model: nn.Module, held: Mapping[int, Tensor]) -> object:
    """Return a value that stays equal until modules or parameters are added, changed or frozen.

    `select` reads nothing else of the model, which takes longer. None means that the selection must
    be repeated every time, because modules may hold different parameters at different times.
    """
    if world_size() > 1:
        return None
    found: list[object] = [*held, *map(_IS_TRAINED, held.values())]
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        found += (id(module), type(module), *module._modules.keys(), *module._parameters.keys())
        found += (*map(id, own), *map(type, own), *map(_STATE, own))
    return found


def select(model: nn.Module, held: Mapping[int, Tensor] | None, choice: LayerChoice) -> Selection:
    """Select the parameters to measure among the modules that hold trainable parameters.

    Args:
        model: the model.
        held: the parameters that the optimizer holds, by id; None: consider all parameters.
        choice: glob patterns over module paths, a predicate, or None for every module.
    """
    places: dict[int, list[Place]] = {}
    kept: dict[int, nn.Parameter] = {}
    rules: dict[nn.Module, Rule] = {}
    unsupported: dict[str, str] = {}
    names: dict[int, str] = {}
    numbers = count()
    sharded, parallel = Sharded(model).replaced(), is_parallel(model)
    modules = {module: path for path, module in named_modules(model)}
    for module, path in modules.items():
        own = module._parameters.items()
        every = [
            (Place(path, module, name, next(numbers)), sharded.get(id(p), p))
            for name, p in own
            if p is not None
        ]
        if not every or not is_chosen(path, module, choice):
            continue
        for place, p in every:
            names.setdefault(id(p), place.full_name)
        here = [x for x in every if x[1].requires_grad and (held is None or id(x[1]) in held)]
        if not here:
            if any(p.requires_grad for _, p in every):
                unsupported[path] = "the optimizer holds none of its parameters"
            continue
        rule = find_rule(module)
        unusable = {x.name: why for x, p in here if (why := _unusable(p, parallel=parallel))}
        if unusable:
            unsupported[path] = "; ".join(f"its {name} {why}" for name, why in unusable.items())
        if rule is not None:
            if unusable:
                continue
            rules[module] = rule
        for place, p in here:
            if place.name not in unusable:
                places.setdefault(id(p), []).append(place)
                kept[id(p)] = p
    for index, tensor in enumerate(held.values() if held and choice is None else ()):
        if tensor.requires_grad and id(tensor) not in names:
            names[id(tensor)] = path = f"optimizer parameter {index}"
            unsupported[path] = "the optimizer holds it, but it is not in the monitored model"
    stepped = trainable(model) if held is None else held.values()
    trained: list[Tensor] = [p for p in stepped if p.requires_grad]
    scripts = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    seen = places.keys() - {id(p) for script in scripts for p in script.parameters()}
    held_in = {m: {id(sharded.get(id(p), p)) for p in m.parameters()} & seen for m in modules}
    below = {module: keys for module, keys in held_in.items() if keys}
    modules = {module: path for module, path in modules.items() if module in below}
    return Selection(places, kept, rules, modules, below, unsupported, trained, names)


def is_chosen(path: str, module: nn.Module, choice: LayerChoice) -> bool:
    """Return whether the patterns or the predicate select the module at this path."""
    if choice is None:
        return True
    if callable(choice):
        return bool(choice(path, module))
    return any(fnmatchcase(path, pattern) for pattern in choice)


def listed(paths: Sequence[str]) -> str:
    """Return paths in quotes for use in a sentence: three of them, and how many more there are."""
    shown = ", ".join(map(quoted, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter; 0 if it is lazy."""
    return 0 if is_lazy(parameter) else parameter.numel()


def _unusable(parameter: Tensor, *, parallel: bool) -> str | None:
    if parallel:
        return "belongs to a model with tensor parallelism, which is not measured"
    if is_lazy(parameter):
        return "has no shape yet: the layer is lazy and has not run"
    if is_shard(parameter):
        if (why := why_unusable(parameter)) is not None:
            return why
    elif type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        return f"is a {kind}: only plain tensors and DTensors are measured"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: only real floating-point parameters are measured"
    if parameter.is_meta:
        return "is on the meta device"
    return None
