"""Scene graphs of many images as jagged tensors, with their splits, batches and region features."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput


@contextmanager
def reading_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file; errors while opening or reading it raise `BadInput`."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        said = os.strerror(number) if number else "it is not a complete HDF5 file"
        raise BadInput(f"`{path}` cannot be read: {said}.") from error


class Image(NamedTuple):
    """The boxes and relations of an image, as read from a file."""

    name: str
    width: float
    height: float
    boxes: NDArray[np.float64]
    """(B, 4): x1, y1, x2, y2."""
    labels: NDArray[np.int64]
    """(B,): zero-based indices of the object classes."""
    relations: NDArray[np.int64]
    """(T, 3): zero-based indices of the subject box, the object box and the predicate.

    Two boxes may have several relations.
    """


@dataclass(frozen=True)
class SceneGraphs:
    """The scene graphs of many images; the boxes of an image are sorted from left to right.

    Image i has the boxes `box_offsets[i]:box_offsets[i + 1]` and the relations
    `relation_offsets[i]:relation_offsets[i + 1]`. Relations refer to boxes by their index within the image.
    """

    names: tuple[str, ...]
    sizes: Tensor
    """(M, 2): width and height."""
    boxes: Tensor
    """(B, 4): x1, y1, x2, y2."""
    labels: Tensor
    """(B,): object classes."""
    rows: Tensor
    """(B,): the index of each box among its image's boxes in the file and in the region features."""
    box_offsets: Tensor
    relations: Tensor
    """(T, 3): subject box, object box, predicate, without duplicates."""
    relation_offsets: Tensor
    objects: tuple[str, ...]
    """The names of the object classes."""
    predicates: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, images: Tensor) -> "SceneGraphs":
        """Select images, in the given order."""
        box, box_offsets = members(self.box_offsets, images)
        relation, relation_offsets = members(self.relation_offsets, images)
        return SceneGraphs(
            tuple(self.names[i] for i in images.tolist()),
            self.sizes[images],
            self.boxes[box],
            self.labels[box],
            self.rows[box],
            box_offsets,
            self.relations[relation],
            relation_offsets,
            self.objects,
            self.predicates,
        )

    def with_relations(self) -> "SceneGraphs":
        """Select the images with relations. Recall is not defined for images without relations."""
        return self[self.relation_offsets.diff().nonzero().squeeze(1)]


class Splits(NamedTuple):
    """The training, validation and test images."""

    training: SceneGraphs
    validation: SceneGraphs
    test: SceneGraphs


def members(offsets: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all members of the given groups, and the offsets of the groups in the result.

    Example:
        >>> members(torch.tensor([0, 2, 5]), torch.tensor([1, 0]))
        (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    sizes = offsets.diff()[groups]
    new = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    return torch.arange(int(new[-1])) + (offsets[groups] - new[:-1]).repeat_interleave(sizes), new


def collect(
    path: Path, images: Iterable[Image], objects: Sequence[str], predicates: Sequence[str], first: int
) -> SceneGraphs:
    """Validate images and combine them.

    Args:
        path: The file that the images were read from, for error messages.
        images: The images.
        objects: The names of the object classes.
        predicates: The names of the predicates.
        first: The number of the first class and predicate in the file (0 or 1), for error messages.

    Returns:
        The scene graphs, without duplicate relations. Candidate edges connect two different boxes, so if a
        box is related to itself, a copy of the box becomes the object.
    """
    parts: list[Image] = []
    rows: list[NDArray[np.int64]] = []
    for image in images:
        _check(path, image, len(objects), len(predicates), first)
        relations = np.unique(image.relations, axis=0)
        itself = relations[:, 0] == relations[:, 1]
        copied = np.unique(relations[itself, 0])
        relations[itself, 1] = len(image.boxes) + np.searchsorted(copied, relations[itself, 0])
        row = np.concatenate((np.arange(len(image.boxes)), copied))
        order = np.argsort(image.boxes[row, 0] + image.boxes[row, 2], kind="stable")
        relations[:, :2] = np.argsort(order)[relations[:, :2]]
        rows.append(row[order])
        parts.append(image._replace(relations=relations))
    return SceneGraphs(
        names=tuple(part.name for part in parts),
        sizes=torch.tensor([(part.width, part.height) for part in parts], dtype=torch.float32).view(-1, 2),
        boxes=_packed([part.boxes[row] for part, row in zip(parts, rows, strict=True)], 4).float(),
        labels=_packed([part.labels[row] for part, row in zip(parts, rows, strict=True)]),
        rows=_packed(rows),
        box_offsets=_offsets([len(row) for row in rows]),
        relations=_packed([part.relations for part in parts], 3),
        relation_offsets=_offsets([len(part.relations) for part in parts]),
        objects=tuple(objects),
        predicates=tuple(predicates),
    )


def split(training: SceneGraphs, test: SceneGraphs, validation: int, seed: int) -> Splits:
    """Hold out `validation` random training images, after dropping all images without relations."""
    training, test = training.with_relations(), test.with_relations()
    if not 0 < validation < len(training):
        raise BadInput(
            f"`--validation` must be from 1 to {len(training) - 1}, because {len(training)} training images "
            f"have relations, but it is {validation}."
        )
    if not len(test):
        raise BadInput("At least one test image must have a relation, but none does.")
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    return Splits(training[order[validation:]], training[order[:validation]], test)


def damaged(path: Path, name: str, said: str) -> BadInput:
    """Return the error for an invalid image in a file."""
    return BadInput(f"`{path}` is damaged at image `{name}`: {said}.")


def _check(path: Path, image: Image, objects: int, predicates: int, first: int) -> None:
    boxes, labels, relations = image.boxes, image.labels, image.relations
    sound = np.isfinite(boxes).all(1) & (boxes[:, :2] < boxes[:, 2:]).all(1) & (boxes[:, 2:] > 0).all(1)
    if not sound.all():
        which = int(np.argmin(sound))
        said = f"box {which} from {boxes[which, :2]} to {boxes[which, 2:]} has no area in the image"
        raise damaged(path, image.name, said)
    for what, values, count, start in (
        ("object class", labels, objects, first),
        ("predicate", relations[:, 2], predicates, first),
        ("box of a relation", relations[:, :2].ravel(), len(boxes), 0),
    ):
        wrong = values[(values < 0) | (values >= count)]
        if len(wrong):
            raise damaged(
                path,
                image.name,
                f"the {what} must be from {start} to {count - 1 + start}, but it is {wrong[0] + start}",
            )
    if not (image.width > 0 and image.height > 0):
        raise damaged(
            path, image.name, f"its size must be positive, but it is {image.width} x {image.height}"
        )


def _packed(parts: Sequence[NDArray[np.generic]], *shape: int) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, *shape, dtype=torch.int64)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


class RegionFeatures:
    """Region features in an HDF5 file with a group for each image, read on demand.

    Each group is named after its image: the `image_id` in Visual Genome, or the file name in VRD. It contains
    two arrays: `boxes` (B, d), in the order of the boxes in the scene-graph file, and `unions` (B, B, d'),
    where entry [i, j] describes the union of boxes i and j.

    Args:
        path: The file. An unreadable or invalid file raises `BadInput`.
        graphs: The images that must be in the file; all of them are checked on construction.
    """

    def __init__(self, path: Path, graphs: Sequence[SceneGraphs]) -> None:
        self.path = path
        sizes = set()
        with reading_hdf5(self.path) as file:
            for part in graphs:
                # The copies of boxes that are related to themselves are not in the file.
                counts = [int(rows.max()) + 1 for rows in part.rows.split(part.box_offsets.diff().tolist())]
                for name, count in zip(part.names, counts, strict=True):
                    sizes.add(self._check(file, name, count))
                    if len(sizes) > 1:
                        raise BadInput(
                            f"`{path}` (`--region-features`): the vectors of all images must have the same "
                            f"length, but those of image `{name}` have a different length."
                        )
        self.box_size, self.union_size = sizes.pop()

    def read(self, graphs: SceneGraphs, images: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the features of the boxes and candidate edges of some images, in the order of `Batch`."""
        boxes, unions = [], []
        with reading_hdf5(self.path) as file:
            for image in images:
                group = file[graphs.names[image]]
                rows = graphs.rows[graphs.box_offsets[image] : graphs.box_offsets[image + 1]]
                boxes.append(_floats(group["boxes"])[rows])
                pairs = _floats(group["unions"])[rows][:, rows]
                unions.append(pairs[~torch.eye(len(rows), dtype=torch.bool)])
        return torch.cat(boxes), torch.cat(unions)

    def _check(self, file: h5py.File, name: str, boxes: int) -> tuple[int, int]:
        where = f"`{self.path}` (`--region-features`): image `{name}`"
        missing = {"boxes", "unions"} - set(file.get(name, ()))
        if missing:
            raise BadInput(
                f"{where} must contain the arrays `boxes` and `unions`, but it has no `{min(missing)}`."
            )
        tables = [file[name][table] for table in ("boxes", "unions")]
        one, two = (table.shape for table in tables)
        if len(one) != 2 or len(two) != 3 or one[0] < boxes or two[:2] != (one[0], one[0]):
            raise BadInput(
                f"{where} must have `boxes` of shape (B, d) and `unions` of shape (B, B, d') with B at "
                f"least {boxes}, but they have shapes {one} and {two}."
            )
        if any(table.dtype.kind != "f" for table in tables):
            raise BadInput(f"{where} must have floating-point arrays, but at least one has a different type.")
        return one[1], two[2]


def _floats(table: h5py.Dataset) -> Tensor:
    return torch.from_numpy(np.asarray(table[:], dtype=np.float32))


class Batch(NamedTuple):
    """N images with B boxes, E candidate edges (all ordered pairs of different boxes) and T relations."""

    images: Tensor
    """(N,): the indices of the images in the scene graphs."""
    boxes: Tensor
    """(B, 4): x1, y1, x2, y2, relative to the image size (from 0 to 1 within the image)."""
    labels: Tensor
    """(B,): object classes."""
    box_offsets: Tensor
    """(N + 1,): the offsets of each image's boxes."""
    edges: Tensor
    """(E, 2): subject box and object box, as indices into the batch."""
    edge_offsets: Tensor
    """(N + 1,): the offsets of each image's edges."""
    relation_edges: Tensor
    """(T,): the edge of each true relation, in ascending order."""
    relation_predicates: Tensor
    """(T,): the predicate of each true relation."""
    box_features: Tensor | None
    """(B, d): the detector features of each box, if available."""
    union_features: Tensor | None
    """(E, d'): the detector features of the union of each edge's boxes, if available."""
    bias_shift: Tensor | None = None
    """(E, 1 + predicates): a correction that is added to the frequency bias during training only."""


class GraphBatches(Dataset[Batch]):
    """A dataset of scene graphs whose `__getitems__(images)` returns a whole batch.

    Args:
        graphs: The images, each with at least two boxes.
        regions: The region features of the images, or None.
        shift: A function that computes the `bias_shift` of a batch, or None.
    """

    def __init__(
        self,
        graphs: SceneGraphs,
        regions: RegionFeatures | None = None,
        shift: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        self.graphs, self.regions, self.shift = graphs, regions, shift

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, image: int) -> Batch:
        return self.__getitems__([image])

    def in_order(self, size: int) -> Iterator[Batch]:
        """Iterate over all images in batches of `size`."""
        for images in torch.arange(len(self)).split(size):
            yield self.__getitems__(images.tolist())

    def __getitems__(self, images: Sequence[int]) -> Batch:
        graphs, chosen = self.graphs, torch.tensor(images)
        box, box_offsets = members(graphs.box_offsets, chosen)
        relation, relation_offsets = members(graphs.relation_offsets, chosen)
        counts = box_offsets.diff()
        edges, edge_offsets = candidates(box_offsets)
        # The edges of a subject are consecutive, and there is no edge from a box to itself.
        subject, object_, predicate = graphs.relations[relation].unbind(1)
        per_image = relation_offsets.diff()
        place = subject * (counts - 1).repeat_interleave(per_image) + object_ - (object_ > subject).long()
        place, order = (place + edge_offsets[:-1].repeat_interleave(per_image)).sort(stable=True)
        features = None if self.regions is None else self.regions.read(graphs, images)
        batch = Batch(
            images=chosen,
            boxes=graphs.boxes[box] / graphs.sizes[chosen].repeat(1, 2).repeat_interleave(counts, 0),
            labels=graphs.labels[box],
            box_offsets=box_offsets,
            edges=edges,
            edge_offsets=edge_offsets,
            relation_edges=place,
            relation_predicates=predicate[order],
            box_features=None if features is None else features[0],
            union_features=None if features is None else features[1],
        )
        return batch if self.shift is None else batch._replace(bias_shift=self.shift(batch))


def candidates(box_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ordered pairs of different boxes in each image, sorted by subject and then by object.

    Example:
        >>> candidates(torch.tensor([0, 2, 4]))
        (tensor([[0, 1], [1, 0], [2, 3], [3, 2]]), tensor([0, 2, 4]))

    Args:
        box_offsets: (N + 1,), the offsets of each image's boxes.

    Returns:
        (E, 2), the pairs of boxes; and (N + 1,), the offsets of each image's pairs.
    """
    boxes = box_offsets.diff()
    counts = boxes * (boxes - 1)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
    others = (boxes - 1).repeat_interleave(counts)
    subject = within // others
    object_ = within % others
    object_ = object_ + (object_ >= subject).long()
    first = box_offsets[:-1].repeat_interleave(counts)
    return torch.stack((first + subject, first + object_), 1), offsets
