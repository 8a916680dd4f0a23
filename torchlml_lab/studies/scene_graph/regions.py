"""Region features from a user's own detector: one vector for each box, one for each pair of boxes."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from torchlml_lab.errors import BadInput
from torchlml_lab.studies.scene_graph.graphs import SceneGraphs
from torchlml_lab.studies.scene_graph.hdf5 import reading


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
        with reading(self.path) as file:
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
        with reading(self.path) as file:
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
