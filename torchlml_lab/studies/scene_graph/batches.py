"""Batches of scene graphs, and the region features of their boxes."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.scene_graph.graphs import SceneGraphs, members, reading_hdf5


class RegionFeatures:
    """An HDF5 file with a group for each image, read as it is needed.

    The group has the image's name (the `image_id` of Visual Genome, the file name of VRD) and two tables:
    `boxes` (B, d), in the order of the boxes in the file of the scene graphs, and `unions` (B, B, d'), where
    [i, j] is for the pair or the union of the boxes i and j.

    Args:
        path: The file. A file that cannot be read or holds something else raises `BadInput`.
        graphs: The images that must be in it; all of them are checked at once.
    """

    def __init__(self, path: Path, graphs: Sequence[SceneGraphs]) -> None:
        self.path = path
        sizes = set()
        with reading_hdf5(self.path) as file:
            for part in graphs:
                # Copies of boxes that are related to themselves do not stand in the file.
                counts = [int(rows.max()) + 1 for rows in part.rows.split(part.box_offsets.diff().tolist())]
                for name, count in zip(part.names, counts, strict=True):
                    sizes.add(self._check(file, name, count))
                    if len(sizes) > 1:
                        raise BadInput(
                            f"`--region-features` names `{path}`, where the image `{name}` has vectors of "
                            "another length than the images before it."
                        )
        self.box_size, self.union_size = sizes.pop()

    def read(self, graphs: SceneGraphs, images: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The vectors of the boxes and of the candidate edges of some images, in the order of a batch."""
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
        where = f"`--region-features` names `{self.path}`, where the image `{name}`"
        if name not in file or not {"boxes", "unions"} <= set(file[name]):
            raise BadInput(f"{where} has no tables `boxes` and `unions`.")
        tables = [file[name][table] for table in ("boxes", "unions")]
        one, two = (table.shape for table in tables)
        if len(one) != 2 or len(two) != 3 or one[0] < boxes or two[:2] != (one[0], one[0]):
            raise BadInput(
                f"{where} has `boxes` of the shape {one} and `unions` of the shape {two}: for {boxes} boxes "
                f"({boxes}, d) and ({boxes}, {boxes}, d') are needed."
            )
        if any(table.dtype.kind != "f" for table in tables):
            raise BadInput(f"{where} has tables that are not floating.")
        return one[1], two[2]


def _floats(table: h5py.Dataset) -> Tensor:
    return torch.from_numpy(np.asarray(table[:], dtype=np.float32))


class Batch(NamedTuple):
    """N images with B boxes, E candidate edges (all ordered pairs of two boxes of an image), T relations."""

    images: Tensor
    """(N,): which images of the scene graphs these are."""
    boxes: Tensor
    """(B, 4): x1, y1, x2, y2, from 0 to 1 in each image."""
    labels: Tensor
    """(B,): object classes."""
    box_offsets: Tensor
    """(N + 1,): where the boxes of each image begin."""
    edges: Tensor
    """(E, 2): subject box and object box, counted through the batch."""
    edge_offsets: Tensor
    """(N + 1,): where the edges of each image begin."""
    relation_edges: Tensor
    """(T,): the edge of each true relation, in rising order."""
    relation_predicates: Tensor
    """(T,): its predicate."""
    box_features: Tensor | None
    """(B, d): what a detector saw in each box, where the user has that."""
    union_features: Tensor | None
    """(E, d'): what it saw in the union of each pair."""
    bias_shift: Tensor | None = None
    """(E, 1 + predicates): what is added to the frequency bias, in training alone."""


class GraphBatches(Dataset[Batch]):
    """Scene graphs whose `__getitems__(images)` gives a whole batch.

    Args:
        graphs: The images; each has at least two boxes.
        regions: Their region features, or None.
        shift: Gives the `bias_shift` of a batch, or is None.
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
        """All images, so many at a time."""
        for images in torch.arange(len(self)).split(size):
            yield self.__getitems__(images.tolist())

    def __getitems__(self, images: Sequence[int]) -> Batch:
        graphs, chosen = self.graphs, torch.tensor(images)
        box, box_offsets = members(graphs.box_offsets, chosen)
        relation, relation_offsets = members(graphs.relation_offsets, chosen)
        counts = box_offsets.diff()
        edges, edge_offsets = candidates(box_offsets)
        # The edges of a subject stand together, without the one to itself.
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
    """All ordered pairs of two boxes of an image, by subject and then by object.

    Example:
        >>> candidates(torch.tensor([0, 2, 4]))
        (tensor([[0, 1], [1, 0], [2, 3], [3, 2]]), tensor([0, 2, 4]))

    Args:
        box_offsets: (N + 1,) where the boxes of each image begin.

    Returns:
        (E, 2) boxes, and (N + 1,) where the pairs of each image begin.
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
