"""The commands that belong to a task (train, sweep, evaluate, predict, step-time), and the tasks by name."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchlml_lab.cli import Command, choose, run_function
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import read_json


class TaskCommands(NamedTuple):
    """The commands of a task; each names a module with `main(arguments)`, or is None."""

    train: Command
    sweep: Command | None = None
    evaluate: str | None = None
    """Called with the folder of a run first, as are the next two."""
    predict: str | None = None
    step_time: str | None = None


TASKS = {
    "cifar100": TaskCommands(
        train=Command("torchlml_lab.studies.cifar100.task", "top-5 classification under label noise"),
        sweep=Command("torchlml_lab.studies.cifar100.sweep", "losses x noise levels x seeds, and tuning"),
        evaluate="torchlml_lab.studies.cifar100.report",
        step_time="torchlml_lab.studies.cifar100.report:step_time",
    ),
    "multilabel": TaskCommands(
        train=Command(
            "torchlml_lab.multilabel.training", "the best labels of texts or features, from your file"
        ),
        sweep=Command("torchlml_lab.multilabel.sweep", "losses x kept labels x seeds, and tuning"),
        evaluate="torchlml_lab.multilabel.report",
        predict="torchlml_lab.multilabel.prediction",
    ),
    "scene-graph": TaskCommands(
        train=Command(
            "torchlml_lab.studies.scene_graph.task",
            "all relations of an image, on Visual Genome or VRD",
        ),
        sweep=Command("torchlml_lab.studies.scene_graph.sweep", "methods x seeds, and tuning"),
        evaluate="torchlml_lab.studies.scene_graph.report",
        predict="torchlml_lab.studies.scene_graph.prediction",
        step_time="torchlml_lab.studies.scene_graph.report:step_time",
    ),
    "recommend": TaskCommands(
        train=Command("torchlml_lab.recommend.training", "what users take next, from your own files"),
        sweep=Command("torchlml_lab.recommend.sweep", "models x losses x seeds, and tuning"),
        evaluate="torchlml_lab.recommend.report",
        predict="torchlml_lab.recommend.prediction",
        step_time="torchlml_lab.recommend.training:step_time",
    ),
}


def ask_task(command: str, modules: Mapping[str, str | None], cannot: str, arguments: Sequence[str]) -> None:
    """Hand a command to the task that made the run.

    Args:
        command: The command, as in `torchlml evaluate`.
        modules: For each task the module with `main(arguments)`; None where the task cannot do it.
        cannot: Why such a task cannot, as in "which has nothing to draw".
        arguments: What followed the command; the folder of the run comes first.
    """
    run = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if {"-h", "--help"} & set(arguments) and (run is None or not (Path(run) / "run.json").exists()):
        _explain(modules)
        return
    if run is None:
        raise BadInput(
            f"`torchlml {command}` needs the folder of a run, and first: `torchlml {command} RUN`."
        )
    experiment = read_json(Path(run) / "run.json", dict).get("experiment")
    if experiment not in TASKS:
        raise BadInput(f"`{run}` is a run of `{experiment}`, which is no task of this version.")
    module = modules[experiment]
    if module is None:
        able = ", ".join(name for name, one in modules.items() if one is not None)
        raise BadInput(
            f"`{run}` is a run of `{experiment}`, {cannot}: `torchlml {command}` is for runs of {able}."
        )
    run_function(module, arguments)


def _explain(modules: Mapping[str, str | None]) -> None:
    """Print the help of every task, since without a run there is none to choose by."""
    for name, module in modules.items():
        if module is not None:
            sys.stdout.write(f"of a run of {name}:\n")
            try:
                run_function(module, ["--help"])
            except SystemExit:  # after `--help`
                sys.stdout.write("\n")


def train(arguments: Sequence[str]) -> None:
    """Train the task that is named first in the arguments."""
    choose("train", {name: task.train for name, task in TASKS.items()}, arguments)


def sweep(arguments: Sequence[str]) -> None:
    """Run the grid of the task that is named first in the arguments."""
    choose("sweep", {name: task.sweep for name, task in TASKS.items() if task.sweep}, arguments)


def evaluate(arguments: Sequence[str]) -> None:
    """Ask the task that made the run."""
    modules = {name: task.evaluate for name, task in TASKS.items()}
    ask_task("evaluate", modules, "which has nothing to measure", arguments)


def predict(arguments: Sequence[str]) -> None:
    """Ask the task that made the run."""
    modules = {name: task.predict for name, task in TASKS.items()}
    ask_task("predict", modules, "which has nothing to draw", arguments)


WITHOUT_RUN = "scene-graph"
"""The task whose `step-time` needs no run: its data are named by `--vg` or `--vrd`."""


def step_time(arguments: Sequence[str]) -> None:
    """Ask the task that made the run; without a run, that of scene graphs."""
    modules = {name: task.step_time for name, task in TASKS.items()}
    module = modules[WITHOUT_RUN]
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help" and module is not None:
        run_function(module, arguments)
    else:
        ask_task("step-time", modules, "which has nothing to time", arguments)
