"""Models that score items for users, and functions that load trained models."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding_bag, linear, normalize

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions
from torchlml_lab.engine import run_directory
from torchlml_lab.files import read_record
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.recommend.histories import Batch, Data, Users, read
from torchlml_lab.recommend.item_weights import ItemWeights, Scores
from torchlml_lab.recommend.ranking import ROWS, fit_scale, measures, of_network, split
from torchlml_lab.recommend.settings import ClosedForm, RecommendSettings


class Factors(NamedTuple):
    """The inputs, weight and bias of the last linear layer, whose outputs are the scores of all items."""

    hidden: Tensor
    """(R, d), one vector per user."""
    weight: Tensor
    """(n, d), one vector per item."""
    bias: Tensor
    """(n,)."""

    def scores(self) -> Tensor:
        """Return the score of every item, (R, n)."""
        return linear(self.hidden, self.weight, self.bias)


class Graph(NamedTuple):
    """The bipartite graph of users and items. Its edges are stored twice, sorted by user and sorted by item.

    The weight of an edge is `1 / sqrt(items of the user * users of the item)`.
    """

    user_starts: Tensor
    items: Tensor
    user_weights: Tensor
    item_starts: Tensor
    users: Tensor
    item_weights: Tensor


def graph(have: Interactions) -> Graph:
    """Return the graph whose edges are the given user-item pairs."""
    popularity = torch.bincount(have.item, minlength=len(have.items))
    weights = (have.counts[have.user] * popularity[have.item]).float().rsqrt()
    order = have.item.argsort(stable=True)
    starts = popularity.cumsum(0) - popularity
    return Graph(have.starts[:-1], have.item, weights, starts, have.user[order], weights[order])


class _Propagation(torch.autograd.Function):
    """`propagate` as an autograd function. It is a symmetric linear map, so `backward` also calls it."""

    @staticmethod
    def forward(ctx: Any, user: Tensor, item: Tensor, pairs: Graph, layers: int) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.layers = pairs, layers
        return propagate(user, item, pairs, layers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        user, item = gradients
        return *propagate(user, item, ctx.pairs, ctx.layers), None, None


def propagate(user: Tensor, item: Tensor, pairs: Graph, layers: int) -> tuple[Tensor, Tensor]:
    """Compute the graph convolution of LightGCN: the mean of `A^l E` over l = 0, ..., `layers`.

    E consists of the user and item vectors, and A is the normalized adjacency matrix of the graph.

    Args:
        user: (users, d), the user vectors.
        item: (items, d), the item vectors.
        pairs: The graph.
        layers: The number of layers.

    Returns:
        The mean vectors of users and of items.
    """
    users, items = user.clone(), item.clone()
    for _ in range(layers):
        user, item = (
            _weighted_sums(item, pairs.items, pairs.user_starts, pairs.user_weights),
            _weighted_sums(user, pairs.users, pairs.item_starts, pairs.item_weights),
        )
        users += user
        items += item
    return users / (layers + 1), items / (layers + 1)


def _weighted_sums(vectors: Tensor, places: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    return embedding_bag(places, vectors, starts, mode="sum", per_sample_weights=weights.to(vectors.dtype))


class MatrixFactorization(nn.Module):
    """Matrix factorization. A score is the cosine of a user and an item vector, divided by a temperature.

    Args:
        users: The number of users.
        items: The number of items.
        dimension: The dimension of the vectors.
        temperature: The temperature, greater than 0. Published models use about 0.1.
        level: The initial value of a learned constant that is added to all scores. It should be about
            the log-odds that a random user has a random item. It does not affect lml and softmax, but without
            it, bce would take at least an epoch to learn the constant.
        pairs: The graph of the training data, which is required if `layers` is greater than 0.
        layers: The number of graph layers, as in LightGCN.

    With graph layers, the model can also score new users. The vector of a new user is a weighted sum of the
    vectors of the user's items.
    """

    def __init__(
        self,
        users: int,
        items: int,
        dimension: int,
        temperature: float,
        level: float,
        pairs: Graph | None = None,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.temperature, self.layers = temperature, layers
        self.level = nn.Parameter(torch.tensor(level))
        self.user = nn.Parameter(torch.randn(users, dimension) * 0.1)
        self.item = nn.Parameter(torch.randn(items, dimension) * 0.1)
        for name, values in (pairs._asdict() if pairs is not None and layers else {}).items():
            self.register_buffer(f"graph_{name}", values, persistent=False)
        self.final: tuple[Tensor, Tensor] | None = None

    def train(self, mode: bool = True) -> "MatrixFactorization":
        """Set the mode, and discard the vectors that were cached during evaluation."""
        self.final = None
        return super().train(mode)

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the normalized vectors of all users and items, after the graph layers."""
        if self.final is not None:
            return self.final
        user, item = self.user, self.item
        if self.layers:
            user, item = _Propagation.apply(user, item, self._graph(), self.layers)
        found = normalize(user), normalize(item)
        if not self.training and not torch.is_grad_enabled():
            self.final = found
        return found

    def _graph(self) -> Graph:
        return Graph(*(self.get_buffer(f"graph_{name}") for name in Graph._fields))

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """Return the factors for users (R,), given by index. A new user has the index -1 and a `history`."""
        user, item = self.vectors()
        hidden = user[users.clamp(min=0)]
        if (users < 0).any():
            hidden = torch.where((users < 0)[:, None], self._new_users(history), hidden)
        return Factors(hidden / self.temperature, item, self.level.expand(len(item)))

    def _new_users(self, history: Tensor) -> Tensor:
        """Return the vectors of users who are not in the training data. Without graph layers, they are 0."""
        if not self.layers:
            return self.user.new_zeros(len(history), self.user.shape[1])
        pairs = self._graph()
        _, sent = propagate(self.user, self.item, pairs, self.layers - 1)
        popularity = torch.bincount(pairs.items, minlength=len(sent))
        there = history != PADDING
        counts = there.sum(-1)
        share = popularity.clamp(min=1).to(sent.dtype).rsqrt()[history[there]]
        return normalize(_weighted_sums(sent, history[there], counts.cumsum(0) - counts, share))


class Autoencoder(nn.Module):
    """An autoencoder with one hidden layer that maps a user's items to a score for every item, like Mult-DAE.

    Args:
        items: The number of items.
        dimension: The size of the hidden layer.
        dropout: The probability that an item is dropped from the input during training.
        level: The initial bias of every score, as for `MatrixFactorization`.

    Scores depend only on the history, so the model can score users who are not in the training data.
    """

    def __init__(self, items: int, dimension: int, dropout: float, level: float) -> None:
        super().__init__()
        self.dropout = dropout
        # The input has norm 1 for any number of items. At the start, the hidden layer therefore has a norm of
        # about 1, and all scores are close to `level`.
        self.encoder = nn.Parameter(torch.randn(items, dimension) / dimension**0.5)
        self.encoder_bias = nn.Parameter(torch.zeros(dimension))
        self.decoder = nn.Parameter(torch.randn(items, dimension) / dimension)
        self.decoder_bias = nn.Parameter(torch.full((items,), level))

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """Return the factors for histories (R, L), padded with `PADDING`. `users` is not used."""
        there = history != PADDING
        counts = there.sum(-1)
        starts = counts.cumsum(0) - counts
        share = counts.clamp(min=1).to(self.encoder.dtype).rsqrt().repeat_interleave(counts)
        share = dropout(share, self.dropout, self.training)
        summed = embedding_bag(history[there], self.encoder, starts, mode="sum", per_sample_weights=share)
        return Factors(torch.tanh(summed + self.encoder_bias), self.decoder, self.decoder_bias)


class Mixture(nn.Module):
    """A weighted sum of the scores of multiple models.

    Args:
        models: The models by name.
        factors: The factors by which the scores of the models are multiplied, by name.
    """

    def __init__(self, models: Mapping[str, nn.Module], factors: Mapping[str, float]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)
        self.factors = dict(factors)

    def forward(self, users: Tensor, history: Tensor) -> Scores:
        """Return the scores for users by index (R,), with -1 for new users, and their histories (R, L)."""
        parts = (
            self.factors[name] * model(users, history).scores().float() for name, model in self.models.items()
        )
        first = next(parts)
        for part in parts:
            first = first + part
        return Scores(first)


def scores_new_users(model: nn.Module) -> bool:
    """Whether a model can score users who are not in the training data, from their items."""
    if isinstance(model, Mixture):
        return any(map(scores_new_users, model.models.children()))
    return not isinstance(model, MatrixFactorization) or model.layers > 0


EXPERIMENT = "recommend"
CHOICE = "choice.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The models that are chosen for a run with `--model auto`, and their weights in the mixture."""

    weights: dict[str, float]
    """The weight of each model, after all scores have been rescaled to be comparable. The sum is 1."""
    factors: dict[str, float]
    """The factor by which each model's original scores are multiplied."""

    def in_words(self) -> str:
        """Return a sentence about the models and their weights."""
        if len(self.weights) == 1:
            return f"The best model on the validation users is `{next(iter(self.weights))}`."
        parts = ", ".join(f"{100 * weight:g}% `{name}`" for name, weight in self.weights.items())
        return f"The best model on the validation users is a mixture: {parts}."


def network(settings: RecommendSettings, data: Data) -> nn.Module:
    """Return a newly initialized network, with a buffer that contains the fingerprint of its data."""
    training = data.training
    users, items = len(training.users), len(training.items)
    level = math.log(len(training) / (int((training.counts > 0).sum()) * items))
    model: nn.Module
    if settings.model in get_args(ClosedForm):
        model = ItemWeights(items)
    elif settings.model == "autoencoder":
        model = Autoencoder(items, settings.dimension, settings.dropout, level)
    else:
        model = MatrixFactorization(
            users, items, settings.dimension, settings.temperature, level, graph(training), settings.layers
        )
    model.register_buffer("fingerprint", torch.tensor(data.fingerprint))
    return model


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The candidate weights for each model."""


def _given(scores: Tensor, _: Batch) -> Tensor:
    return scores


def choose(models: Mapping[str, nn.Module], users: Users, metric: str) -> Choice:
    """Choose the weights of the models by a metric on users with held-out items.

    First, rescale each model's scores by the factor that maximizes the likelihood of the held-out items under
    a softmax, so that the scores of different models are comparable. Then try all weights in steps of a
    quarter. If several choices have the same value of the metric, prefer the one with the fewest models.

    Args:
        models: The trained models by name.
        users: The validation users.
        metric: The metric, such as `recall@20`.

    Returns:
        The weights and score factors of the models with nonzero weight.
    """
    scales = {name: fit_scale(of_network(model), users) for name, model in models.items()}
    weights = [one for one in product(SHARES, repeat=len(models)) if math.isclose(sum(one), 1.0)]
    weights.sort(key=lambda one: sum(weight > 0 for weight in one))

    ks = (int(metric.partition("@")[2]),)
    values = [0.0] * len(weights)
    # A metric is a mean over users, so it can be accumulated over groups of users. Each group is scored once.
    for batch in users.batches(ROWS):
        for part in split(batch, ROWS):
            scores = torch.stack(
                [scales[name] * of_network(model)(part).float() for name, model in models.items()]
            )
            for place, one in enumerate(weights):
                mixed = torch.tensordot(torch.tensor(one), scores, 1)
                ranked = measures(partial(_given, mixed), [part], None, ks)
                values[place] += ranked[metric] * len(part.users) / len(users)
    best = dict(zip(models, weights[values.index(max(values))], strict=True))
    chosen = {name: weight for name, weight in best.items() if weight}
    factors = {name: weight * scales[name] for name, weight in chosen.items()}
    scale = fit_scale(of_network(Mixture({name: models[name] for name in factors}, factors)), users)
    return Choice(chosen, {name: scale * factor for name, factor in factors.items()})


class TrainedRecommender(NamedTuple):
    """A trained model, with the settings and data of its run."""

    run: Path
    settings: RecommendSettings
    data: Data
    model: nn.Module
    epoch: int


def load(run: Path, moved: dict[str, Path | None], with_test: bool = True) -> TrainedRecommender:
    """Load a run.

    Args:
        run: The run directory.
        moved: The new paths of `train` and `test`. None means that a file has not moved.
        with_test: Whether to read the test file. If False, the file may be missing.

    Returns:
        The run. If a file is missing or the training data has changed, `BadInput` is raised.
    """
    settings = run_directory.read_moved(RecommendSettings, run, moved)
    if settings.model == "auto":
        run_directory.RunFolder(run, EXPERIMENT).check()
        if not (run / CHOICE).exists():
            raise BadInput(f"The run `{run}` is not finished. Resume it with `--resume {run}`.")
        choice: Choice | None = read_record(run / CHOICE, Choice)
    else:
        choice = None
        run_directory.find_best_epoch(EXPERIMENT, run)  # an invalid run raises here, before the data is read
    data = read(settings if with_test or settings.test is None else dataclasses.replace(settings, test=None))
    if choice is None:
        model, epoch = load_network(run, settings, data)
        return TrainedRecommender(run, settings, data, model, epoch)
    return TrainedRecommender(run, settings, data, *load_mixture(run, settings, data, choice))


def load_network(run: Path, settings: RecommendSettings, data: Data) -> tuple[nn.Module, int]:
    """Return the network from a run's best epoch, and that epoch."""
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    model = network(settings, data)
    best.load(model)
    if int(model.get_buffer("fingerprint")) != data.fingerprint:
        raise BadInput(f"The model in `{run}` was trained on different data than `{settings.train}`.")
    return model, best.epoch


def load_mixture(run: Path, settings: RecommendSettings, data: Data, choice: Choice) -> tuple[Mixture, int]:
    """Return the mixture of a run with `--model auto`, and the epoch of the model with the largest weight."""
    models, epochs = {}, {}
    for name in choice.factors:
        own = run_directory.read_moved(RecommendSettings, run / name, {"train": settings.train})
        models[name], epochs[name] = load_network(run / name, own, data)
    largest = max(choice.weights, key=lambda name: choice.weights[name])
    return Mixture(models, choice.factors).eval(), epochs[largest]
