"""The table of all `torchlml` commands: the settings that hold the options, and the function to call.

Each entry names a settings dataclass in a module that imports neither torch nor anything else slow, so that
`--help` and invalid options are handled immediately. The module of the function is imported only after that.
"""

import dataclasses
import importlib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchlml_lab.cli_errors import BadInput, did_you_mean, options
from torchlml_lab.engine.settings import TrainSettings, folded, parse_settings, read_settings
from torchlml_lab.figures.settings import AllSettings
from torchlml_lab.files import check_folder, read_json


class Command(NamedTuple):
    """A command. The first two fields have the form `module:name`, relative to `torchlml_lab`."""

    settings: str
    """A dataclass whose fields are the options, or a function that builds it from the arguments."""
    function: str
    """The function that is called with the settings."""
    summary: str = ""
    """A short description, listed in the help of commands such as `torchlml bench`."""
    required: tuple[str, ...] = ()
    """The settings without a default, which must be given."""


class Task(NamedTuple):
    """The commands of a task. None means that the task does not have the command."""

    train: Command
    sweep: Command
    evaluate: Command
    """Takes the run directory as its first argument, like the next three commands."""
    predict: Command | None = None
    export: Command | None = None
    step_time: Command | None = None


_RUN = ("run",)

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
            "compare losses, noise levels and seeds, with tuning",
        ),
        evaluate=Command(
            "studies.cifar100.settings:EvaluateSettings", "studies.cifar100.task:evaluate", required=_RUN
        ),
        step_time=Command(
            "studies.cifar100.settings:LossTimesSettings", "studies.cifar100.task:step_time", required=_RUN
        ),
    ),
    "multilabel": Task(
        train=Command(
            "multilabel.settings:MultilabelSettings",
            "multilabel.training:main",
            "tag texts or feature vectors, from your own file",
            required=("train",),
        ),
        sweep=Command(
            "multilabel.settings:SweepSettings",
            "multilabel.sweep:main",
            "compare losses, kept labels and seeds, with tuning",
        ),
        evaluate=Command("multilabel.settings:EvaluateSettings", "multilabel.report:main", required=_RUN),
        predict=Command(
            "multilabel.settings:PredictSettings", "multilabel.prediction:main", required=("run", "data")
        ),
        export=Command("multilabel.settings:ExportSettings", "multilabel.program:main", required=_RUN),
    ),
    "scene-graph": Task(
        train=Command(
            "studies.scene_graph.settings:SceneGraphSettings",
            "studies.scene_graph.task:main",
            "predict all relations in an image (Visual Genome, VRD)",
        ),
        sweep=Command(
            "studies.scene_graph.settings:SweepSettings",
            "studies.scene_graph.sweep:main",
            "compare methods and seeds, with tuning",
        ),
        evaluate=Command(
            "studies.scene_graph.settings:EvaluateSettings",
            "studies.scene_graph.task:evaluate",
            required=_RUN,
        ),
        predict=Command(
            "studies.scene_graph.settings:PredictSettings",
            "studies.scene_graph.prediction:main",
            required=_RUN,
        ),
        step_time=Command(
            "studies.scene_graph.settings:ObjectiveTimesSettings", "studies.scene_graph.task:step_time"
        ),
    ),
    "recommend": Task(
        train=Command(
            "recommend.settings:RecommendSettings",
            "recommend.training:main",
            "recommend items to users, from your own files",
            required=("train",),
        ),
        sweep=Command(
            "recommend.settings:SweepSettings",
            "recommend.sweep:main",
            "compare models, losses and seeds, with tuning",
        ),
        evaluate=Command("recommend.settings:EvaluateSettings", "recommend.training:evaluate", required=_RUN),
        predict=Command("recommend.settings:PredictSettings", "recommend.prediction:main", required=_RUN),
        step_time=Command(
            "recommend.settings:LossTimesSettings", "recommend.training:step_time", required=_RUN
        ),
    ),
}

BENCHMARKS = {
    "layer": Command(
        "bench.settings:read_layer",
        "bench.grid_benchmark:layer",
        "lml compared with softmax, topk, sort and a copy",
    ),
    "short": Command(
        "bench.settings:ShortRowsSettings",
        "bench.targets:short_rows",
        "many short rows, relative to softmax, with targets",
    ),
    "constrained": Command(
        "bench.settings:read_constrained",
        "bench.grid_benchmark:constrained",
        "related operators compared with softmax",
    ),
    "subsets": Command(
        "bench.settings:SubsetSettings",
        "bench.subsets:main",
        "the exact k-subset distribution and other methods",
    ),
    "balanced": Command(
        "bench.settings:BalancedSettings",
        "bench.targets:balanced",
        "balanced_lml relative to lml, with targets",
    ),
    "losses": Command(
        "bench.settings:LossesSettings",
        "bench.targets:losses",
        "the losses compared with cross-entropy, on fixed problems",
    ),
    "alternatives": Command(
        "bench.settings:read_alternatives",
        "bench.alternatives:main",
        "other differentiable top-k operators: cost and accuracy",
    ),
    "scale": Command(
        "bench.settings:ScaleSettings", "bench.scale:main", "many labels: time, memory, communication rounds"
    ),
    "training": Command(
        "bench.settings:TrainingSettings",
        "bench.scale:training",
        "train multilabel: speed and memory by samples and labels",
    ),
    "own-data": Command(
        "bench.settings:OwnDataSettings",
        "bench.own_data:main",
        "tagging: the default model compared with other packages",
    ),
    "paper": Command(
        "bench.settings:read_paper", "bench.paper:main", "the timing study of the paper, with its figure"
    ),
}

FIGURES = {
    "projection": Command(
        "figures.settings:ProjectionSettings",
        "figures.projection:projection",
        "ten logits through softmax, sigmoid and lml",
    ),
    "sliding-sigmoid": Command(
        "figures.settings:SlidingSigmoidSettings",
        "figures.projection:sliding_sigmoid",
        "animation: the sigmoid slides until its outputs sum to k",
    ),
    "polytopes": Command(
        "figures.settings:PolytopesSettings",
        "figures.geometry:polytopes",
        "the polytopes L(3,1), L(3,2) and L(4,2), with projections",
    ),
    "root-finding": Command(
        "figures.settings:RootFindingSettings",
        "figures.projection:root_finding",
        "how the threshold nu is bracketed and found",
    ),
    "entropies": Command(
        "figures.settings:EntropiesSettings",
        "figures.geometry:entropies",
        "the entropies that sigmoid, softmax and lml maximize",
    ),
    "which-relaxation": Command(
        "figures.settings:RelaxationsSettings",
        "figures.projection:which_relaxation",
        "the same logits through five top-k relaxations",
    ),
    "sets": Command(
        "figures.settings:SetsFigureSettings",
        "figures.geometry:sets",
        "distance of lml from exact inclusion probabilities",
    ),
    "benchmarks": Command(
        "figures.settings:BenchmarksFigureSettings",
        "bench.speed_report:benchmarks",
        "time relative to softmax against n, with tables",
    ),
    "bandwidth": Command(
        "figures.settings:BandwidthFigureSettings",
        "bench.speed_report:bandwidth",
        "speed of softmax and lml relative to a copy",
    ),
    "alternatives": Command(
        "figures.settings:AlternativesFigureSettings",
        "bench.alternatives:redraw",
        "other top-k operators: time and features",
    ),
    "timing": Command(
        "figures.settings:TimingFigureSettings",
        "bench.paper:timing_figure",
        "the timing study of the paper, from its CSV",
    ),
    "cifar100": Command(
        "figures.settings:NoiseFigureSettings",
        "figures.classification:by_noise",
        "accuracy against label noise, from a sweep",
    ),
    "multilabel": Command(
        "figures.settings:MultilabelFigureSettings",
        "figures.multilabel:main",
        "losses against the fraction of labels kept, from sweeps",
    ),
    "scene-graph": Command(
        "figures.settings:SceneGraphFigureSettings",
        "figures.scene_graph:by_epoch",
        "recall by epoch, from a sweep",
    ),
    "recommend": Command(
        "figures.settings:RecommendFigureSettings",
        "figures.multilabel:recommend",
        "recall by model and loss, from a sweep",
    ),
    "missing-labels": Command(
        "figures.settings:MissingLabelsFigureSettings",
        "figures.missing_labels:main",
        "one observed label per sample: mAP and Brier score by method",
    ),
    "scene-graph-bias": Command(
        "figures.settings:BiasFigureSettings",
        "figures.scene_graph:by_bias",
        "recall by type of frequency bias, from a sweep",
    ),
    "which-k": Command(
        "figures.settings:WhichKFigureSettings",
        "figures.classification:by_k",
        "the effect of a wrong k, from `torchlml which-k`",
    ),
}
ALL_FIGURES = Command("figures.settings:AllSettings", "commands:draw_all", "every figure whose CSV exists")

SINGLE = {
    "demo": Command("studies.settings:DemoSettings", "studies.digits.demo:main"),
    "which-k": Command("studies.settings:WhichKSettings", "studies.digits.which_k:main"),
    "routing": Command("studies.settings:RoutingSettings", "studies.routing:main"),
    "missing-labels": Command("studies.settings:MissingLabelsSettings", "studies.missing_labels.study:main"),
    "info": Command("info:read_arguments", "info:main"),
    "gpu-check": Command("gpu_check:read_arguments", "gpu_check.check_gpu:main"),
}
"""The commands that consist of a single word."""

SUMMARIES = {
    "demo": "compare five losses on digits with missing labels (one minute)",
    "which-k": "measure how a wrong value of k affects ranking and calibration",
    "routing": "compare routers for mixtures of experts (ten minutes)",
    "missing-labels": "compare losses with one observed label per sample (two hours)",
    "info": "show versions, kernels, threads, devices and extras",
    "gpu-check": "verify and time the Triton kernels on your GPU",
    "bench": "benchmark the layer, related operators and losses",
    "train": "train a model on your own files or on a study's data",
    "sweep": "run a grid of training runs in parallel and collect one CSV",
    "evaluate": "evaluate the best checkpoint of a run",
    "predict": "predict with the best checkpoint of a run",
    "export": "write the best checkpoint as an ONNX or PyTorch program",
    "step-time": "time a training step with each loss of a task",
    "figures": "draw the figures of the documentation and the studies",
}
"""All commands, in the order in which the help lists them."""

_CANNOT = {
    "evaluate": "which cannot be evaluated",
    "predict": "which does not support predictions",
    "export": "which cannot be exported",
    "step-time": "whose steps cannot be timed",
}


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a command of `SUMMARIES` with the arguments that followed it."""
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
    """Parse the options of a command, then import its module and call its function.

    Args:
        name: The command as typed, as in `train multilabel`.
        command: Its entry.
        arguments: The words after the name. Invalid options raise `BadInput`.
    """
    kind = _load(command.settings)
    if not isinstance(kind, type):
        settings = kind(arguments)
    elif issubclass(kind, TrainSettings):
        settings = read_settings(kind, name, arguments, _default(kind, command.required))
    else:
        settings = parse_settings(kind, name, arguments, _default(kind, command.required))
    _load(command.function)(settings)


def _default(kind: type[Any], required: Sequence[str]) -> Any:
    """Return the default settings, with required settings marked as missing."""
    import tyro  # imported here, because the list of commands is shown without it

    return dataclasses.replace(kind(), **dict.fromkeys(required, tyro.MISSING))


def draw_all(settings: AllSettings) -> None:
    """Draw all figures. An error in one of them is raised after the others are drawn."""
    from torchlml_lab.engine.output import new_console
    from torchlml_lab.plots import NotMadeYet

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
    """Complete a sentence about an unknown name with the most similar one, or with the full list."""
    near = did_you_mean(name, known)
    listed = ", ".join(one for one in known if not one.startswith("-"))
    return f"{said}{near}" if near else f"{said}: the {what} are {listed}."


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"torchlml_lab.{module}"), attribute)


def _choose(command: str, table: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Run the command that the first argument names, as in `torchlml train cifar100`."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        parts = "\n".join(f"  {part:<18}{entry.summary}" for part, entry in table.items())
        sys.stdout.write(f"usage: torchlml {command} NAME [OPTIONS]\n\nnames:\n{parts}\n")
    elif name in table:
        call(f"{command} {name}", table[name], arguments[1:])
    elif name.startswith("-"):
        names = ", ".join(table)
        raise BadInput(f"Missing NAME before `{name}`. `torchlml {command}` takes one of {names}.")
    else:
        raise BadInput(unknown(f"`torchlml {command}` has no `{name}`", name, "names", table))


def _ask_task(name: str, arguments: Sequence[str]) -> None:
    """Run a command on an existing run. The run directory is the first argument and records the task."""
    commands: dict[str, Command | None] = {
        task: getattr(entry, name.replace("-", "_")) for task, entry in TASKS.items()
    }
    first = arguments[0] if arguments else ""
    without_run = commands["scene-graph"]  # the only task whose data can be given by `--vg` or `--vrd`
    if name == "step-time" and first.startswith("--") and first != "--help" and without_run is not None:
        call(name, without_run, arguments)
        return
    run = first if first and not first.startswith("-") else None
    if {"-h", "--help"} & set(arguments) and (run is None or not (Path(run) / "run.json").exists()):
        task = commands.get(first)
        if task is not None:
            call(name, task, ["--help"])
        else:
            _explain(name, commands)
        return
    if run is None:
        raise BadInput(f"Missing RUN directory. Usage: `torchlml {name} RUN`.")
    path = Path(run) / "run.json"
    if not path.exists():
        raise BadInput(f"`{run}` is not a run directory. Create one with `torchlml train`.")
    experiment = read_json(path, dict).get("experiment")
    if not isinstance(experiment, str):
        raise BadInput(f"`{path}` is damaged: it does not name an experiment.")
    if experiment not in TASKS:
        raise BadInput(f"`{run}` is a run of `{experiment}`, which is not a task of this version.")
    command = commands[experiment]
    if command is None:
        able = ", ".join(task for task, one in commands.items() if one is not None)
        raise BadInput(
            f"`{run}` is a run of `{experiment}`, {_CANNOT[name]}: `torchlml {name}` is for runs of {able}."
        )
    call(name, command, arguments)


def _explain(name: str, commands: Mapping[str, Command | None]) -> None:
    """Print the options of every task without explanations, because without a run the task is unknown."""
    listed = []
    for task, command in commands.items():
        if command is not None:
            names = [option for option in options(_load(command.settings)()) if option != "--run"]
            width = shutil.get_terminal_size().columns
            first, others = f"  {task:<14}", " " * 16
            listed.append(
                textwrap.fill(" ".join(names), width, initial_indent=first, subsequent_indent=others)
            )
    about = f"{SUMMARIES[name][0].upper()}{SUMMARIES[name][1:]}. The options depend on the task of the run:"
    more = f"Run `torchlml {name} RUN --help` or `torchlml {name} TASK --help` to see their descriptions."
    parts = (f"usage: torchlml {name} RUN [OPTIONS]", folded(about), "\n".join(listed), folded(more))
    sys.stdout.write("\n\n".join(parts) + "\n")
