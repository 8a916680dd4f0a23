"""The commands of `torchlml` by name: the settings that options are read into, and the function to call.

A command is an entry here. Its settings are a dataclass in a module that imports neither torch nor anything
else that takes long, so that `--help` and wrong options are answered at once. Only then is the module of its
function imported.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchlml_lab.cli_errors import BadInput, did_you_mean
from torchlml_lab.engine.settings import TrainSettings, parse_settings, read_settings
from torchlml_lab.figures.settings import AllSettings
from torchlml_lab.files import check_folder, read_json


class Command(NamedTuple):
    """A command: each of the first two is `module:name` within `torchlml_lab`."""

    settings: str
    """A dataclass whose fields are the options, or a function that makes it from the arguments."""
    function: str
    """Called with the settings."""
    summary: str = ""
    """A short description, for the list of names of a command that has several."""


class Task(NamedTuple):
    """The commands of a task; None where it has no such command."""

    train: Command
    sweep: Command
    evaluate: Command
    """Called with the folder of a run first, as are the next two."""
    predict: Command | None = None
    step_time: Command | None = None


TASKS = {
    "cifar100": Task(
        train=Command(
            "studies.cifar100.settings:read_train",
            "studies.cifar100.task:main",
            "top-5 classification under label noise",
        ),
        sweep=Command(
            "studies.cifar100.settings:read_sweep",
            "studies.cifar100.sweep:main",
            "losses x noise levels x seeds, and tuning",
        ),
        evaluate=Command("studies.cifar100.settings:EvaluateSettings", "studies.cifar100.report:main"),
        step_time=Command("studies.cifar100.settings:LossTimesSettings", "studies.cifar100.report:step_time"),
    ),
    "multilabel": Task(
        train=Command(
            "multilabel.settings:MultilabelSettings",
            "multilabel.training:main",
            "the best labels of texts or features, from your file",
        ),
        sweep=Command(
            "multilabel.settings:SweepSettings",
            "multilabel.sweep:main",
            "losses x kept labels x seeds, and tuning",
        ),
        evaluate=Command("multilabel.settings:EvaluateSettings", "multilabel.report:main"),
        predict=Command("multilabel.settings:PredictSettings", "multilabel.prediction:main"),
    ),
    "scene-graph": Task(
        train=Command(
            "studies.scene_graph.settings:SceneGraphSettings",
            "studies.scene_graph.task:main",
            "all relations of an image, on Visual Genome or VRD",
        ),
        sweep=Command(
            "studies.scene_graph.settings:SweepSettings",
            "studies.scene_graph.sweep:main",
            "methods x seeds, and tuning",
        ),
        evaluate=Command("studies.scene_graph.settings:EvaluateSettings", "studies.scene_graph.report:main"),
        predict=Command(
            "studies.scene_graph.settings:PredictSettings", "studies.scene_graph.prediction:main"
        ),
        step_time=Command(
            "studies.scene_graph.settings:ObjectiveTimesSettings", "studies.scene_graph.report:step_time"
        ),
    ),
    "recommend": Task(
        train=Command(
            "recommend.settings:RecommendSettings",
            "recommend.training:main",
            "what users take next, from your own files",
        ),
        sweep=Command(
            "recommend.settings:SweepSettings", "recommend.sweep:main", "models x losses x seeds, and tuning"
        ),
        evaluate=Command("recommend.settings:EvaluateSettings", "recommend.report:main"),
        predict=Command("recommend.settings:PredictSettings", "recommend.prediction:main"),
        step_time=Command("recommend.settings:LossTimesSettings", "recommend.training:step_time"),
    ),
}

BENCHMARKS = {
    "layer": Command(
        "bench.settings:read_layer",
        "bench.grid_benchmark:layer",
        "lml beside softmax, topk, sort and sigmoid",
    ),
    "short": Command(
        "bench.settings:ShortRowsSettings",
        "bench.short_rows:main",
        "many short rows, relative to softmax, with targets",
    ),
    "constrained": Command(
        "bench.settings:read_constrained",
        "bench.grid_benchmark:constrained",
        "the relatives of lml beside softmax",
    ),
    "subsets": Command(
        "bench.settings:SubsetSettings",
        "bench.subsets:main",
        "the distribution over k-subsets, and other methods",
    ),
    "balanced": Command(
        "bench.settings:BalancedSettings",
        "bench.balanced:main",
        "balanced_lml relative to lml, with targets",
    ),
    "losses": Command(
        "bench.settings:LossesSettings",
        "bench.losses:main",
        "the losses beside cross-entropy, on fixed problems",
    ),
    "alternatives": Command(
        "bench.settings:read_alternatives",
        "bench.alternatives:main",
        "other differentiable top-k: cost, exactness, uses",
    ),
    "scale": Command(
        "bench.settings:ScaleSettings", "bench.scale:main", "very many labels: time, memory and rounds"
    ),
    "paper": Command(
        "bench.settings:read_paper", "bench.paper:main", "the paper's timing study, with its figure"
    ),
}

FIGURES = {
    "projection": Command(
        "figures.settings:ProjectionSettings",
        "figures.projection:projection",
        "one row through softmax, sigmoid and lml",
    ),
    "sliding-sigmoid": Command(
        "figures.settings:SlidingSigmoidSettings",
        "figures.sliding_sigmoid:main",
        "an animation: a sigmoid slides until its outputs sum to k",
    ),
    "polytopes": Command(
        "figures.settings:PolytopesSettings",
        "figures.geometry:polytopes",
        "the sets L(3,1), L(3,2) and L(4,2), and projections",
    ),
    "root-finding": Command(
        "figures.settings:RootFindingSettings",
        "figures.projection:root_finding",
        "how the threshold is found, and from which interval",
    ),
    "entropies": Command(
        "figures.settings:EntropiesSettings",
        "figures.geometry:entropies",
        "the entropies of sigmoid, softmax, lml and a relative",
    ),
    "which-relaxation": Command(
        "figures.settings:RelaxationsSettings",
        "figures.projection:which_relaxation",
        "the same logits through five relaxations",
    ),
    "sets": Command(
        "figures.settings:SetsFigureSettings",
        "figures.sets:main",
        "distance of lml from exact inclusion probabilities",
    ),
    "timing": Command(
        "figures.settings:TimingFigureSettings",
        "bench.paper_report:main",
        "the paper's timing study, from its CSV",
    ),
    "cifar100": Command(
        "figures.settings:NoiseFigureSettings",
        "figures.classification:by_noise",
        "accuracy against label noise, from a sweep",
    ),
    "multilabel": Command(
        "figures.settings:MultilabelFigureSettings",
        "figures.multilabel:main",
        "losses against the labels kept, and tables, from sweeps",
    ),
    "scene-graph": Command(
        "figures.settings:SceneGraphFigureSettings",
        "figures.scene_graph:by_epoch",
        "recall against epochs, and tables, from a sweep",
    ),
    "recommend": Command(
        "figures.settings:RecommendFigureSettings",
        "figures.recommend:main",
        "recall of models and losses, and a table, from a sweep",
    ),
    "scene-graph-bias": Command(
        "figures.settings:BiasFigureSettings",
        "figures.scene_graph:by_bias",
        "recall against the kind of frequency bias, from a sweep",
    ),
    "which-k": Command(
        "figures.settings:WhichKFigureSettings",
        "figures.classification:by_k",
        "what a wrong k costs, from `torchlml which-k`",
    ),
}
ALL_FIGURES = Command(
    "figures.settings:AllSettings", "commands:draw_all", "all of them, as far as their CSVs are there"
)

SINGLE = {
    "demo": Command("studies.digits.settings:DemoSettings", "studies.digits.demo:main"),
    "which-k": Command("studies.digits.settings:WhichKSettings", "studies.digits.which_k:main"),
    "routing": Command("studies.routing.settings:RoutingSettings", "studies.routing.task:main"),
    "info": Command("info:read_arguments", "info:main"),
    "gpu-check": Command("gpu_check:read_arguments", "gpu_check.check_gpu:main"),
}
"""The commands that are called by one word."""

SUMMARIES = {
    "demo": "learn the labels nobody wrote down, with five losses",
    "which-k": "measure what a wrong k costs",
    "routing": "compare routers for mixtures of experts",
    "info": "print versions, the kernel in use, threads, devices, extras",
    "gpu-check": "check and time the kernels on your GPU",
    "bench": "time the layer, its relatives and the losses",
    "train": "train a network: a run that can be continued when killed",
    "sweep": "run a grid of training runs on all cores, into one CSV",
    "evaluate": "measure a run with its best weights",
    "predict": "print and draw a prediction of a run",
    "step-time": "time a training step with each loss of a task",
    "figures": "draw a figure of the documentation or a study",
}
"""All commands, in the order of the help."""

_CANNOT = {
    "evaluate": "which has nothing to measure",
    "predict": "which has nothing to draw",
    "step-time": "which has nothing to time",
}


def run(name: str, arguments: Sequence[str]) -> None:
    """Run one of the commands in `SUMMARIES` with the arguments that followed it."""
    if name in SINGLE:
        call(name, SINGLE[name], arguments)
    elif name == "train":
        _choose(name, {task: commands.train for task, commands in TASKS.items()}, arguments)
    elif name == "sweep":
        _choose(name, {task: commands.sweep for task, commands in TASKS.items()}, arguments)
    elif name == "bench":
        _choose(name, BENCHMARKS, arguments)
    elif name == "figures":
        _choose(name, FIGURES | {"all": ALL_FIGURES}, arguments)
    else:
        _ask_task(name, arguments)


def call(name: str, command: Command, arguments: Sequence[str]) -> None:
    """Read the options of a command, then import its module and call its function.

    Args:
        name: The command as it is typed, as in `train multilabel`.
        command: Its entry.
        arguments: The words after the name; wrong options raise `BadInput`.
    """
    kind = _load(command.settings)
    if not isinstance(kind, type):
        settings = kind(arguments)
    elif issubclass(kind, TrainSettings):
        settings = read_settings(kind, name, arguments, kind())
    else:
        settings = parse_settings(kind, name, arguments, kind())
    _load(command.function)(settings)


def draw_all(settings: AllSettings) -> None:
    """Draw one figure after the other; an error in one is raised after the others are drawn."""
    from torchlml_lab.engine.output import new_console
    from torchlml_lab.figures.files import NotMadeYet

    check_folder("--out", settings.out)
    errors: list[BadInput] = []
    for name, figure in FIGURES.items():
        try:
            suffix = _load(figure.settings)().out.suffix
            call(f"figures {name}", figure, ["--out", str(settings.out / f"{name}{suffix}")])
        except NotMadeYet as missing:
            new_console().print(f"Not drawn: {name}. {missing}", soft_wrap=True)
        except BadInput as error:
            errors.append(error)
    if errors:
        raise errors[0]


def unknown(said: str, name: str, what: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Complete a sentence about an unknown name with the one that resembles it, or with all of them."""
    near = did_you_mean(name, known)
    listed = ", ".join(one for one in known if not one.startswith("-"))
    return f"{said}{near}" if near else f"{said}: the {what} are {listed}."


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"torchlml_lab.{module}"), attribute)


def _choose(command: str, table: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Run the part of a command that its first argument names, as in `torchlml train cifar100`."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        parts = "\n".join(f"  {part:<18}{entry.summary}" for part, entry in table.items())
        sys.stdout.write(f"usage: torchlml {command} NAME [OPTIONS]\n\nnames:\n{parts}\n")
    elif name in table:
        call(f"{command} {name}", table[name], arguments[1:])
    elif name.startswith("-"):
        names = ", ".join(table)
        raise BadInput(f"`torchlml {command}` takes a name before options like `{name}`: one of {names}.")
    else:
        raise BadInput(unknown(f"`torchlml {command}` has no `{name}`", name, "names", table))


def _ask_task(name: str, arguments: Sequence[str]) -> None:
    """Run a command on a run, whose folder is the first argument and says which task made it."""
    commands: dict[str, Command | None] = {
        task: getattr(entry, name.replace("-", "_")) for task, entry in TASKS.items()
    }
    first = arguments[0] if arguments else ""
    without_run = commands["scene-graph"]  # its data can be named by `--vg` or `--vrd`
    if name == "step-time" and first.startswith("--") and first != "--help" and without_run is not None:
        call(name, without_run, arguments)
        return
    run = first if first and not first.startswith("-") else None
    if {"-h", "--help"} & set(arguments) and (run is None or not (Path(run) / "run.json").exists()):
        _explain(name, commands)
        return
    if run is None:
        raise BadInput(f"`torchlml {name}` needs the folder of a run, and first: `torchlml {name} RUN`.")
    path = Path(run) / "run.json"
    experiment = read_json(path, dict).get("experiment")
    if not isinstance(experiment, str):
        raise BadInput(f"`{path}` is damaged: it does not name an experiment.")
    if experiment not in TASKS:
        raise BadInput(f"`{run}` is a run of `{experiment}`, which is no task of this version.")
    command = commands[experiment]
    if command is None:
        able = ", ".join(task for task, one in commands.items() if one is not None)
        raise BadInput(
            f"`{run}` is a run of `{experiment}`, {_CANNOT[name]}: `torchlml {name}` is for runs of {able}."
        )
    call(name, command, arguments)


def _explain(name: str, commands: Mapping[str, Command | None]) -> None:
    """Print the help for the runs of every task, since without a run there is none to choose by."""
    for task, command in commands.items():
        if command is not None:
            sys.stdout.write(f"of a run of {task}:\n")
            try:
                call(name, command, ["--help"])
            except SystemExit:  # after `--help`
                sys.stdout.write("\n")
