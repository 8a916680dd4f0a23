"""Commands of a run, whichever task made it: the folder says which, and the task's module does the rest."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchlml_lab.errors import BadInput
from torchlml_lab.files import read_json
from torchlml_lab.tasks import TASKS


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
    path = Path(run) / "run.json"
    experiment = read_json(path, dict).get("experiment")
    if not isinstance(experiment, str):
        raise BadInput(f"`{path}` is damaged: it does not name an experiment.")
    if experiment not in TASKS:
        raise BadInput(f"`{run}` is a run of `{experiment}`, which is no task of this version.")
    module = modules[experiment]
    if module is None:
        able = ", ".join(name for name, one in modules.items() if one is not None)
        raise BadInput(
            f"`{run}` is a run of `{experiment}`, {cannot}: `torchlml {command}` is for runs of {able}."
        )
    importlib.import_module(module).main(arguments)


def _explain(modules: Mapping[str, str | None]) -> None:
    """Print the help of every task, since without a run there is none to choose by."""
    for name, module in modules.items():
        if module is not None:
            sys.stdout.write(f"of a run of {name}:\n")
            try:
                importlib.import_module(module).main(["--help"])
            except SystemExit:  # after `--help`
                sys.stdout.write("\n")
