"""Scene graphs: intact and damaged files of Visual Genome (Xu et al.) and VRD, batches and frequencies."""

import json
import os
from itertools import permutations
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.support.scene_graphs import OBJECTS, PREDICATES, Drawn, draw, vg_tables, write_vg, write_vrd
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.scene_graph import datasets
from torchlml_lab.studies.scene_graph.graphs import GraphBatches, RegionFeatures, candidates, split
from torchlml_lab.studies.scene_graph.model import LeaveOneOut, log_frequencies, word_vectors

# One pair of boxes has two relations, one of which is listed twice. The boxes are not sorted, and one image
# has no relations.
SMALL = [
    Drawn("7", [(200, 0, 300, 50), (0, 0, 100, 100)], [0, 3], [(0, 1, 2), (0, 1, 0), (0, 1, 2)]),
    Drawn("8", [(0, 0, 10, 10), (20, 0, 30, 10)], [1, 1], []),
    Drawn("9", [(0, 0, 10, 20), (4, 2, 30, 10), (2, 0, 500, 200)], [1, 2, 4], [(2, 0, 3)], split=2),
]


def triples(graphs):
    """Map each image to its relations: (subject box, subject, predicate, object box, object)."""
    found = {}
    for i, name in enumerate(graphs.names):
        first, last = graphs.box_offsets[i : i + 2].tolist()
        boxes = [tuple(map(round, box)) for box in graphs.boxes[first:last].tolist()]
        assert [a + c for a, _, c, _ in boxes] == sorted(a + c for a, _, c, _ in boxes)
        labels = graphs.labels[first:last].tolist()
        relations = graphs.relations[graphs.relation_offsets[i] : graphs.relation_offsets[i + 1]].tolist()
        found[name] = sorted(
            (boxes[s], OBJECTS[labels[s]], graphs.predicates[p], boxes[o], OBJECTS[labels[o]])
            for s, o, p in relations
        )
    return found


def drawn_triples(images):
    return {
        one.name: sorted(
            {
                (one.boxes[s], OBJECTS[one.labels[s]], PREDICATES[p], one.boxes[o], OBJECTS[one.labels[o]])
                for s, o, p in one.relations
            }
        )
        for one in images
    }


@pytest.mark.parametrize("images", [SMALL, draw(40)], ids=["small", "random"])
def test_visual_genome(tmp_path, images):
    training, test = datasets.read_visual_genome(write_vg(tmp_path, images))
    assert training.objects == OBJECTS
    assert triples(training) == drawn_triples([one for one in images if one.split == 0])
    assert triples(test) == drawn_triples([one for one in images if one.split == 2])
    assert training.sizes[0].tolist() == [512, 256]


def test_broken_images_of_visual_genome_are_skipped(tmp_path):
    write_vg(tmp_path, SMALL)
    data = json.loads((tmp_path / "image_data.json").read_text())
    data[1:1] = [{"image_id": 1592, "width": 1, "height": 1}]
    (tmp_path / "image_data.json").write_text(json.dumps(data))
    assert datasets.read_visual_genome(tmp_path)[0].names == ("7", "8")


@pytest.mark.skipif("TORCHLML_DATA" not in os.environ, reason="TORCHLML_DATA is not set")
def test_real_files():
    folder = Path(os.environ["TORCHLML_DATA"])
    training, test = datasets.read_visual_genome(folder / "vg")
    with h5py.File(folder / "vg" / "VG-SGG.h5") as file:
        split, boxes = file["split"][:], len(file["labels"])
        relations = np.unique(np.concatenate((file["relationships"][:], file["predicates"][:]), 1), axis=0)
    assert (len(training), len(test)) == ((split == 0).sum(), (split == 2).sum())
    assert len(training.boxes) + len(test.boxes) == boxes
    assert len(training.relations) + len(test.relations) == len(relations)
    training, test = datasets.read_vrd(folder / "vrd")
    assert (len(training), len(test), len(training.objects), len(training.predicates)) == (
        4000,
        1000,
        100,
        70,
    )


@pytest.mark.parametrize("sizes", [True, False])
def test_vrd(tmp_path, sizes):
    images = [one for one in draw(40) if one.relations]
    training, test = datasets.read_vrd(write_vrd(tmp_path, images, sizes))
    expected = drawn_triples([one for one in images if one.split == 0])
    assert triples(training) == {f"{name}.jpg": found for name, found in expected.items()}
    assert len(test) == 10
    assert (training.sizes == torch.tensor([512.0, 256.0])).all() == sizes


def test_a_box_related_to_itself_is_duplicated(tmp_path):
    image = Drawn("1", [(50, 0, 60, 10), (0, 0, 10, 10)], [0, 1], [(1, 1, 2), (1, 1, 3), (0, 1, 0)])
    training, _ = datasets.read_vrd(write_vrd(tmp_path, [image]))
    assert training.labels.tolist() == [1, 1, 0]
    assert training.rows.tolist() == [0, 0, 1]  # in the order in which the file mentions them
    assert training.relations.tolist() == [[0, 1, 2], [0, 1, 3], [2, 0, 0]]


def test_an_image_without_boxes(tmp_path):
    write_vrd(tmp_path, [*SMALL, Drawn("1", [], [], [])])
    training, test = datasets.read_vrd(tmp_path)
    assert training.names == ("7.jpg", "8.jpg", "1.jpg")
    assert training.box_offsets.tolist() == [0, 2, 2, 2]
    assert training.with_relations().names == ("7.jpg",)
    assert len(test) == 1


def change(table, row, value):
    def apply(tables):
        tables[table][row] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "image", "needle"),
    [
        (change("labels", 1, 6), "7", "the object class must be from 1 to 5, but it is 6"),
        (change("labels", 1, 0), "7", "the object class must be from 1 to 5, but it is 0"),
        (change("predicates", 3, 5), "9", "the predicate must be from 1 to 4, but it is 5"),
        (change("relationships", (3, 0), 2), "9", "the box of a relation must be from 0 to 2, but it is -2"),
        (change("relationships", (0, 1), 2), "7", "the box of a relation must be from 0 to 1, but it is 2"),
        (change("boxes_1024", (2, 2), 0), "8", ": box 0 from"),
        (change("boxes_1024", (2, 2), -4), "8", "has no area"),
        (change("boxes_1024", (5, 0), 2000), "9", "is not within 1024 x 1024"),
        (change("img_to_last_box", 2, 7), "9", "must delimit a range of the 7 entries, but they are 4 and 7"),
        (change("img_to_first_rel", 0, -1), "7", "`img_to_first_rel` and `img_to_last_rel` must delimit"),
        (change("split", 1, 1), "8", "its split must be 0 (train) or 2 (test), but it is 1"),
    ],
)
def test_damaged_visual_genome_names_file_and_image(tmp_path, damage, image, needle):
    tables = vg_tables(SMALL)
    damage(tables)
    with pytest.raises(BadInput) as error:
        datasets.read_visual_genome(write_vg(tmp_path, SMALL, tables))
    said = str(error.value)
    assert said.startswith(f"`{tmp_path / 'VG-SGG.h5'}` is damaged at image `{image}`: ")
    assert needle in said


def test_visual_genome_that_cannot_be_read(tmp_path):
    def rejected():
        with pytest.raises(BadInput) as error:
            datasets.read_visual_genome(tmp_path)
        return str(error.value)

    assert "VG-SGG.h5` cannot be read: No such file" in rejected()
    write_vg(tmp_path, SMALL)
    whole = (tmp_path / "VG-SGG.h5").read_bytes()
    (tmp_path / "VG-SGG.h5").write_bytes(whole[:3000])
    assert "VG-SGG.h5` cannot be read: it is not a complete HDF5 file" in rejected()
    tables = vg_tables(SMALL)
    write_vg(tmp_path, SMALL, {name: table for name, table in tables.items() if name != "predicates"})
    assert "VG-SGG.h5` must contain the array `predicates`" in rejected()
    write_vg(tmp_path, SMALL, tables | {"labels": tables["labels"][:-1]})
    assert (
        "`labels` must be an integer array of shape (7,), but it has dtype int64 and shape (6,)" in rejected()
    )
    write_vg(tmp_path, SMALL)
    (tmp_path / "image_data.json").write_text(json.dumps([{"image_id": 7, "width": 5, "height": 5}]))
    assert "image_data.json` has 1 images, but" in rejected()
    (tmp_path / "image_data.json").write_text('[{"image_id": 7')
    assert "image_data.json` cannot be read: it is not valid JSON" in rejected()
    write_vg(tmp_path, SMALL)
    (tmp_path / "VG-SGG-dicts.json").write_text('{"idx_to_label": {"2": "cat"}}')
    assert "VG-SGG-dicts.json`: `idx_to_label` must map" in rejected()


@pytest.mark.parametrize(
    ("damage", "needle"),
    [
        (lambda one: one.update(predicate=4), "the predicate must be from 0 to 3, but it is 4"),
        (lambda one: one.update(predicate=None), "the `predicate` of a relation is not an integer"),
        (lambda one: one["object"].update(category=5), "the object class must be from 0 to 4, but it is 5"),
        (lambda one: one["object"].update(bbox=[5, 5, 0, 9]), "has no area"),
        (lambda one: one["object"].update(bbox=[5, 9, 0]), "four integers in `bbox`"),
        (lambda one: one.pop("subject"), "the `subject` of a relation must have"),
    ],
)
def test_damaged_vrd_names_file_and_image(tmp_path, damage, needle):
    path = write_vrd(tmp_path, SMALL) / "annotations_train.json"
    data = json.loads(path.read_text())
    damage(data["7.jpg"][1])
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput) as error:
        datasets.read_vrd(tmp_path)
    assert str(error.value).startswith(f"`{path}` is damaged at image `7.jpg`: ")
    assert needle in str(error.value)


def test_the_validation_split_depends_on_the_seed(tmp_path):
    training, test = datasets.read_visual_genome(write_vg(tmp_path, draw(40)))
    one, other = split(training, test, 5, 0), split(training, test, 5, 1)
    assert [len(part) for part in one] == [25, 5, 10]
    assert set(one.training.names) | set(one.validation.names) == set(training.names)
    assert one.validation.names == split(training, test, 5, 0).validation.names != other.validation.names
    with pytest.raises(BadInput, match=r"`--validation` must be from 1 to 29, because .* but it is 30"):
        split(training, test, 30, 0)


def test_a_batch_has_all_pairs_and_finds_its_relations(tmp_path):
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, draw(40)))
    assert candidates(torch.tensor([0, 2, 2, 5]))[0].tolist() == [
        [0, 1],
        [1, 0],
        *[[s, o] for s in (2, 3, 4) for o in (2, 3, 4) if s != o],
    ]
    chosen = [3, 0, 11]
    batch = GraphBatches(training).__getitems__(chosen)
    found = []
    for image, edge, predicate in zip(
        torch.bucketize(batch.relation_edges, batch.edge_offsets[1:], right=True).tolist(),
        batch.relation_edges,
        batch.relation_predicates.tolist(),
        strict=True,
    ):
        subject, object_ = (batch.edges[edge] - batch.box_offsets[image]).tolist()
        found.append((image, subject, object_, predicate))
    expected = [
        (place, *row)
        for place, image in enumerate(chosen)
        for row in training.relations[
            training.relation_offsets[image] : training.relation_offsets[image + 1]
        ].tolist()
    ]
    assert sorted(found) == sorted(expected)
    assert batch.relation_edges.tolist() == sorted(batch.relation_edges.tolist())
    assert batch.boxes.min() >= 0
    assert batch.boxes.max() <= 1


def test_frequencies_are_counted(tmp_path):
    images = draw(30)
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, images))
    table = log_frequencies(training)
    images = [one for one in images if one.split == 0]
    for subject, object_ in ((0, 1), (2, 2), (4, 0)):
        pairs = 1 + sum(
            one.labels[s] == subject and one.labels[o] == object_
            for one in images
            for s in range(len(one.boxes))
            for o in range(len(one.boxes))
            if s != o
        )
        counts = [
            sum(
                one.labels[s] == subject and one.labels[o] == object_ and p == predicate
                for one in images
                for s, o, p in set(one.relations)
            )
            for predicate in range(4)
        ]
        expected = np.log(np.array([pairs, *counts]) / (pairs + sum(counts)) + 1e-3)
        np.testing.assert_allclose(table[subject, object_], expected, rtol=1e-6)


def test_counts_of_a_file_replace_the_relations(tmp_path):
    images = draw(30)
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, images))
    path = tmp_path / "counts.npz"
    columns = {"subject": [1, 1], "object": [2, 2], "predicate": [3, 4], "count": [30, 10]}
    np.savez(path, **{name: np.array(values) for name, values in columns.items()})
    pairs = sum(
        (one.labels[s], one.labels[o]) == (0, 1)
        for one in images
        if one.split == 0
        for s, o in permutations(range(len(one.labels)), 2)
    )
    # According to the file, all relations are between these two classes, and three quarters of them have the
    # same predicate.
    relations = len(training.relations)
    expected = torch.tensor([pairs + 1, 0, 0, 0.75 * relations, 0.25 * relations]) / (pairs + 1 + relations)
    given = log_frequencies(training, path).exp() - 1e-3
    torch.testing.assert_close(given[0, 1], expected)
    torch.testing.assert_close(given[1], torch.eye(5)[0].expand(5, 5))  # other classes have no relations
    said = {"predicate": "`predicate` that is", "subject": "`subject` that is", "count": "negative `count`"}
    for name, value in (("predicate", 5), ("subject", 0), ("count", -1)):
        np.savez(path, **{key: np.array([value] if key == name else [1]) for key in columns})
        with pytest.raises(BadInput, match=said[name]):
            log_frequencies(training, path)


def test_leave_one_out_is_the_bias_of_the_other_images(tmp_path):
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, draw(24)))
    batch = GraphBatches(training, shift=LeaveOneOut(training)).__getitems__([5, 0, 11, 3])
    twice = (batch.labels[batch.edges[1:]] == batch.labels[batch.edges[:-1]]).all(1)
    assert twice.any()  # a pair of classes occurs twice
    assert batch.bias_shift is not None
    subject, object_ = batch.labels[batch.edges].unbind(1)
    shifted = log_frequencies(training)[subject, object_] + batch.bias_shift
    for i, image in enumerate(batch.images.tolist()):
        others = training[torch.tensor([j for j in range(len(training)) if j != image])]
        edge = slice(*batch.edge_offsets[i : i + 2])
        torch.testing.assert_close(shifted[edge], log_frequencies(others)[subject[edge], object_[edge]])
    assert batch.bias_shift.min() < -1  # some relations occur in a single image


def test_word_vectors(tmp_path):
    (tmp_path / "glove.txt").write_text("cat 1 2\nbus 3 4\nred 5 8\nthe 0 0\n")
    expected = torch.tensor([[1.0, 2], [0, 0], [4, 6]])
    assert torch.equal(word_vectors(tmp_path / "glove.txt", ("cat", "dog", "red bus")), expected)
    np.savez(tmp_path / "glove.npz", names=np.array(["cat", "red bus"]), vectors=np.array([[1, 2], [4, 6.0]]))
    assert torch.equal(word_vectors(tmp_path / "glove.npz", ("cat", "dog", "red bus")), expected)
    unreadable, unknown = "cannot be read: it does not contain words", "must contain vectors of equal length"
    for content, message in ((b"cat 1 x\n", unreadable), (b"dog\xff", unreadable), (b"fish 1 2\n", unknown)):
        (tmp_path / "glove.txt").write_bytes(content)
        with pytest.raises(BadInput, match=rf"glove.txt` \(`--glove`\) {message}"):
            word_vectors(tmp_path / "glove.txt", ("cat",))


def test_region_features_follow_the_boxes(tmp_path):
    images = draw(12)
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, images))
    path = tmp_path / "regions.h5"
    with h5py.File(path, "w") as file:
        for one in images:
            corners = np.array(one.boxes, np.float32)
            file[f"{one.name}/boxes"] = corners
            file[f"{one.name}/unions"] = np.concatenate(np.broadcast_arrays(corners[:, None], corners), 2)
    regions = RegionFeatures(path, (training,))
    batch = GraphBatches(training, regions).__getitems__([4, 2])
    scale = torch.tensor([512.0, 256, 512, 256])
    torch.testing.assert_close(batch.box_features, batch.boxes * scale)
    pairs = (batch.boxes * scale)[batch.edges].flatten(1)
    torch.testing.assert_close(batch.union_features, pairs)
    with h5py.File(path, "a") as file:
        del file[f"{training.names[3]}/unions"]
    with pytest.raises(BadInput, match=f"image `{training.names[3]}` must contain the arrays"):
        RegionFeatures(path, (training,))
