"""MotifNet-LeftRight (Zellers et al. 2018) for predicate classification with given boxes and object labels.

This module also computes the network's frequency bias, which depends on how often each predicate connects
two object classes, and reads word vectors for the initial object embeddings.
"""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.scene_graph.graphs import Batch, SceneGraphs, candidates

GRID = 8  # cells per side of the masks
POSITION = 128


class MotifNet(nn.Module):
    """A network that scores every predicate for every candidate edge (ordered pair of boxes) in a batch.

    Args:
        objects: The number of object classes.
        outputs: The number of scores per edge: one per predicate, and one for "no relation" if needed.
        bias: (objects, objects, outputs), the initial frequency bias, or None for no bias.
        vectors: (objects, d), the initial object embeddings (zero rows are initialized randomly), or None.
        regions: The sizes of the region features of a box and of the union of two boxes, or None for a
            network without visual input.
        hidden: The size of an object's context vector, which concatenates both directions of the LSTM.
        dropout: The dropout probability for embeddings and contexts.
    """

    def __init__(
        self,
        objects: int,
        outputs: int,
        bias: Tensor | None,
        vectors: Tensor | None,
        regions: tuple[int, int] | None,
        hidden: int,
        dropout: float,
    ) -> None:
        super().__init__()
        width = 200 if vectors is None else vectors.shape[1]
        # As in Motifs, labels have two embeddings: one for the object context and one for the edge context.
        self.object_embedding, self.edge_embedding = (_embedding(objects, width, vectors) for _ in range(2))
        self.position = nn.Sequential(nn.Linear(6, POSITION), nn.ReLU())
        seen = 0 if regions is None else regions[0]
        self.object_context = _Context(width + POSITION + seen, hidden)
        self.edge_context = _Context(width + seen + hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.subject, self.object = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 2 * hidden)
        self.masks = nn.Sequential(
            _SmallConvolution(2, 16, GRID),
            nn.ReLU(),
            _SmallConvolution(16, 32, GRID // 2),
            nn.ReLU(),
            nn.Linear(32 * (GRID // 4) ** 2, 2 * hidden),
        )
        self.union = None if regions is None else nn.Linear(regions[1], 2 * hidden)
        self.predicates = nn.Linear(2 * hidden, outputs)
        for end in (self.subject, self.object):
            # The product of two contexts must be large enough to matter without saturating the tanh.
            nn.init.normal_(end.weight, std=1.3 * hidden**-0.5)
        self.bias = None if bias is None else nn.Embedding.from_pretrained(bias.flatten(0, 1), freeze=False)
        self.objects = objects

    def forward(self, batch: Batch) -> Tensor:
        """Return the scores (E, outputs) of all candidate edges in a batch."""
        seen = [] if batch.box_features is None else [batch.box_features]
        position = self.position(_places(batch.boxes))
        inputs = torch.cat((*seen, self.object_embedding(batch.labels), position), 1)
        context = self.object_context(self.dropout(inputs), batch.box_offsets)
        inputs = torch.cat((*seen, self.edge_embedding(batch.labels), context), 1)
        context = self.dropout(self.edge_context(self.dropout(inputs), batch.box_offsets))
        subject, object_ = batch.edges.unbind(1)
        pair = embedding(subject, self.subject(context)) * embedding(object_, self.object(context))
        region = self.masks(masks(batch.boxes[subject], batch.boxes[object_]).flatten(1))
        if self.union is not None:
            region = region + self.union(batch.union_features)
        # Multiply the pair by 1 + region, so that the pair has an effect even if the region term is small.
        scores = self.predicates(torch.tanh(torch.addcmul(pair, pair, region)))
        if self.bias is not None:
            scores = scores + self.bias(batch.labels[subject] * self.objects + batch.labels[object_])
        if batch.bias_shift is not None:
            scores = scores + batch.bias_shift[:, -scores.shape[1] :]
        return scores


class _SmallConvolution(nn.Conv2d):
    """A 3 x 3 convolution with stride 2, applied to flattened images.

    It is computed as a single matrix product. The rows of the matrix are the convolutions of unit images (one
    entry is 1, and all others are 0), of which there are far fewer than edges. For a large number of tiny
    images, the backward pass of a direct convolution takes twice as long.
    """

    def __init__(self, channels: int, more: int, side: int) -> None:
        super().__init__(channels, more, 3, stride=2, padding=1)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        units = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        units = units.view(-1, self.in_channels, self.side, self.side)
        matrix = conv2d(units, self.weight, None, self.stride, self.padding).flatten(1)
        assert self.bias is not None
        bias = self.bias.repeat_interleave(matrix.shape[1] // self.out_channels)
        return torch.addmm(bias, x, matrix)


class _Context(nn.Module):
    """A bidirectional LSTM over the boxes of an image, sorted from left to right, with one output per box."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.onward, self.back = (nn.LSTM(inputs, hidden // 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.diff()
        image = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
        place = torch.arange(len(x), device=x.device) - offsets[image]
        mirrored = lengths[image] - 1 - place
        # In either direction, the padding comes after the boxes of an image, so it does not affect them. A
        # packed sequence would not need padding, but it takes 1.5 times as long on a CPU.
        empty = x.new_zeros(len(lengths), int(lengths.max()), x.shape[1])
        onward = self.onward(empty.index_put((image, place), x))[0][image, place]
        back = self.back(empty.index_put((image, mirrored), x))[0][image, mirrored]
        return torch.cat((onward, back), 1)


def masks(subject: Tensor, object_: Tensor) -> Tensor:
    """Rasterize pairs of boxes on a small grid that covers their union, as in Motifs.

    Args:
        subject: (E, 4) boxes.
        object_: (E, 4) boxes.

    Returns:
        (E, 2, GRID, GRID): the fraction of each cell that the subject and the object cover, minus 0.5.
    """
    low = torch.minimum(subject[:, :2], object_[:, :2]).unsqueeze(1)
    size = (torch.maximum(subject[:, 2:], object_[:, 2:]).unsqueeze(1) - low).clamp(min=1e-6)
    corners = torch.stack((subject, object_), 1).unflatten(2, (2, 2))
    corners = (corners - low.unsqueeze(2)) / size.unsqueeze(2) * GRID  # (E, which box, low or high, x or y)
    cell = torch.arange(GRID, device=subject.device)
    start, end = corners.unsqueeze(-1).unbind(2)
    covered = (torch.minimum(end, cell + 1) - torch.maximum(start, cell)).clamp(min=0)
    # covered is (E, which box, x or y, cell). The coverage of a rectangle is the outer product of the
    # coverages along its two sides.
    return covered[:, :, 1].unsqueeze(3) * covered[:, :, 0].unsqueeze(2) - 0.5


def _places(boxes: Tensor) -> Tensor:
    """Return the center, size and log size of boxes, in units of the image size."""
    size = boxes[:, 2:] - boxes[:, :2]
    return torch.cat((boxes[:, :2] + size / 2, size, size.clamp(min=1e-4).log()), 1)


def _embedding(objects: int, width: int, vectors: Tensor | None) -> nn.Embedding:
    table = nn.Embedding(objects, width)
    if vectors is not None:
        known = (vectors != 0).any(1, keepdim=True)
        table.weight.data.copy_(torch.where(known, vectors, table.weight.data))
    return table


# Added to each frequency before taking the logarithm, as in Motifs.
FLOOR = 1e-3


def log_frequencies(training: SceneGraphs, counts: Path | None = None) -> Tensor:
    """Return the log frequencies of "no relation" and of each predicate, for every pair of object classes.

    Args:
        training: The images to count pairs and relations in.
        counts: An npz file with the arrays `subject`, `object`, `predicate` (all numbered from 1) and
            `count`. Its relations replace those of `training` and are scaled to the same total. The pairs of
            classes are still counted in `training`.

    Returns:
        (objects, objects, 1 + predicates), float32: log(frequency + 0.001), as in Motifs.
    """
    none, found = _count(training)
    if counts is not None:
        given = _read_counts(counts, *_sizes(training))
        found = given * (found.sum() / given.sum().clamp(min=1))
    return _logarithm(none, found).float().unflatten(0, (len(training.objects), -1))


class LeaveOneOut:
    """A correction to the frequency bias that excludes each training image from its own counts.

    A bias that is computed from the training images leaks their labels: if a pair of classes occurs in only
    one image, its bias reveals the relation in that image.

    Args:
        training: The images from which the bias was computed.
    """

    def __init__(self, training: SceneGraphs) -> None:
        self.none, self.found = _count(training)
        self.objects = len(training.objects)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the correction (E, 1 + predicates) for the edges of a batch of training images."""
        pairs, predicates = self.found.shape
        subject, object_ = batch.labels[batch.edges].unbind(1)
        image = torch.arange(len(batch.images)).repeat_interleave(batch.edge_offsets.diff())
        # All edges between the same two classes in an image have the same correction.
        key, group = torch.unique((image * pairs) + subject * self.objects + object_, return_inverse=True)
        place = group[batch.relation_edges] * predicates + batch.relation_predicates
        own_none = torch.bincount(group, minlength=len(key))
        own = torch.bincount(place, minlength=len(key) * predicates).view(-1, predicates)
        none, found = self.none[key % pairs], self.found[key % pairs]
        return (_logarithm(none - own_none, found - own) - _logarithm(none, found)).float()[group]


def _sizes(graphs: SceneGraphs) -> tuple[int, int]:
    return len(graphs.objects), len(graphs.predicates)


def _count(training: SceneGraphs) -> tuple[Tensor, Tensor]:
    """Count the edges and the relations between each pair of object classes.

    Returns:
        (objects^2,), the number of edges plus one; and (objects^2, predicates), the number of relations.
    """
    objects, predicates = _sizes(training)
    edges, _ = candidates(training.box_offsets)
    subject, object_ = training.labels[edges].unbind(1)
    # As in Motifs, every edge counts as "no relation" once, in addition to its relations.
    none = torch.bincount(subject * objects + object_, minlength=objects**2).double() + 1
    first = training.box_offsets[:-1].repeat_interleave(training.relation_offsets.diff())
    ends = training.labels[first.unsqueeze(1) + training.relations[:, :2]]
    place = (ends[:, 0] * objects + ends[:, 1]) * predicates + training.relations[:, 2]
    return none, torch.bincount(place, minlength=objects**2 * predicates).double().view(-1, predicates)


def _logarithm(none: Tensor, found: Tensor) -> Tensor:
    """Return the frequency bias (pairs, 1 + predicates) for the counts of `_count`, in float64."""
    table = torch.cat((none.unsqueeze(1), found), 1)
    return (table / table.sum(1, keepdim=True) + FLOOR).log()


def word_vectors(path: Path, names: tuple[str, ...]) -> Tensor:
    """Read the GloVe vectors for object names.

    Args:
        path: The official text file, with one word and its vector per line, or an npz file with `names` and
            `vectors`.
        names: The object names. If a name is not in the file, its vector is the mean of the vectors of those
            of its words that are.

    Returns:
        (names, d), float32; zeros for names without known words. An invalid file, or a text file that
        contains none of the words, raises `BadInput`.
    """
    where = f"`{path}` (`--glove`)"
    try:
        if path.suffix == ".npz":
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                vectors = dict(zip(file["names"].tolist(), file["vectors"].astype(np.float32), strict=True))
        else:
            wanted = {word for name in names for word in name.split()}
            with path.open(encoding="utf-8") as lines:
                parts = (line.rstrip().split(" ") for line in lines)
                vectors = {part[0]: np.array(part[1:], np.float32) for part in parts if part[0] in wanted}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        said = getattr(error, "strerror", None) or "it does not contain words with their vectors"
        raise BadInput(f"{where} cannot be read: {said}.") from error
    if len({vector.shape for vector in vectors.values()}) != 1:
        raise BadInput(
            f"{where} must contain vectors of equal length for the object names, but it contains none, or "
            "their lengths differ."
        )
    zero = np.zeros_like(next(iter(vectors.values())))
    rows = []
    for name in names:
        words = [name] if name in vectors else [word for word in name.split() if word in vectors]
        rows.append(np.mean([vectors[word] for word in words], axis=0) if words else zero)
    found = torch.from_numpy(np.stack(rows)).float()
    if not found.isfinite().all():
        raise BadInput(f"{where} must have finite values, but it contains NaN or infinity.")
    return found


def _read_counts(path: Path, objects: int, predicates: int) -> Tensor:
    """Read the counts (objects^2, predicates) from the file given by `--counts`."""
    where = f"`{path}` (`--counts`)"
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            columns = [file[name] for name in ("subject", "object", "predicate", "count")]
    except KeyError as error:
        raise BadInput(f"{where} has no array `{error.args[0].split()[0]}`.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        said = getattr(error, "strerror", None) or "it is not a complete npz file of arrays"
        raise BadInput(f"{where} cannot be read: {said}.") from error
    if any(column.dtype.kind not in "iu" or column.shape != columns[0].shape for column in columns):
        raise BadInput(f"{where} must contain four integer arrays of the same length.")
    for name, column, most in zip(
        ("subject", "object", "predicate"), columns, (objects, objects, predicates), strict=False
    ):
        if len(column) and not 1 <= column.min() <= column.max() <= most:
            raise BadInput(f"{where} contains a value of `{name}` that is not from 1 to {most}.")
    if len(columns[3]) and columns[3].min() < 0:
        raise BadInput(f"{where} contains a negative `count`.")
    subject, object_, predicate, count = (torch.from_numpy(column.astype(np.int64)) for column in columns)
    place = ((subject - 1) * objects + object_ - 1) * predicates + predicate - 1
    table = torch.zeros(objects**2 * predicates, dtype=torch.float64)
    return table.index_add(0, place, count.double()).view(-1, predicates)
