"""`torchlml evaluate RUN` for recommendation: recall, precision and nDCG, next to a popularity baseline."""

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console

from torchlml_lab import plots
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_folder
from torchlml_lab.multilabel.losses import loss_with_usual_k
from torchlml_lab.recommend.histories import Batch, Users, by_popularity, read_later
from torchlml_lab.recommend.model import TrainedRecommender, load
from torchlml_lab.recommend.ranking import KS, calibration, measures, of_network
from torchlml_lab.recommend.settings import EvaluateSettings

ROWS = 1024
PICTURE = "report.png"


def main(settings: EvaluateSettings) -> None:
    """Evaluate a run and print its tables."""
    out = settings.out or settings.run
    if settings.data is not None and settings.split is not None:
        raise BadInput("`--split` cannot be combined with `--data`.")
    check_folder("--out", out)
    own = settings.data is not None
    moved = {"train": settings.train} if own else {"train": settings.train, "test": settings.test}
    trained = load(settings.run, moved, with_test=not own)
    console = new_console()
    if settings.data is None:
        users, what = _of_split(trained, settings.split)
    else:
        have = trained.data.everything
        later, notes = read_later(settings.data, "--data", trained.settings.columns, have)
        users, what = Users(have, later), str(settings.data)
        say(notes, console)
    report(trained, users, what, out, Accelerator(cpu=settings.cpu), console)


def report_run(run: Path, console: Console) -> None:
    """Report on a finished run: on the test users if it has a test file, or else on the validation users."""
    trained = load(run, {})
    report(trained, *_of_split(trained, None), run, Accelerator(cpu=trained.settings.cpu), console)


def _of_split(trained: TrainedRecommender, split: str | None) -> tuple[Users, str]:
    """The users of a split and its name; by default the test split, if there is one."""
    splits = trained.data.splits
    name = split or list(splits)[-1]
    if name not in splits:
        raise BadInput("`--split test` requires a run that was trained with `--test`.")
    return splits[name], name


def report(
    trained: TrainedRecommender,
    users: Users,
    what: str,
    folder: Path,
    accelerator: Accelerator,
    console: Console,
) -> None:
    """Print the metrics of a run next to a popularity baseline, and plot recall and calibration.

    Args:
        trained: The run.
        users: The users with their histories and the items to find.
        what: The name of these users.
        folder: The directory of the plot.
        accelerator: Determines the device; only this process computes.
        console: The console to print to.
    """
    scores = {
        str(loss_with_usual_k(trained.settings.loss, trained.settings.k)): of_network(
            trained.model.to(accelerator.device)
        ),
        "popular items": by_popularity(trained.data.training),
    }
    with torch.no_grad(), ProgressBar(console) as progress:
        bar = progress.add_task("users", total=(len(scores) + 1) * len(users))

        def batches() -> Iterator[Batch]:
            for rows in torch.arange(len(users)).split(ROWS):
                yield send_to_device(users.__getitems__(rows.tolist()), accelerator.device)
                progress.advance(bar, len(rows))

        found = {name: measures(score, batches(), None, KS) for name, score in scores.items()}
        mean = len(users.labels) / len(users)
        bins = calibration(next(iter(scores.values())), batches(), mean)
    model, popular = (100 * values["recall@20"] for values in found.values())
    say(
        [
            f"Recall@20 is {model:.2f}% on {len(users)} users ({what}); recommending the most popular items "
            f"reaches {popular:.2f}%.",
            f"Model: {trained.settings.model}, epoch {trained.epoch}. All values are in percent.",
        ],
        console,
    )
    for measure in ("recall", "precision", "ndcg"):
        table = plain_table("", (measure, *(f"@{k}" for k in KS)))
        for name, values in found.items():
            table.add_row(name, *(f"{100 * values[f'{measure}@{k}']:.2f}" for k in KS))
        console.print(table)
    recalls = {name: {k: values[f"recall@{k}"] for k in KS} for name, values in found.items()}
    plots.draw_recall_and_calibration(
        recalls, bins, folder / PICTURE, title=f"Recall of {len(users)} users", rare=True
    )
    console.print(
        f"The run is in {trained.run}. Recall and calibration are plotted in {folder / PICTURE}.",
        soft_wrap=True,
        highlight=False,
    )
