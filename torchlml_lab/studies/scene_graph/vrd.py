"""Reads the Visual Relationship Detection data of Lu et al. (2016): the official JSON files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchlml_lab.errors import BadInput
from torchlml_lab.files import read_json
from torchlml_lab.studies.scene_graph.graphs import Image, SceneGraphs, collect, damaged


def read(folder: Path) -> tuple[SceneGraphs, SceneGraphs]:
    """Read `annotations_{train,test}.json`, `objects.json` and `predicates.json`.

    Args:
        folder: Where they are. `{train,test}_image_metadata.json` may be there too, with the width and height
            by image; without it, an image is as large as the extent of its boxes.

    Returns:
        The training and the test images. The boxes of an image are those its relations mention, each once, in
        the order of their first mention, the subject before the object. A file that is missing or damaged
        raises `BadInput`, which names the file and, where there is one, the image.
    """
    objects, predicates = (read_json(folder / f"{name}.json", list) for name in ("objects", "predicates"))
    training, test = (
        collect(
            folder / f"annotations_{part}.json",
            _read_images(folder / f"annotations_{part}.json", folder / f"{part}_image_metadata.json"),
            [str(name) for name in objects],
            [str(name) for name in predicates],
            first=0,
        )
        for part in ("train", "test")
    )
    return training, test


def _read_images(path: Path, sizes_path: Path) -> Iterator[Image]:
    sizes = read_json(sizes_path, dict) if sizes_path.exists() else {}
    for name, annotations in read_json(path, dict).items():
        boxes: dict[tuple[int, ...], int] = {}
        relations = []
        if not isinstance(annotations, list):
            raise damaged(path, name, "it has no list of relations")
        for annotation in annotations:
            ends = [boxes.setdefault(_box(path, name, annotation, end), len(boxes)) for end in _ENDS]
            predicate = annotation.get("predicate")
            if not isinstance(predicate, int):
                raise damaged(path, name, "a relation has no whole number as `predicate`")
            relations.append((*ends, predicate))
        table = np.array(list(boxes), dtype=np.int64).reshape(-1, 5)
        corners = table[:, [3, 1, 4, 2]].astype(np.float64)  # the file says ymin, ymax, xmin, xmax
        width, height = _size(sizes_path, name, sizes)
        extent = corners[:, 2:].max(0, initial=1)  # a few boxes are larger than their image
        yield Image(
            name,
            max(width, extent[0]),
            max(height, extent[1]),
            corners,
            table[:, 0],
            np.array(relations, dtype=np.int64).reshape(-1, 3),
        )


_ENDS = ("subject", "object")


def _box(path: Path, name: str, annotation: Any, end: str) -> tuple[int, ...]:
    """The class and the box of one end of a relation."""
    try:
        numbers = (annotation[end]["category"], *annotation[end]["bbox"])
    except (KeyError, TypeError) as error:
        raise damaged(path, name, f"a relation has no `{end}` with `category` and `bbox`") from error
    if len(numbers) != 5 or not all(isinstance(number, int) for number in numbers):
        raise damaged(path, name, f"a `{end}` is not one `category` and four whole numbers of `bbox`")
    return numbers


def _size(path: Path, name: str, sizes: dict[str, Any]) -> tuple[float, float]:
    if name not in sizes:
        return 0.0, 0.0
    try:
        return float(sizes[name]["width"]), float(sizes[name]["height"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"`{path}` has no `width` and `height` for the image `{name}`.") from error
