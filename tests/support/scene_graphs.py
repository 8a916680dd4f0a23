"""Tiny scene graphs, and files that describe them in the formats of Visual Genome and VRD."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

OBJECTS = ("cat", "dog", "hat", "mat", "red bus")
PREDICATES = ("on", "has", "near", "of")


@dataclass
class Drawn:
    """A synthetic image with boxes (x1, y1, x2, y2) in pixels and relations (subject, object, predicate)."""

    name: str
    boxes: list[tuple[int, int, int, int]]
    labels: list[int]
    relations: list[tuple[int, int, int]]
    split: int = 0
    width: int = 512
    height: int = 256


def draw(count: int, seed: int = 0) -> list[Drawn]:
    """Return random images with 2 to 6 boxes and 1 to 5 relations. Every fourth image is a test image."""
    random = np.random.default_rng(seed)
    drawn = []
    for i in range(count):
        boxes = []
        for _ in range(random.integers(2, 7)):
            x, y = random.integers(0, 400), random.integers(0, 180)
            boxes.append(
                (int(x), int(y), int(x + 2 * random.integers(5, 50)), int(y + 2 * random.integers(5, 35)))
            )
        labels = random.integers(0, len(OBJECTS), len(boxes)).tolist()
        relations = []
        for _ in range(random.integers(1, 6)):
            subject, object_ = random.choice(len(boxes), 2, replace=False).tolist()
            relations.append((subject, object_, int(random.integers(0, len(PREDICATES)))))
        drawn.append(Drawn(str(1000 + i), boxes, labels, relations, split=2 if i % 4 == 3 else 0))
    return drawn


def vg_tables(images: list[Drawn]) -> dict[str, np.ndarray]:
    """Return all tables of `VG-SGG.h5` (Xu et al.), with boxes for images scaled to 1024 and 512 pixels."""
    boxes: list[tuple[float, ...]] = []
    labels: list[int] = []
    relations: list[tuple[int, int]] = []
    predicates: list[int] = []
    ends: dict[str, list[int]] = {
        f"img_to_{end}_{kind}": [] for end in ("first", "last") for kind in ("box", "rel")
    }
    for image in images:
        scale = 1024 / max(image.width, image.height)
        for kind, mine, before in (
            ("box", len(image.boxes), len(boxes)),
            ("rel", len(image.relations), len(predicates)),
        ):
            ends[f"img_to_first_{kind}"].append(before if mine else -1)
            ends[f"img_to_last_{kind}"].append(before + mine - 1 if mine else -1)
        relations += [(len(boxes) + s, len(boxes) + o) for s, o, _ in image.relations]
        predicates += [predicate + 1 for *_, predicate in image.relations]
        labels += [label + 1 for label in image.labels]
        boxes += [
            ((a + c) / 2 * scale, (b + d) / 2 * scale, (c - a) * scale, (d - b) * scale)
            for a, b, c, d in image.boxes
        ]
    tables: dict[str, np.ndarray] = {
        "boxes_1024": np.array(boxes, np.int32).reshape(-1, 4),
        "boxes_512": np.array(boxes, np.int32).reshape(-1, 4) // 2,
        "labels": np.array(labels, np.int64)[:, None],
        "active_object_mask": np.ones((len(labels), 1), np.uint8),
        "relationships": np.array(relations, np.int32).reshape(-1, 2),
        "predicates": np.array(predicates, np.int64)[:, None],
        "split": np.array([image.split for image in images], np.int32),
    }
    return tables | {name: np.array(values, np.int32) for name, values in ends.items()}


def write_vg(folder: Path, images: list[Drawn], tables: dict[str, np.ndarray] | None = None) -> Path:
    """Write the three files of Visual Genome. `tables`, if given, replaces the tables made from `images`."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "VG-SGG.h5", "w") as file:
        for name, table in (vg_tables(images) if tables is None else tables).items():
            file[name] = table
    dicts = {
        "idx_to_label": {str(i + 1): name for i, name in enumerate(OBJECTS)},
        "label_to_idx": {name: i + 1 for i, name in enumerate(OBJECTS)},
        "idx_to_predicate": {str(i + 1): name for i, name in enumerate(PREDICATES)},
        "predicate_to_idx": {name: i + 1 for i, name in enumerate(PREDICATES)},
    }
    (folder / "VG-SGG-dicts.json").write_text(json.dumps(dicts))
    data = [{"image_id": int(one.name), "width": one.width, "height": one.height} for one in images]
    (folder / "image_data.json").write_text(json.dumps(data))
    return folder


def vrd_annotations(images: list[Drawn]) -> dict[str, list[dict]]:
    """Return the relations of each image in the VRD format, in which `bbox` is [ymin, ymax, xmin, xmax]."""

    def end(image: Drawn, box: int) -> dict:
        a, b, c, d = image.boxes[box]
        return {"category": image.labels[box], "bbox": [b, d, a, c]}

    return {
        f"{image.name}.jpg": [
            {"predicate": predicate, "subject": end(image, subject), "object": end(image, object_)}
            for subject, object_, predicate in image.relations
        ]
        for image in images
    }


def write_vrd(folder: Path, images: list[Drawn], sizes: bool = True) -> Path:
    """Write the official VRD files and, if `sizes` is True, the files with the image sizes."""
    folder.mkdir(exist_ok=True)
    (folder / "objects.json").write_text(json.dumps(OBJECTS))
    (folder / "predicates.json").write_text(json.dumps(PREDICATES))
    for part, split in (("train", 0), ("test", 2)):
        mine = [image for image in images if image.split == split]
        (folder / f"annotations_{part}.json").write_text(json.dumps(vrd_annotations(mine)))
        if sizes:
            table = {f"{one.name}.jpg": {"width": one.width, "height": one.height} for one in mine}
            (folder / f"{part}_image_metadata.json").write_text(json.dumps(table))
    return folder
