"""The tasks by name, and the module that does for each what a command asks: a new task is an entry here."""

from typing import NamedTuple

from torchlml_lab.cli import Command


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
        train=Command(
            "torchlml_lab.studies.cifar100.classification", "top-5 classification under label noise"
        ),
        sweep=Command(
            "torchlml_lab.studies.cifar100.noise_sweep", "losses x noise levels x seeds, and tuning"
        ),
        evaluate="torchlml_lab.studies.cifar100.accuracy_report",
        step_time="torchlml_lab.studies.cifar100.loss_times",
    ),
    "multilabel": TaskCommands(
        train=Command(
            "torchlml_lab.multilabel.training", "the best labels of texts or features, from your file"
        ),
        sweep=Command(
            "torchlml_lab.multilabel.kept_labels_sweep", "losses x kept labels x seeds, and tuning"
        ),
        evaluate="torchlml_lab.multilabel.evaluation",
        predict="torchlml_lab.multilabel.prediction",
    ),
    "scene-graph": TaskCommands(
        train=Command(
            "torchlml_lab.studies.scene_graph.predicate_classification",
            "all relations of an image, on Visual Genome or VRD",
        ),
        sweep=Command("torchlml_lab.studies.scene_graph.method_sweep", "methods x seeds, and tuning"),
        evaluate="torchlml_lab.studies.scene_graph.recall_report",
        predict="torchlml_lab.studies.scene_graph.graph_prediction",
        step_time="torchlml_lab.studies.scene_graph.objective_times",
    ),
    "recommend": TaskCommands(
        train=Command("torchlml_lab.recommend.recommendation", "what users take next, from your own files"),
        sweep=Command("torchlml_lab.recommend.recommender_sweep", "models x losses x seeds, and tuning"),
        evaluate="torchlml_lab.recommend.ranking_report",
        predict="torchlml_lab.recommend.item_prediction",
        step_time="torchlml_lab.recommend.recommender_times",
    ),
}
