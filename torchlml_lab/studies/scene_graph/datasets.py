"""Readers for the Visual Genome and VRD data sets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import read_json
from torchlml_lab.studies.scene_graph.graphs import Image, SceneGraphs, collect, damaged, reading_hdf5

SCALE = 1024  # the longer side of every image, in the units of the boxes
TRAINING, TEST = 0, 2
# Four images in the official list have broken files. The official relations omit these images.
BROKEN = {1592, 1722, 4616, 4617}
_PER_BOX = ("boxes_1024", "labels")
_PER_RELATION = ("relationships", "predicates")
_PER_IMAGE = ("split", "img_to_first_box", "img_to_last_box", "img_to_first_rel", "img_to_last_rel")


def read_visual_genome(folder: Path) -> tuple[SceneGraphs, SceneGraphs]:
    """Read the three Visual Genome files.

    Args:
        folder: The directory with the files.

    Returns:
        The training and test images. A missing, damaged or inconsistent file raises `BadInput`. The message
        names the file and, if applicable, the image.
    """
    path = folder / "VG-SGG.h5"
    tables = _tables(path)
    objects, predicates = _names(folder / "VG-SGG-dicts.json")
    images = _images(folder / "image_data.json", path, len(tables["split"]))
    wrong = np.flatnonzero(~np.isin(tables["split"], (TRAINING, TEST)))
    if len(wrong):
        split = tables["split"][wrong[0]]
        raise damaged(
            path, images[wrong[0]][0], f"its split must be 0 (train) or 2 (test), but it is {split}"
        )
    training, test = (
        collect(
            path,
            _read_visual_genome_images(path, tables, images, np.flatnonzero(tables["split"] == chosen)),
            objects,
            predicates,
            first=1,
        )
        for chosen in (TRAINING, TEST)
    )
    return training, test


def _tables(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of the HDF5 file, and check their shapes."""
    names = (*_PER_BOX, *_PER_RELATION, *_PER_IMAGE)
    with reading_hdf5(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise BadInput(f"`{path}` must contain the array `{missing[0]}`, but it does not.")
        tables = {name: np.asarray(file[name][:]) for name in names}
    for group in (_PER_BOX, _PER_RELATION, _PER_IMAGE):
        for name in group:
            width = {"boxes_1024": 4, "relationships": 2}.get(name)
            if name in ("labels", "predicates") and tables[name].ndim == 2 and tables[name].shape[1] == 1:
                tables[name] = tables[name][:, 0]
            rows = len(tables[group[0]])
            expected = (rows,) if width is None else (rows, width)
            if tables[name].shape != expected or tables[name].dtype.kind not in "iu":
                raise BadInput(
                    f"`{path}`: `{name}` must be an integer array of shape {expected}, but it has "
                    f"dtype {tables[name].dtype} and shape {tables[name].shape}."
                )
            tables[name] = tables[name].astype(np.int64)
    return tables


def _names(path: Path) -> tuple[list[str], list[str]]:
    """Read the names of the object classes and the predicates, which are numbered from 1."""
    dicts = read_json(path, dict)
    lists = []
    for key in ("idx_to_label", "idx_to_predicate"):
        numbered = dicts.get(key)
        if not isinstance(numbered, dict) or set(numbered) != {str(i + 1) for i in range(len(numbered))}:
            raise BadInput(f"`{path}`: `{key}` must map consecutive numbers, starting at 1, to names.")
        lists.append([str(numbered[str(i + 1)]) for i in range(len(numbered))])
    return lists[0], lists[1]


def _images(path: Path, tables: Path, count: int) -> list[tuple[str, float, float]]:
    """Read the name, width and height of each image."""
    entries = read_json(path, list)
    try:
        found = [(entry["image_id"], float(entry["width"]), float(entry["height"])) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"`{path}`: every image must have `image_id`, `width` and `height`.") from error
    if len(found) != count:
        found = [entry for entry in found if entry[0] not in BROKEN]
    if len(found) != count:
        raise BadInput(f"`{path}` has {len(entries)} images, but `{tables}` has {count}.")
    return [(str(name), width, height) for name, width, height in found]


def _read_visual_genome_images(
    path: Path, tables: dict[str, NDArray[Any]], images: list[tuple[str, float, float]], chosen: NDArray[Any]
) -> Iterator[Image]:
    for i in chosen.tolist():
        name, width, height = images[i]
        first_box, boxes = _range(path, name, tables, "box", i, len(tables["labels"]))
        first_relation, relations = _range(path, name, tables, "rel", i, len(tables["predicates"]))
        centers = tables["boxes_1024"][first_box : first_box + boxes].astype(np.float64)
        # Centers and sizes are rounded, so they may exceed `SCALE` by one unit.
        beyond = (centers[:, :2] < 0) | (centers[:, :2] > SCALE + 1) | (centers[:, 2:] > SCALE + 1)
        if beyond.any():
            which = int(np.argmax(beyond.any(1)))
            said = f"box {which} (center and size {centers[which]}) is not within {SCALE} x {SCALE}"
            raise damaged(path, name, said)
        corners = np.concatenate(
            (centers[:, :2] - centers[:, 2:] / 2, centers[:, :2] + centers[:, 2:] / 2), 1
        )
        chosen_relations = slice(first_relation, first_relation + relations)
        pairs = tables["relationships"][chosen_relations] - first_box
        yield Image(
            name,
            width,
            height,
            corners * max(width, height) / SCALE,
            tables["labels"][first_box : first_box + boxes] - 1,
            np.concatenate((pairs, tables["predicates"][chosen_relations, None] - 1), 1),
        )


def _range(
    path: Path, name: str, tables: dict[str, NDArray[Any]], kind: str, image: int, most: int
) -> tuple[int, int]:
    """Return the index of the first box (or relation) of an image, and the number of boxes (or relations).

    If an image has no boxes (or relations), both of its indices in the file are -1.
    """
    first, last = (int(tables[f"img_to_{end}_{kind}"][image]) for end in ("first", "last"))
    if first == last == -1:
        return 0, 0
    if not 0 <= first <= last < most:
        raise damaged(
            path,
            name,
            f"`img_to_first_{kind}` and `img_to_last_{kind}` must delimit a range of the {most} entries, but "
            f"they are {first} and {last}",
        )
    return first, last - first + 1


def read_vrd(folder: Path) -> tuple[SceneGraphs, SceneGraphs]:
    """Read the VRD files `annotations_{train,test}.json`, `objects.json` and `predicates.json`.

    Args:
        folder: The directory with the files. It may also contain `{train,test}_image_metadata.json` with the
            width and height of each image. Otherwise, the size of an image is the extent of its boxes.

    Returns:
        The training and test images. The boxes of an image are those in its relations, without duplicates.
        `SceneGraphs.rows` numbers them by first occurrence, subject before object. A missing or damaged file
        raises `BadInput`. The message names the file and, if applicable, the image.
    """
    objects, predicates = (read_json(folder / f"{name}.json", list) for name in ("objects", "predicates"))
    training, test = (
        collect(
            folder / f"annotations_{part}.json",
            _read_vrd_images(folder / f"annotations_{part}.json", folder / f"{part}_image_metadata.json"),
            [str(name) for name in objects],
            [str(name) for name in predicates],
            first=0,
        )
        for part in ("train", "test")
    )
    return training, test


def _read_vrd_images(path: Path, sizes_path: Path) -> Iterator[Image]:
    sizes = read_json(sizes_path, dict) if sizes_path.exists() else {}
    for name, annotations in read_json(path, dict).items():
        boxes: dict[tuple[int, ...], int] = {}
        relations = []
        if not isinstance(annotations, list):
            raise damaged(path, name, "its relations are not a list")
        for annotation in annotations:
            ends = [boxes.setdefault(_box(path, name, annotation, end), len(boxes)) for end in _ENDS]
            predicate = annotation.get("predicate")
            if not isinstance(predicate, int):
                raise damaged(path, name, "the `predicate` of a relation is not an integer")
            relations.append((*ends, predicate))
        table = np.array(list(boxes), dtype=np.int64).reshape(-1, 5)
        corners = table[:, [3, 1, 4, 2]].astype(np.float64)  # the file has ymin, ymax, xmin, xmax
        width, height = _size(sizes_path, name, sizes)
        extent = corners[:, 2:].max(0, initial=1)  # a few boxes extend beyond their image
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
    """Return the class and box of a relation's subject or object."""
    try:
        numbers = (annotation[end]["category"], *annotation[end]["bbox"])
    except (KeyError, TypeError) as error:
        raise damaged(path, name, f"the `{end}` of a relation must have a `category` and a `bbox`") from error
    if len(numbers) != 5 or not all(isinstance(number, int) for number in numbers):
        said = f"the `{end}` of a relation must have an integer as `category` and four integers in `bbox`"
        raise damaged(path, name, said)
    return numbers


def _size(path: Path, name: str, sizes: dict[str, Any]) -> tuple[float, float]:
    if name not in sizes:
        return 0.0, 0.0
    try:
        return float(sizes[name]["width"]), float(sizes[name]["height"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"`{path}` must have `width` and `height` for the image `{name}`.") from error
