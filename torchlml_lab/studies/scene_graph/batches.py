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
    """Region features in an HDF5 file with a group for each image, read on demand.

    The name of a group is that of the image (the `image_id` of Visual Genome, the file name of VRD). It has
    two arrays: `boxes` (B, d), in the order of the boxes in the scene-graph file, and `unions` (B, B, d'),
    where [i, j] describes the pair or the union of boxes i and j.

    Args:
        path: The file. A file that is unreadable or invalid raises `BadInput`.
        graphs: The images that must be in the file; all of them are checked immediately.
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
                            f"`--region-features`: the vectors of all images in `{path}` must have the same "
                            f"length, but those of the image `{name}` differ from the previous ones."
                        )
        self.box_size, self.union_size = sizes.pop()

    def read(self, graphs: SceneGraphs, images: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the features of the boxes and candidate edges of some images, in the order of a batch."""
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
        where = f"`--region-features` is `{self.path}`, where the image `{name}`"
        if name not in file or not {"boxes", "unions"} <= set(file[name]):
            raise BadInput(f"{where} has no arrays `boxes` and `unions`.")
        tables = [file[name][table] for table in ("boxes", "unions")]
        one, two = (table.shape for table in tables)
        if len(one) != 2 or len(two) != 3 or one[0] < boxes or two[:2] != (one[0], one[0]):
            raise BadInput(
                f"{where} must have `boxes` of shape ({boxes}, d) and `unions` of shape ({boxes}, {boxes}, "
                f"d'), but they have shapes {one} and {two}."
            )
        if any(table.dtype.kind != "f" for table in tables):
            raise BadInput(f"{where} must have floating-point arrays, but it has others.")
        return one[1], two[2]


def _floats(table: h5py.Dataset) -> Tensor:
    return torch.from_numpy(np.asarray(table[:], dtype=np.float32))


class Batch(NamedTuple):
    """N images with B boxes, E candidate edges (all ordered pairs of different boxes) and T relations."""

    images: Tensor
    """(N,): the indices of the images in the scene graphs."""
    boxes: Tensor
    """(B, 4): x1, y1, x2, y2, relative to the image size, from 0 to 1."""
    labels: Tensor
    """(B,): object classes."""
    box_offsets: Tensor
    """(N + 1,): the offsets of the boxes of each image."""
    edges: Tensor
    """(E, 2): subject box and object box, as indices into the batch."""
    edge_offsets: Tensor
    """(N + 1,): the offsets of the edges of each image."""
    relation_edges: Tensor
    """(T,): the edge of each true relation, in ascending order."""
    relation_predicates: Tensor
    """(T,): its predicate."""
    box_features: Tensor | None
    """(B, d): the detector features of each box, if available."""
    union_features: Tensor | None
    """(E, d'): the detector features of the union of each pair, if available."""
    bias_shift: Tensor | None = None
    """(E, 1 + predicates): added to the frequency bias, in training only."""


class GraphBatches(Dataset[Batch]):
    """Scene graphs as a dataset whose `__getitems__(images)` returns a whole batch.

    Args:
        graphs: The images, each with at least two boxes.
        regions: Their region features, or None.
        shift: Computes the `bias_shift` of a batch, or None.
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
        # The edges of a subject are consecutive, without the edge to itself.
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
    """All ordered pairs of different boxes of each image, sorted by subject and then by object.

    Example:
        >>> candidates(torch.tensor([0, 2, 4]))
        (tensor([[0, 1], [1, 0], [2, 3], [3, 2]]), tensor([0, 2, 4]))

    Args:
        box_offsets: (N + 1,) offsets of the boxes of each image.

    Returns:
        (E, 2) boxes, and (N + 1,) offsets of the pairs of each image.
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
