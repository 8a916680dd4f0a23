"""Scene-graph recall compared with a loop over triples that follows the definition."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch

from tests.support.scene_graph_example import EXAMPLE
from torchlml.metrics import SceneGraphRecall


def iou(a, b):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return width * height / (area - width * height)


def plain_hits(predicted, true, k, constrained):
    """Return, for every true relation of an image, whether one of the k best triples matches it."""
    boxes, labels = predicted["boxes"].tolist(), predicted["labels"].tolist()
    true_boxes, true_labels = true["boxes"].tolist(), true["labels"].tolist()
    triples = []
    for pair, (subject, object_) in enumerate(predicted["pairs"].tolist()):
        candidates = [
            (score, subject, object_, p) for p, score in enumerate(predicted["scores"][pair].tolist())
        ]
        triples += [max(candidates)] if constrained else candidates
    triples.sort(key=lambda triple: -triple[0])
    hits = []
    for true_subject, true_object, true_predicate in true["relations"].tolist():
        hits.append(
            any(
                predicate == true_predicate
                and labels[subject] == true_labels[true_subject]
                and labels[object_] == true_labels[true_object]
                and iou(boxes[subject], true_boxes[true_subject]) >= 0.5
                and iou(boxes[object_], true_boxes[true_object]) >= 0.5
                for _, subject, object_, predicate in triples[:k]
            )
        )
    return hits


def plain_recall(images, k, constrained, mean):
    if not mean:
        recalls = [hits for image in images if (hits := plain_hits(*image, k, constrained))]
        return sum(sum(hits) / len(hits) for hits in recalls) / len(recalls)
    per_predicate = collections.defaultdict(list)
    for predicted, true in images:
        hits = plain_hits(predicted, true, k, constrained)
        of_image = collections.defaultdict(list)
        for hit, predicate in zip(hits, true["relations"][:, 2].tolist(), strict=True):
            of_image[predicate].append(hit)
        for predicate, some in of_image.items():
            per_predicate[predicate].append(sum(some) / len(some))
    means = [sum(recalls) / len(recalls) for recalls in per_predicate.values()]
    return sum(means) / len(means)


def random_image(generator, predicates=5, detected=True):
    """Return an image with overlapping and repeated boxes, and with zero or more relations per pair."""

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    count = 2 + int(draw(5))
    corners = draw(12, count, 2).float()
    boxes = torch.cat([corners, corners + 3 + draw(9, count, 2)], 1)
    boxes[1] = boxes[0]  # the same box twice
    labels = draw(3, count)
    relations = torch.stack([draw(count, 12), draw(count, 12), draw(predicates, 12)], 1)
    relations = relations[relations[:, 0] != relations[:, 1]][: int(draw(10))]
    true = {"boxes": boxes, "labels": labels, "relations": relations}
    if detected:  # slightly shifted boxes, one random label, one box detected twice
        boxes = torch.cat([boxes + draw(3, count, 4) - 1, boxes[:1] + 0.25])
        boxes[:, 2:] = torch.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        labels = torch.cat([labels, labels[:1]])
        labels[0] = draw(3)
    every = torch.tensor(list(itertools.permutations(range(len(boxes)), 2)))
    pairs = every[torch.randperm(len(every), generator=generator)[: int(draw(len(every) + 1))]]
    scores = torch.rand(len(pairs), predicates, generator=generator)
    return {"boxes": boxes, "labels": labels, "pairs": pairs, "scores": scores}, true


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(3)
    return [random_image(generator, detected=bool(i % 2)) for i in range(60)]


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("mean", [True, False])
def test_recall_matches_its_definition_on_random_scene_graphs(images, constrained, mean):
    assert any(len(true["relations"]) == 0 for _, true in images)
    assert any(len(predicted["pairs"]) == 0 for predicted, _ in images)
    ks = (1, 5, 20, 100)
    recall = SceneGraphRecall(ks, constrained=constrained, mean=mean)
    for start in range(0, 60, 13):
        batch = images[start : start + 13]
        recall.update([predicted for predicted, _ in batch], [true for _, true in batch])
    found = recall.compute()
    name = ("" if constrained else "ng-") + ("mR" if mean else "R")
    assert list(found) == [f"{name}@{k}" for k in ks]
    for k in ks:
        expected = plain_recall(images, k, constrained, mean)
        assert 0 < expected < 1
        assert found[f"{name}@{k}"].item() == pytest.approx(expected, abs=1e-6)


def test_batch_values_and_the_total(images):
    recall = SceneGraphRecall(20, mean=True)
    for start in range(0, 60, 20):
        part = images[start : start + 20]
        value = recall([predicted for predicted, _ in part], [true for _, true in part])
        assert value.item() == pytest.approx(plain_recall(part, 20, True, True), abs=1e-6)
    assert recall.compute().item() == pytest.approx(plain_recall(images, 20, True, True), abs=1e-6)


def recall_of(predicted, true, k, **settings):
    recall = SceneGraphRecall(k, **settings)
    recall.update([predicted], [true])
    return recall.compute().item()


def test_several_relations_of_a_pair_are_found_only_without_the_constraint():
    assert recall_of(*EXAMPLE, 2) == 0.5
    assert recall_of(*EXAMPLE, 2, constrained=False) == 1
    assert recall_of(*EXAMPLE, 1, constrained=False) == 0.5


def test_an_overlap_of_exactly_one_half_is_enough():
    predicted, true = EXAMPLE
    half = {**true, "boxes": torch.tensor([[0.0, 0, 10, 5], [20, 20, 40, 40]])}
    assert recall_of(predicted, half, 1) == 0.5
    less = {**true, "boxes": torch.tensor([[0.0, 0, 10, 4.99], [20, 20, 40, 40]])}
    assert recall_of(predicted, less, 1) == 0
    points = torch.tensor([[1.0, 1, 1, 1], [2, 2, 2, 2]])
    assert recall_of({**predicted, "boxes": points}, {**true, "boxes": points}, 1) == 0.5
    assert recall_of({**predicted, "boxes": points}, {**true, "boxes": points.flip(0)}, 1) == 0


def test_a_repeated_true_relation_counts_as_often_as_it_is_listed():
    predicted, true = EXAMPLE
    relations = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0]])
    assert recall_of(predicted, {**true, "relations": relations[[0, 1, 2]]}, 1) == pytest.approx(2 / 3)


def test_ties_go_to_the_earlier_pair_and_the_lower_predicate():
    predicted, true = EXAMPLE
    tied = {**predicted, "scores": torch.ones(2, 2)}
    for constrained in (True, False):
        assert (
            recall_of(tied, {**true, "relations": torch.tensor([[0, 1, 0]])}, 1, constrained=constrained) == 1
        )
        assert (
            recall_of(tied, {**true, "relations": torch.tensor([[1, 0, 0]])}, 1, constrained=constrained) == 0
        )
    assert recall_of(tied, {**true, "relations": torch.tensor([[0, 1, 1]])}, 2, constrained=False) == 1


def test_images_without_relations_do_not_count():
    predicted, true = EXAMPLE
    empty = {**true, "relations": torch.zeros(0, 3, dtype=torch.int64)}
    for mean in (False, True):
        recall = SceneGraphRecall(2, mean=mean)
        recall.update([predicted, predicted], [empty, true])
        assert recall.compute() == 0.5
        recall.reset()
        recall.update([predicted], [empty])
        assert recall.compute().isnan()


@pytest.mark.parametrize(
    ("words", "changes", "true_changes"),
    [
        ("must have the keys", None, {}),
        ("`boxes` of shape (B, 4)", {"boxes": torch.zeros(2, 5)}, {}),
        ("`labels` of shape (B,)", {"labels": torch.zeros(3)}, {}),
        ("`scores` of shape (P, predicates)", {"scores": torch.zeros(3, 2)}, {}),
        ("must contain box indices from 0 to 1", {"pairs": torch.tensor([[0, 1], [1, 2]])}, {}),
        ("must not repeat a pair", {"pairs": torch.tensor([[0, 1], [0, 1]])}, {}),
        ("`relations` of shape (T, 3)", {}, {"relations": torch.zeros(2, 2)}),
        ("must contain predicate indices from 0 to 1", {}, {"relations": torch.tensor([[0, 1, 2]])}),
        ("must contain integer indices", {}, {"relations": torch.zeros(1, 3)}),
    ],
)
def test_wrong_images_raise(words, changes, true_changes):
    predicted, true = EXAMPLE
    predicted = {} if changes is None else {**predicted, **changes}
    with pytest.raises((TypeError, ValueError)) as caught:
        SceneGraphRecall(5).update([predicted], [{**true, **true_changes}])
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


def test_inconsistent_batches_raise():
    with pytest.raises(ValueError, match="one entry per image"):
        SceneGraphRecall(5).update([EXAMPLE[0]], [])
    recall = SceneGraphRecall(5, mean=True)
    recall.update([EXAMPLE[0]], [EXAMPLE[1]])
    with pytest.raises(ValueError, match=r"must have 2 columns .* as in earlier images, but it has 3"):
        recall.update([{**EXAMPLE[0], "scores": torch.zeros(2, 3)}], [EXAMPLE[1]])
