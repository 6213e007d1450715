"""Options of an audit: of the command line, and the keys of a YAML file."""

import argparse
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from adiv_monitor import alarms
from adiv_monitor.audit.audit import audit, check_numbers
from adiv_monitor.audit.command.code import UsageError, needed, one_line
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import STRENGTHS
from adiv_monitor.report.plain import HIDDEN, hidden_keys, without_secrets

# Lightning's names; float16 needs a scaled loss, which the audit's loop does not have.
Precision = Literal["32-true", "64-true", "bf16-true", "bf16-mixed"]
# Arguments of `audit` → their defaults.
OF_AUDIT = {name: p.default for name, p in inspect.signature(audit).parameters.items()}


@dataclass(frozen=True)
class Config:
    """The model, the settings of its audit, and the place of the report.

    Names, types, defaults and these descriptions are those of the command line and of YAML files.
    Options that are arguments of `audit` have its defaults and descriptions.

    Attributes:
        model: import path of a torch.nn.Module class, of a function that returns a module, or of
            an instance (torchvision.models.resnet18, my_project.train:build, train.py:model);
            timm:NAME; or hf:PATH of a config.json of transformers, or of its folder. Building it
            runs its code.
        run_script: let code that is imported or called for the model, the data, the loss and the
            optimizer train and write over files of this folder; weights that it trained are
            audited as such
        model_args: arguments of the class or function as JSON; values that look like secrets
            (api_key, password, token) are in no file of the report
        checkpoint: file of weights: .safetensors, or a state dict by torch.save
        trust_checkpoint: load a pickle that runs code; only from people you trust; not an option
            of --config
        data: random (learnable), digits, cifar10:ROOT, imagefolder:DIR, text:FILE (of bytes), or
            package.module:NAME of an iterable of batches, (inputs…, target) or dicts of the
            model's arguments; of a data set; or of a function that returns one of these
        download: fetch CIFAR-10 into ROOT if it is not there
        input_shape: shape of one sample (3,64,64), for data other than your own; by default that
            of a model of torchvision, timm or transformers, or of the data
        num_classes: number of classes of random data; by default the number of the model's
            outputs, at most 10. To change the model's outputs, use --model-args
        batch_size: number of samples in a batch
        loss: cross_entropy, nll, mse, l1, smooth_l1, huber, binary_cross_entropy_with_logits; or
            the import path of a loss class, or of a function (output, target) or (model, batch) →
            scalar. By default cross_entropy for targets that are whole numbers, else mse; models
            of transformers use their own
        optimizer: name in torch.optim, or import path of an optimizer, of its class, or of a
            function model → optimizer
        optimizer_args: arguments of the optimizer as JSON, such as '{"lr": 0.1}'
        device: cpu, cuda, cuda:1, mps …; by default cuda if available
        precision: 32-true, 64-true, bf16-true, bf16-mixed
        losses: file of losses of the first steps of your own run: a JSON list, a metrics.csv of
            Lightning's CSVLogger, or a trainer_state.json; the verdict says if the copy behaves
            otherwise
        fail_if: exit with code 1 if this rule holds: '[LAYERS:] MEASURE > NUMBER' (or >=, <, <=)
            at any layer and measured step, by more than two standard errors ('encoder.*:
            update_cosine < 0'); the name of a finding (rate-too-high); or the least strength of a
            finding (act). May be repeated
        out: folder of the report
        force: overwrite files with the names of the report's files even if no audit wrote them; not
            an option of --config
        config: YAML file with any of these options
    """

    model: str = ""
    run_script: bool = False
    model_args: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    trust_checkpoint: bool = False
    data: str = "random"
    download: bool = False
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    batch_size: int = 16
    loss: str | None = None
    optimizer: str = "AdamW"
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = OF_AUDIT["clip_norm"]
    steps: int | None = OF_AUDIT["steps"]
    seed: int = OF_AUDIT["seed"]
    device: str | None = None
    precision: Precision = "32-true"
    try_fixes: bool = OF_AUDIT["try_fixes"]
    losses: str | None = None
    fail_if: Sequence[str] = ()
    out: str = "adiv-audit"
    force: bool = False
    config: str | None = None


_ARGUMENTS = ("model_args", "optimizer_args")
_OF_LINE = ("trust_checkpoint", "force", "config")  # only the command line can say these
_DESCRIBED = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
HELP = {
    name: text.removesuffix(".")
    for described in (audit, Config)
    for name, text in _DESCRIBED.findall(inspect.getdoc(described) or "")
}
# A number such as 1e-3, which YAML 1.1 reads as text.
_POWER = re.compile(r'"(-?\d+(?:\.\d+)?[eE][-+]?\d+)"')


def option(name: str) -> str:
    """Return the name by which a user knows an option."""
    return "MODEL" if name == "model" else f"--{_key(name)}".replace("_", "-")


def _key(name: str) -> str:
    return "try" if name == "try_fixes" else name


def _shape(text: str) -> tuple[int, ...]:
    sides = text.strip("[]").replace(" ", "").split(",")
    if not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a shape such as 3,64,64")
    return tuple(map(int, sides))


def _arguments(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        told = f"""got {text!r}, expected arguments as JSON, such as '{{"lr": 0.1}}'"""
        raise argparse.ArgumentTypeError(told) from None


# Type of an option → what argparse makes of it.
_READ: Mapping[Any, Mapping[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},
    **{kind: {"type": int, "metavar": "N"} for kind in (int, int | None)},
    **{kind: {"type": float, "metavar": "X"} for kind in (float, float | None)},
    tuple[int, ...] | None: {"type": _shape, "metavar": "SHAPE"},
    Mapping[str, Any]: {"type": _arguments, "metavar": "JSON"},
    Sequence[str]: {"action": "append", "metavar": "RULE"},
    Precision: {"choices": get_args(Precision)},
}


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


def parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that raises UsageError, with further options of argparse's."""
    options |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    return _Parser(command, description=description, **options)


def parsed(argv: Sequence[str], description: str = "") -> dict[str, Any]:
    """Return the fields of `Config` that a command line gives.

    Raises:
        UsageError: there is no such option, or its value is not as expected.
    """
    asks = parser("adiv-audit", description, argument_default=argparse.SUPPRESS)
    usual = asdict(Config())
    for name, kind in get_type_hints(Config).items():
        shown = f" (default: {usual[name]})" if usual[name] or name == "seed" else ""
        about = {**_READ.get(kind, {}), "help": (HELP[name] + shown).replace("%", "%%")}
        if name == "model":
            asks.add_argument("model", nargs="?", metavar="MODEL", **about)
        else:
            asks.add_argument(option(name), dest=name, **about)
    return vars(asks.parse_args(argv))


def read(argv: Sequence[str], description: str) -> tuple[Config, list[str]]:
    """Return the options, those of the command line over those of the --config file.

    The second value names the options that only the file gives.

    Raises:
        UsageError: there is no such option, or its value is not as expected.
    """
    given = parsed(argv, description)
    from_file = load(given["config"]) if "config" in given else {}
    config = Config(**{**from_file, **given})
    if not config.model:
        raise UsageError("which model? Give one, such as torchvision.models.resnet18")
    for name in _ARGUMENTS:
        if hidden := hidden_keys(getattr(config, name)):
            raise UsageError(
                f"{option(name)}: {', '.join(hidden)}: {HIDDEN} stands for a secret that was not "
                "written down; give this option anew, with all arguments"
            )
    try:
        check_numbers(vars(config), option)
        for text in config.fail_if:
            rule(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return config, [option(name) for name in from_file.keys() - given.keys()]


def rule(text: str) -> alarms.Rule:
    """Return the rule of --fail-if: that of an alarm, or the name or strength of a finding.

    Raises:
        UsageError: The text is no such rule, or there is no such measure or finding.
    """
    try:
        return alarms.parse(text, (*FAULTS, *STRENGTHS))
    except ValueError as error:
        raise UsageError(f"--fail-if {error}") from error


def load(file: str) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        UsageError: the file can't be read, or has other content.
    """
    yaml = needed("yaml", "--config")
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise UsageError(f"got {one_line(content)}, expected lines such as steps: 60")
        found = parsed([*_as_line(content)])
    except (UnicodeDecodeError, yaml.YAMLError, UsageError) as error:
        raise UsageError(f"--config {file}: {one_line(error)}") from error
    return {name: value for name, value in found.items() if name not in _OF_LINE}


def _as_line(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a YAML file as the command line gives them."""
    for key, value in content.items():
        name = str(key).replace("_", "-")
        is_rules = name == "fail-if" and isinstance(value, list)
        for item in value if is_rules else [value]:
            if isinstance(item, bool):
                yield f"--{name}" if item else f"--no-{name}"
            elif item is not None:
                is_data = isinstance(item, dict | list)
                text = _POWER.sub(r"\1", json.dumps(item)) if is_data else str(item)
                yield text if name == "model" else f"--{name}={text}"


def dumped(config: Config) -> str:
    """Return the settings as YAML that `load` reads back, without secrets among arguments."""
    yaml = needed("yaml", "config.yaml")
    values = asdict(config)
    values |= {name: without_secrets(values[name]) for name in _ARGUMENTS}
    plain = {_key(name): value for name, value in values.items() if name not in _OF_LINE}
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text
