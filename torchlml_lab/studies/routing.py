"""`torchlml routing`: train a small character-level model with a mixture of experts, once per router."""

import functools
import pydoc_data.topics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import torchlml
from torchlml_lab import plots
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, StudyTable, markdown_table, new_console, plain_table
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.files import check_file, check_picture, replacing
from torchlml_lab.studies.settings import RoutingSettings

Routed = tuple[Tensor, Tensor, Tensor]


class TopK(nn.Module):
    """Choose the experts with the k largest softmax probabilities, and return an auxiliary balancing loss.

    The weights are the k probabilities, scaled to sum to 1. The loss is that of the Switch Transformer
    (Fedus, Zoph and Shazeer, 2022): alpha * n * sum_j f_j * P_j, where n is the number of experts, f_j is
    the fraction of assignments to expert j, and P_j is its mean probability.
    """

    def __init__(self, experts: int, k: int, alpha: float = 0.0) -> None:
        super().__init__()
        self.experts, self.k, self.alpha = experts, k, alpha

    def forward(self, logits: Tensor) -> Routed:
        p = logits.softmax(-1)
        weights, indices = p.topk(self.k)
        share = torch.bincount(indices.flatten(), minlength=self.experts) / indices.numel()
        loss = self.alpha * self.experts * (share * p.mean(0)).sum()
        return weights / weights.sum(-1, keepdim=True), indices, loss


class LossFree(nn.Module):
    """Choose experts by sigmoid scores plus biases that balance the load (Wang et al., 2024).

    In each training step, the bias of an expert increases by `rate` if the expert received fewer tokens than
    average, and decreases by `rate` if it received more. The biases affect only the choice of experts. The
    weights are the sigmoid scores of the chosen experts, scaled to sum to 1.
    """

    bias: Tensor

    def __init__(self, experts: int, k: int, rate: float) -> None:
        super().__init__()
        self.experts, self.k, self.rate = experts, k, rate
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, logits: Tensor) -> Routed:
        scores = logits.sigmoid()
        indices = (scores.detach() + self.bias).topk(self.k).indices
        if self.training:
            load = torch.bincount(indices.flatten(), minlength=self.experts).float()
            self.bias += self.rate * torch.sign(load.mean() - load)
        weights = scores.gather(-1, indices)
        return weights / weights.sum(-1, keepdim=True), indices, logits.new_zeros(())


class Sinkhorn(nn.Module):
    """Choose experts by a balanced transport plan in training, and by the logits at inference.

    The plan comes from Sinkhorn iterations (S-BASE, Clark et al., 2022). If it is scaled so that the entries
    of each token sum to k, some entries may exceed 1, although a token can use an expert only once. The
    weights are the softmax probabilities of the chosen experts, scaled to sum to 1.
    """

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.experts, self.k = experts, k

    def forward(self, logits: Tensor) -> Routed:
        order = logits.detach()
        if self.training:
            order = order + self._column_potential(order)
        indices = order.topk(self.k).indices
        weights = logits.softmax(-1).gather(-1, indices)
        return weights / weights.sum(-1, keepdim=True), indices, logits.new_zeros(())

    def _column_potential(self, logits: Tensor) -> Tensor:
        """Return the logarithms of the column scaling factors.

        The iteration stops when the relative error of the column sums is below 0.01, or after 100 steps.
        """
        tokens, experts = logits.shape
        v = logits.new_zeros(experts)
        for _ in range(100):
            sums = (logits + v).log_softmax(-1).logsumexp(0) + torch.log(torch.tensor(experts / tokens))
            v = v - sums
            if float(sums.abs().max()) < 0.01:
                break
        return v


class Balanced(nn.Module):
    """Route with `torchlml.TopKRouter`, which does not need an auxiliary loss."""

    def __init__(self, experts: int, k: int, temperature: float) -> None:
        super().__init__()
        self.router = torchlml.TopKRouter(experts, k, temperature=temperature)

    def forward(self, logits: Tensor) -> Routed:
        weights, indices, _ = self.router(logits)
        return weights, indices, logits.new_zeros(())


ROUTERS: dict[str, Callable[[int, int], nn.Module]] = {
    "no balancing": TopK,
    "auxiliary loss, 0.01": lambda n, k: TopK(n, k, 0.01),
    "auxiliary loss, 0.1": lambda n, k: TopK(n, k, 0.1),
    "auxiliary loss, 1": lambda n, k: TopK(n, k, 1.0),
    "loss-free bias, 0.001": lambda n, k: LossFree(n, k, 0.001),
    "loss-free bias, 0.01": lambda n, k: LossFree(n, k, 0.01),
    "loss-free bias, 0.1": lambda n, k: LossFree(n, k, 0.1),
    "Sinkhorn": Sinkhorn,
    "TopKRouter, T = 1": lambda n, k: Balanced(n, k, 1.0),
    "TopKRouter, T = 0.1": lambda n, k: Balanced(n, k, 0.1),
    "TopKRouter, T = 0.01": lambda n, k: Balanced(n, k, 0.01),
}


EXPERTS, K = 16, 2
WIDTH, HIDDEN, CONTEXT = 64, 64, 64


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Return Python's help texts as training and validation data, and the number of distinct characters.

    The texts are part of Python, so nothing is downloaded. The last tenth of each topic is used for
    validation. Each character is represented by an integer.
    """
    topics = [str(topic) for _, topic in sorted(pydoc_data.topics.topics.items())]
    number = {character: i for i, character in enumerate(sorted(set("".join(topics))))}
    parts: tuple[list[int], list[int]] = ([], [])
    for topic in topics:
        cut = len(topic) * 9 // 10
        for part, piece in zip(parts, (topic[:cut], topic[cut:]), strict=True):
            part.extend(number[character] for character in piece)
    return torch.tensor(parts[0]), torch.tensor(parts[1]), len(number)


def batch(data: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random excerpts, and the same excerpts shifted by one character."""
    starts = torch.randint(len(data) - CONTEXT, (size, 1), generator=generator)
    excerpts = data[starts + torch.arange(CONTEXT + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]


class Experts(nn.Module):
    """The experts, which are two-layer networks. Each token uses K of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        token = order // K
        sizes = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        parts = x[token].split(sizes)
        out = [F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        return torch.zeros_like(x).index_add(0, token, torch.cat(out) * weights.flatten()[order, None])


class Model(nn.Module):
    """A next-character model with causal attention and a mixture of experts."""

    def __init__(self, router: str, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.before, self.between, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.router, self.experts = ROUTERS[router](EXPERTS, K), Experts()
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, characters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return next-character logits, the load of each expert (1 is a fair share), and the router loss."""
        x = self.embedding(characters) + self.position
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(self.before(x)).chunk(3, -1)
        ]
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        tokens = self.between(x).flatten(0, 1)
        weights, indices, loss = self.router(self.gate(tokens))
        x = x + self.experts(tokens, weights, indices).view_as(x)
        load = torch.bincount(indices.flatten(), minlength=EXPERTS) * (EXPERTS / indices.numel())
        return self.head(self.after(x)), load, loss


HEADS = ("router", "seeds", "validation loss", "load", "largest load", "validation load", "ms per step")
_COLORS = {
    "no balancing": plots.GREY,
    "auxiliary loss": plots.ORANGE,
    "loss-free bias": plots.GREEN,
    "Sinkhorn": plots.PURPLE,
    "TopKRouter": plots.BLUE,
}


@dataclass(frozen=True)
class RoutingRecord:
    """The metrics for one interval of a run. Each run has 20 intervals of equal length."""

    router: str
    seed: int
    steps: int
    learning_rate: float
    step: int
    """The last step of the interval."""
    loss: float
    """The mean training loss in the interval, in nats per character, without the router loss."""
    load: float
    """The load of the busiest expert, averaged over the steps of the interval; 1 is a fair share."""
    worst_load: float
    """The largest load of an expert in any step of the interval."""
    validation_loss: float
    """The validation loss after the last step of the interval."""
    validation_load: float
    """The load of the busiest expert on the validation data."""
    milliseconds: float
    """The median duration of a training step."""
    seconds: float
    """The time since the start of the run."""


def _look(router: str) -> dict[str, Any]:
    """Return the plot style of a router: the color shows its method, and the line style its setting."""
    method = router.split(",")[0]
    settings = [name for name in ROUTERS if name.split(",")[0] == method]
    style = ("-", "--", ":")[settings.index(router)]
    return {"color": _COLORS[method], "linestyle": style}


def draw(rows: Sequence[RoutingRecord], picture: Path, csv: Path) -> None:
    """Plot the validation loss minus that of the first router, and the load of the busiest expert.

    All values are means over the seeds.

    Args:
        rows: The records of all runs.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    panels = {
        "validation_loss": f"validation loss − {next(iter(ROUTERS))}",
        "load": "busiest expert, training",
        "validation_load": "busiest expert, inference",
    }
    with plots.new_figure(picture, plots.PAGE, 3.0, [csv]) as figure:
        for axes, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            baseline: dict[int, float] = {}
            for router in ROUTERS:
                own = [row for row in rows if row.router == router]
                steps = sorted({row.step for row in own})
                means = {step: mean(getattr(row, name) for row in own if row.step == step) for step in steps}
                if name == "validation_loss":
                    baseline = baseline or means
                    means = {
                        step: value - baseline[step] for step, value in means.items() if step in baseline
                    }
                if means:
                    axes.plot(means.keys(), means.values(), label=router, linewidth=1.2, **_look(router))
            axes.set_title(title, fontsize=8.5)
            axes.set_xlabel("step")
            axes.grid()
            if "load" in name:
                axes.set_yscale("log", base=2)
                axes.set_ylim(bottom=1)
                ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick <= axes.get_ylim()[1]]
                axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
                axes.minorticks_off()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def lines(rows: Sequence[RoutingRecord]) -> Iterable[tuple[str, ...]]:
    """Yield a table row for each router: final loss, loads in the second half of training, time per step."""
    for router in ROUTERS:
        own = [row for row in rows if row.router == router]
        if not own:
            continue
        last = max(row.step for row in own)
        late = [row for row in own if row.step > last / 2]
        final = [row.validation_loss for row in own if row.step == last]
        deviation = f" ±{stdev(final):.3f}" if len(final) > 1 else ""
        yield (
            router,
            str(len(final)),
            f"{mean(final):.3f}{deviation}",
            f"{mean(row.load for row in late):.2f}",
            f"{max(row.worst_load for row in late):.2f}",
            f"{mean(row.validation_load for row in late):.2f}",
            f"{mean(row.milliseconds for row in own):.1f}",
        )


def write_page(rows: Sequence[RoutingRecord], page: Path) -> None:
    """Write the table as Markdown."""
    title = (
        "The table shows the final validation loss in nats per character (mean ± standard deviation over "
        "seeds). Loads are those of the busiest expert during the second half of training, where 1 is a fair "
        'share. "Load" is the mean over steps, "largest load" is the maximum over steps, and '
        '"validation load" is the mean over validation passes, in which the router runs in inference mode.'
    )
    with replacing(page) as temporary:
        temporary.write_text(markdown_table(title, HEADS, lines(rows)) + "\n", encoding="utf-8")


INTERVALS = 20  # per run; the CSV has one row per interval


TABLE = StudyTable(RoutingRecord, lambda row: (list(ROUTERS).index(row.router), row.seed, row.step))


def main(settings: RoutingSettings) -> None:
    """Train the models that are not in the CSV yet, print and write the table, and draw the figure."""
    for name, least in (("seeds", 1), ("steps", INTERVALS)):
        if getattr(settings, name) < least:
            raise BadInput(f"`--{name}` must be at least {least}, but it is {getattr(settings, name)}.")
    if settings.steps % INTERVALS:
        raise BadInput(f"`--steps` must be a multiple of {INTERVALS}, but it is {settings.steps}.")
    if not 0 < settings.learning_rate < 1:
        raise BadInput(f"`--learning-rate` must be between 0 and 1, but it is {settings.learning_rate}.")
    check_file("--csv", settings.csv)
    check_picture(settings.out)
    console = new_console()
    rows = train_all(settings, console)
    table = plain_table("Means over seeds (maximum for the largest load); a load of 1 is a fair share", HEADS)
    for line in lines(rows):
        table.add_row(*line)
    console.print(table)
    draw(rows, settings.out, settings.csv)
    write_page(rows, settings.out.with_suffix(".md"))
    console.print(f"The results are in {settings.csv}, and the figure is in {settings.out}.", soft_wrap=True)


def train_all(settings: RoutingSettings, console: Console) -> list[RoutingRecord]:
    """Train the models that are not in the CSV yet, and return all records. Each run updates the CSV."""
    rows = TABLE.read(settings.csv, "--csv") if settings.csv.exists() else []
    if any((row.steps, row.learning_rate) != (settings.steps, settings.learning_rate) for row in rows):
        raise BadInput(
            f"`{settings.csv}` (`--csv`) contains runs with different settings: `--steps` and "
            "`--learning-rate` must be the same for all runs."
        )
    done = {(row.router, row.seed) for row in rows}
    # The seed varies slowest, so that an interrupted study has results for all routers.
    todo = [(name, seed) for seed in range(settings.seeds) for name in ROUTERS if (name, seed) not in done]
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    with ProgressBar(console) as progress, use_threads(1):
        task = progress.add_task("runs", total=len(todo))
        for number, (name, seed) in enumerate(todo):
            try:
                rows += train(name, seed, settings)
            except KeyboardInterrupt:
                said = f"Interrupted after {number} of {len(todo)} runs. Repeat the command to continue."
                raise KeyboardInterrupt(said) from None
            TABLE.write(settings.csv, rows)
            progress.advance(task)
    return rows


def train(name: str, seed: int, settings: RoutingSettings) -> list[RoutingRecord]:
    """Train one model, and return its records."""
    learn, validate, characters = text()
    torch.manual_seed(seed)  # the same seed gives every router the same initial weights and batches
    model, generator = Model(name, characters), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    held_out = batch(validate, 128, torch.Generator().manual_seed(0))
    rows, began, interval = [], time.monotonic(), settings.steps // INTERVALS
    losses, loads, times = [], [], []
    for step in range(1, settings.steps + 1):
        inputs, targets = batch(learn, 32, generator)
        start = time.perf_counter()
        logits, load, extra = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + extra).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        loads.append(float(load.max()))
        if step % interval == 0:
            model.eval()
            with torch.no_grad():
                logits, load, _ = model(held_out[0])
                validation = F.cross_entropy(logits.flatten(0, 1), held_out[1].flatten()).item()
            model.train()
            rows.append(
                RoutingRecord(
                    *(name, seed, settings.steps, settings.learning_rate, step),
                    *(mean(losses), mean(loads), max(loads), validation, float(load.max()), median(times)),
                    time.monotonic() - began,
                )
            )
            losses, loads, times = [], [], []
    return rows
