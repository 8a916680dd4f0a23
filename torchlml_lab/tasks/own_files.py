"""What the tasks of one's own files share: a run says first what was read, and what is odd about it."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from accelerate import PartialState
from rich.console import Console

from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.run import train
from torchlml_lab.engine.settings import TrainSettings

Settings = TypeVar("Settings", bound=TrainSettings)
Data = TypeVar("Data")


def train_on_files(
    experiment: str,
    settings: Settings,
    read: Callable[[Settings], Data],
    task: Callable[[Settings, Data], Task],
    introduction: Callable[[Settings, Data], Iterable[str]],
    console: Console,
) -> dict[str, Any]:
    """Train on files, as `engine.run.train` does, and say what was read before the first epoch.

    Args:
        experiment: The task's name.
        settings: Its settings.
        read: Reads the files that the settings name.
        task: Makes the task from what was read.
        introduction: What was read and what was chosen, in sentences.
        console: Where sentences, progress and results go.

    Returns:
        What `result.json` holds.
    """

    def build() -> Task:
        data = read(settings)
        built = task(settings, data)  # what cannot be trained is refused before anything is said
        if PartialState().is_main_process:
            say(introduction(settings, data), console)
        return built

    return train(experiment, settings, build, console)


def say(sentences: Iterable[str], console: Console) -> None:
    """Print sentences as they are: names in files may hold anything, also what rich would take for markup."""
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
