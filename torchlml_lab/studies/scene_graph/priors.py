"""Knowledge from before training: the frequency of each relation between classes, and word vectors."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.scene_graph.graphs import Batch, SceneGraphs, candidates

# Added to each frequency before the logarithm, as in Motifs.
FLOOR = 1e-3


def log_frequencies(training: SceneGraphs, counts: Path | None = None) -> Tensor:
    """The log frequencies of "no relation" and of each predicate, for every pair of object classes.

    Args:
        training: The images to count pairs and relations in.
        counts: An npz file with `subject`, `object`, `predicate` and `count`, numbered from 1. Its relations
            replace those of `training`, scaled to the same total. The occurrences of pairs of classes are
            still counted in `training`.

    Returns:
        (objects, objects, 1 + predicates), float32: log(frequency + 0.001), like the bias of Motifs.
    """
    none, found = _count(training)
    if counts is not None:
        given = _read_counts(counts, *_sizes(training))
        found = given * (found.sum() / given.sum().clamp(min=1))
    return _logarithm(none, found).float().unflatten(0, (len(training.objects), -1))


class LeaveOneOut:
    """A correction of the frequency bias that excludes each training image from its own counts.

    A bias that is counted on the training images leaks their labels: if a pair of classes occurs in only one
    image, its bias is exactly the relation in that image.

    Args:
        training: The images that the bias is counted on.
    """

    def __init__(self, training: SceneGraphs) -> None:
        self.none, self.found = _count(training)
        self.objects = len(training.objects)

    def __call__(self, batch: Batch) -> Tensor:
        """The correction (E, 1 + predicates) for the edges of some of these images."""
        pairs, predicates = self.found.shape
        subject, object_ = batch.labels[batch.edges].unbind(1)
        image = torch.arange(len(batch.images)).repeat_interleave(batch.edge_offsets.diff())
        # The edges between the same two classes in an image share their correction.
        key, group = torch.unique((image * pairs) + subject * self.objects + object_, return_inverse=True)
        place = group[batch.relation_edges] * predicates + batch.relation_predicates
        own_none = torch.bincount(group, minlength=len(key))
        own = torch.bincount(place, minlength=len(key) * predicates).view(-1, predicates)
        none, found = self.none[key % pairs], self.found[key % pairs]
        return (_logarithm(none - own_none, found - own) - _logarithm(none, found)).float()[group]


def _sizes(graphs: SceneGraphs) -> tuple[int, int]:
    return len(graphs.objects), len(graphs.predicates)


def _count(training: SceneGraphs) -> tuple[Tensor, Tensor]:
    """How often each pair of classes occurs, plus one (objects^2,), and how often it has each predicate."""
    objects, predicates = _sizes(training)
    edges, _ = candidates(training.box_offsets)
    subject, object_ = training.labels[edges].unbind(1)
    # As in Motifs, every pair counts once as "no relation", and its relations count in addition.
    none = torch.bincount(subject * objects + object_, minlength=objects**2).double() + 1
    first = training.box_offsets[:-1].repeat_interleave(training.relation_offsets.diff())
    ends = training.labels[first.unsqueeze(1) + training.relations[:, :2]]
    place = (ends[:, 0] * objects + ends[:, 1]) * predicates + training.relations[:, 2]
    return none, torch.bincount(place, minlength=objects**2 * predicates).double().view(-1, predicates)


def _logarithm(none: Tensor, found: Tensor) -> Tensor:
    """The bias (pairs, 1 + predicates) for counts, float64."""
    table = torch.cat((none.unsqueeze(1), found), 1)
    return (table / table.sum(1, keepdim=True) + FLOOR).log()


def word_vectors(path: Path, names: tuple[str, ...]) -> Tensor:
    """Read the GloVe vectors of object names.

    Args:
        path: The official text file, with a word and its vector per line, or an npz file with `names` and
            `vectors`.
        names: The object names. The vector of a name with several words is the mean of their vectors.

    Returns:
        (names, d), float32; zeros for names without known words. A file that is invalid, or that contains
        none of the names, raises `BadInput`.
    """
    where = f"`--glove` is `{path}`, which"
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
            f"{where} must have vectors of one length for the objects, but it has none or several."
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
    """Read the counts (objects^2, predicates) of the file."""
    where = f"`--counts` is `{path}`, which"
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            columns = [file[name] for name in ("subject", "object", "predicate", "count")]
    except KeyError as error:
        raise BadInput(f"{where} has no `{error.args[0].split()[0]}`.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        said = getattr(error, "strerror", None) or "it is not a complete npz file of arrays"
        raise BadInput(f"{where} cannot be read: {said}.") from error
    if any(column.dtype.kind not in "iu" or column.shape != columns[0].shape for column in columns):
        raise BadInput(f"{where} must contain four integer arrays of the same length.")
    for name, column, most in zip(
        ("subject", "object", "predicate"), columns, (objects, objects, predicates), strict=False
    ):
        if len(column) and not 1 <= column.min() <= column.max() <= most:
            raise BadInput(f"{where} has a `{name}` that is not from 1 to {most}.")
    if len(columns[3]) and columns[3].min() < 0:
        raise BadInput(f"{where} has a `count` that is negative.")
    subject, object_, predicate, count = (torch.from_numpy(column.astype(np.int64)) for column in columns)
    place = ((subject - 1) * objects + object_ - 1) * predicates + predicate - 1
    table = torch.zeros(objects**2 * predicates, dtype=torch.float64)
    return table.index_add(0, place, count.double()).view(-1, predicates)
