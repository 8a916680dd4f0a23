"""Scene graphs end to end: model, objectives, recall, resumed runs and runs with two processes."""

import json
import re

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

import torchlml
from tests.support.command_lines import each_rejection, made, rejected, rejections
from tests.support.processes import output, start_two
from tests.support.scene_graphs import Drawn, draw, write_vg, write_vrd
from torchlml.metrics import SceneGraphRecall
from torchlml_lab import cli
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.studies.scene_graph import datasets, objectives
from torchlml_lab.studies.scene_graph.graphs import GraphBatches
from torchlml_lab.studies.scene_graph.model import GRID, MotifNet, masks
from torchlml_lab.studies.scene_graph.settings import OBJECTIVES
from torchlml_lab.studies.scene_graph.task import (
    KS,
    MEAN_RECALLS,
    RECALLS,
    measure,
    measure_predicates,
    score,
)


@pytest.fixture(scope="module")
def vg(tmp_path_factory):
    return write_vg(tmp_path_factory.mktemp("vg"), draw(60))


@pytest.fixture(scope="module")
def training(vg):
    return datasets.read_visual_genome(vg)[0]


def images_of(batch, scores):
    """Yield predictions and targets in the metric's format, one image at a time."""
    for i in range(len(batch.images)):
        first, last = batch.box_offsets[i : i + 2]
        edge = slice(*batch.edge_offsets[i : i + 2])
        inside = (batch.relation_edges >= edge.start) & (batch.relation_edges < edge.stop)
        ends = batch.edges[batch.relation_edges[inside]] - first
        objects = {"boxes": batch.boxes[first:last], "labels": batch.labels[first:last]}
        yield (
            objects | {"pairs": batch.edges[edge] - first, "scores": scores[edge]},
            objects | {"relations": torch.cat((ends, batch.relation_predicates[inside][:, None]), 1)},
        )


def test_recall_matches_the_metric(training):
    data = GraphBatches(training)
    batches = [data.__getitems__(range(i, min(i + 7, len(data)))) for i in range(0, len(data), 7)]
    scores = {batch.images[0].item(): torch.randn(len(batch.edges), 4) for batch in batches}
    found = measure(score(lambda batch: scores[batch.images[0].item()], batches, Accelerator(cpu=True)))
    expected: dict[str, float] = {}
    for constrained in (True, False):
        for mean in (False, True):
            metric = SceneGraphRecall(KS, constrained, mean)
            for batch in batches:
                predicted, true = zip(*images_of(batch, scores[batch.images[0].item()]), strict=True)
                metric.update(predicted, true)
            expected |= {name: value.item() for name, value in metric.compute().items()}
    assert set(expected) == {*RECALLS, *MEAN_RECALLS}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < found["R@20"] < found["ng-R@100"]
    assert found["recall"] == pytest.approx(sum(expected[name] for name in RECALLS) / 6)


def test_recall_by_hand(tmp_path):
    # 5 boxes far apart have 20 pairs and 80 triples, so the first 100 contain all triples, but the first 20
    # do not.
    boxes = [(90 * i, 0, 90 * i + 40, 40) for i in range(5)]
    relations = [(0, 1, 0), (0, 1, 1), (2, 3, 2)]
    image = Drawn("1", boxes, [0, 1, 2, 3, 4], relations)
    batch = GraphBatches(datasets.read_visual_genome(write_vg(tmp_path, [image]))[0])[0]
    scores = torch.zeros(20, 4)
    scores[:, 3] = torch.arange(20) + 10.0  # an unobserved predicate ranks first on all edges except 0-1
    scores[0, 0] = 100  # an observed predicate ranks first overall
    scores[0, 1] = 50  # the second observed predicate ranks second overall
    scores[batch.edges.tolist().index([2, 3]), 2] = 9  # the third ranks below all unobserved predicates
    scored = list(score(lambda batch: scores, [batch], Accelerator(cpu=True)))
    found = measure(scored)
    per_predicate, images = measure_predicates(scored, 4)
    # With the constraint, 0-1 keeps only predicate 0, and 2-3 keeps only predicate 3. Without the constraint,
    # the observed relations have ranks 0, 1 and 22.
    assert [found[name] for name in RECALLS] == pytest.approx([1 / 3] * 3 + [2 / 3, 1, 1])
    assert per_predicate[:, :3].tolist() == [[1, 0, 0]] * 3 + [[1, 1, 0]] + [[1, 1, 1]] * 2
    assert per_predicate[:, 3].isnan().all()
    assert images.tolist() == [1, 1, 1, 0]


def network(training, objective="lml"):
    outputs = objectives.has_background(objective) + 4
    return MotifNet(len(training.objects), outputs, None, None, None, 16, 0.0).double()


def double(batch):
    return batch._replace(boxes=batch.boxes.double())


def test_an_image_alone_equals_the_image_in_a_batch(training):
    data = GraphBatches(training)
    model = network(training).eval()
    batch = double(data.__getitems__(range(12)))
    together = model(batch)
    for i in range(12):
        alone = model(double(data.__getitems__([i])))
        torch.testing.assert_close(together[batch.edge_offsets[i] : batch.edge_offsets[i + 1]], alone)
    # Through the context, an object affects all edges of its image, but not those of other images.
    labels = batch.labels.clone()
    labels[0] = (labels[0] + 1) % 5
    moved = (model(batch._replace(labels=labels)) != together).any(1)
    assert moved[: batch.edge_offsets[1]].all()
    assert not moved[batch.edge_offsets[1] :].any()


def test_masks_are_the_two_rectangles():
    subject, object_ = torch.tensor([[0.0, 0.0, 0.5, 0.5]]), torch.tensor([[0.25, 0.25, 1.0, 0.5]])
    drawn = masks(subject, object_)[0] + 0.5
    # The union is 1 wide and 0.5 high.
    expected = torch.zeros(2, GRID, GRID)
    expected[0, :, : GRID // 2] = 1
    expected[1, GRID // 2 :, GRID // 4 :] = 1
    torch.testing.assert_close(drawn, expected)


def test_the_bias_is_added_by_subject_and_object(training):
    bias = torch.randn(5, 5, 4)
    batch = GraphBatches(training).__getitems__(range(5))
    torch.manual_seed(0)
    plain = MotifNet(5, 4, None, None, None, 16, 0.2).eval()
    torch.manual_seed(0)
    biased = MotifNet(5, 4, bias, None, None, 16, 0.2).eval()
    added = bias[batch.labels[batch.edges[:, 0]], batch.labels[batch.edges[:, 1]]]
    torch.testing.assert_close(biased(batch), plain(batch) + added)


def test_the_shift_of_the_bias_is_added_to_the_scores(training):
    batch = GraphBatches(training).__getitems__(range(5))
    model = MotifNet(5, 4, None, None, None, 16, 0.2).eval()
    shift = torch.randn(len(batch.edges), 5)  # the first column is "no relation", which only softmax scores
    torch.testing.assert_close(model(batch._replace(bias_shift=shift)), model(batch) + shift[:, 1:])


def test_the_masks_are_convolved(training):
    """The result matches torch's convolution applied to one edge at a time."""
    batch = GraphBatches(training).__getitems__(range(3))
    drawn = masks(*batch.boxes[batch.edges].unbind(1))
    model = MotifNet(5, 4, None, None, None, 16, 0.2)
    first, _, second, _, last = model.masks
    for edge in range(3):
        x = conv2d(drawn[edge], first.weight, first.bias, 2, 1).relu()
        x = conv2d(x, second.weight, second.bias, 2, 1).relu().flatten()
        torch.testing.assert_close(model.masks(drawn.flatten(1))[edge], last(x))


def test_contexts_match_a_bidirectional_lstm(training):
    batch = double(GraphBatches(training).__getitems__(range(6)))
    model = network(training).eval()
    inputs = torch.randn(len(batch.labels), 328, dtype=torch.float64)
    plain = nn.LSTM(328, 8, bidirectional=True, batch_first=True).double()
    weights = {
        **model.object_context.onward.state_dict(),
        **{f"{name}_reverse": one for name, one in model.object_context.back.state_dict().items()},
    }
    plain.load_state_dict(weights)
    for i in range(6):
        box = slice(*batch.box_offsets[i : i + 2])
        expected = plain(inputs[box].unsqueeze(0))[0].squeeze(0)
        torch.testing.assert_close(model.object_context(inputs, batch.box_offsets)[box], expected)


def loop_loss(objective, scores, batch, k):
    """Return the mean loss by its definition, computed one image and one relation at a time."""
    losses = []
    for i in range(len(batch.images)):
        start, stop = batch.edge_offsets[i : i + 2].tolist()
        inside = (batch.relation_edges >= start) & (batch.relation_edges < stop)
        x = scores[start:stop].flatten()
        y = (batch.relation_edges[inside] - start) * 4 + batch.relation_predicates[inside]
        others = [j for j in range(len(x)) if j not in y.tolist()]
        if objective == "lml":
            p = torchlml.lml(x, min(k, x.numel()))
            losses.append(-sum(p[j].log() for j in y))
        elif objective == "bce":
            p = x.sigmoid()
            losses.append(-p[y].log().sum() - (1 - p[others]).log().sum())
        else:
            kept = x[others].sort().values[: len(x) - k] if len(x) > k else x[:0]
            losses.append(sum(torch.log(1 + (kept - x[j]).exp().sum()) for j in y))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("objective", ["lml", "truncated-entropy", "bce"])
@pytest.mark.parametrize("k", [3, 20])
def test_an_objective_equals_a_loop_over_images(training, objective, k):
    """The loss and the gradients of all weights agree, even if images have fewer than k candidates."""
    batch = double(GraphBatches(training).__getitems__(range(9)))
    assert (batch.edge_offsets.diff() * 4 < 20).any()
    assert (batch.relation_edges[1:] == batch.relation_edges[:-1]).any()  # several relations on an edge
    model = network(training, objective)
    gradients = []
    for loss in (objectives.loss, loop_loss):
        value = loss(objective, model(batch), batch, k)
        found = torch.autograd.grad(value, list(model.parameters()))
        gradients.append((value, *found))
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


def test_softmax_follows_motifs(training, monkeypatch):
    batch = GraphBatches(training).__getitems__(range(9))
    scores = torch.randn(len(batch.edges), 5, dtype=torch.float64)
    several = (batch.relation_edges[1:] == batch.relation_edges[:-1]).nonzero().squeeze(1)
    assert len(several) > 0
    seen = set()
    for _ in range(30):
        value = objectives.loss("softmax", scores, batch, 20)
        seen.add(round(value.item(), 10))
    choices = {
        (e, p) for e, p in zip(batch.relation_edges.tolist(), batch.relation_predicates.tolist(), strict=True)
    }
    label = torch.zeros(len(scores), dtype=torch.int64)
    possible: dict[int, list[int]] = {}
    for edge, predicate in choices:
        possible.setdefault(edge, []).append(predicate + 1)
    for edge, options in possible.items():
        label[edge] = options[0]
    each = cross_entropy(scores, label, reduction="none")
    totals = {each.sum().item()}
    for edge, options in possible.items():
        totals = {
            total - each[edge].item() + cross_entropy(scores[edge], torch.tensor(option)).item()
            for total in totals
            for option in options
        }
    # Each edge gets one of its relations at random. Every sampled relation is valid, and the choice varies.
    assert len(seen) > 1
    assert seen <= {round(total / len(scores), 10) for total in totals}
    # With a limit on the number of edges, edges with a relation are kept, and other edges are sampled.
    monkeypatch.setattr(objectives, "EDGES_PER_IMAGE", 10)
    scores = torch.zeros(len(batch.edges), 5, dtype=torch.float64)
    scores[:, 0] = 40
    kept = 9 * 10
    assert len(batch.edges) > kept
    value = objectives.loss("softmax", scores, batch, 20)
    assert value.item() == pytest.approx(40 * len(possible) / kept)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_probabilities_have_the_order_of_the_ranking(objective):
    scores = torch.randn(12, 5 if objectives.has_background(objective) else 4, dtype=torch.float64)
    p = objectives.probabilities(objective, scores, 7)
    assert p.shape == (12, 4)
    assert 0 < p.min() < p.max() < 1
    assert torch.equal(p.flatten().argsort(), objectives.ranking(objective, scores).flatten().argsort())
    if objective == "lml":
        assert p.sum().item() == pytest.approx(7)


def words(vg, out, *more):
    options = ["--vg", str(vg), "--out", str(out), "--validation", "10", "--hidden", "16", "--epochs", "4"]
    return ["train", "scene-graph", *options, *more]


def test_lml_memorizes_ten_images(tmp_path):
    images = [image for image in draw(16, seed=3) if image.split == 0][:10]
    for image in images:  # make box 0 the leftmost box
        image.boxes[0] = (0, 0, 20, 20)
    training, _ = datasets.read_visual_genome(write_vg(tmp_path, images))
    batch = GraphBatches(training).__getitems__(range(10))
    torch.manual_seed(0)
    model = MotifNet(5, 4, None, None, None, 64, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        objectives.loss("lml", model(batch), batch, 3).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = measure(score(model, [batch], Accelerator(cpu=True)))
    assert found["ng-R@20"] > 0.95
    # An image has at most five relations. Check that almost all of them are in the top five.
    first = SceneGraphRecall(5, constrained=False)
    predicted, true = zip(*images_of(batch, model(batch).detach()), strict=True)
    first.update(predicted, true)
    assert first.compute() > 0.95


@pytest.fixture(scope="module")
def whole(vg, tmp_path_factory):
    """An uninterrupted run."""
    return made(words(vg, tmp_path_factory.mktemp("whole") / "run"))


def test_a_run_records_training_and_validation_metrics(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    expected = [(epoch, part) for epoch in (1, 2, 3, 4) for part in ("train", "validation")]
    assert [(line["epoch"], line["split"]) for line in lines[:-1]] == expected
    assert lines[-1]["split"] == "test"
    result = json.loads((whole / "result.json").read_text())
    best = max(lines[1:-1:2], key=lambda line: (line["recall"], -line["epoch"]))
    assert result["best_epoch"] == best["epoch"]
    assert result["validation"] == {name: best[name] for name in result["test"]}
    assert {*RECALLS, *MEAN_RECALLS, "recall"} == set(result["test"])


def test_gradients_are_clipped(vg, tmp_path, monkeypatch):
    limits = []
    plain = Accelerator.clip_grad_norm_

    def clip(self, parameters, most, *more):
        parameters = list(parameters)
        limits.append(most)
        found = plain(self, parameters, most, *more)
        norm = sum(one.grad.square().sum() for one in parameters if one.grad is not None).sqrt()
        assert norm <= most * 1.0001
        return found

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", clip)
    assert cli.main(words(vg, tmp_path / "run", "--epochs", "1", "--clip", "0.01")) == 0
    assert limits == [0.01] * 3  # 35 images in batches of 16


def test_training_uses_one_thread_by_default(vg, tmp_path, monkeypatch):
    used, plain = set(), objectives.loss

    def recorded(*arguments):
        used.add(torch.get_num_threads())
        return plain(*arguments)

    monkeypatch.setattr(objectives, "loss", recorded)
    with use_threads(3):
        assert cli.main(words(vg, tmp_path / "run", "--epochs", "1")) == 0
    assert used == {1}


def test_a_stopped_and_resumed_run_equals_an_undisturbed_run(capsys, vg, whole, tmp_path, monkeypatch):
    out, steps, plain = tmp_path / "run", [], objectives.loss

    def stop(*arguments):
        steps.append(1)
        if len(steps) == 6 + 8:  # after the forecast's 6 steps, in the middle of the third epoch of 3 steps
            raise RuntimeError("The power is gone.")
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(objectives, "loss", stop)
        assert cli.main(words(vg, out)) == 1
    assert "The power is gone." in capsys.readouterr().err
    assert json.loads((out / "state.json").read_text())["epoch"] == 2
    assert cli.main(["train", "scene-graph", "--resume", str(out)]) == 0
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_two_processes(vg, tmp_path):
    out = tmp_path / "run"
    printed, _ = output(*start_two(words(vg, out, "--cpu", "--epochs", "1")))
    assert printed.count("Test results for epoch") == 1
    assert json.loads((out / "state.json").read_text())["processes"] == 2
    result = json.loads((out / "result.json").read_text())
    assert 0 < result["test"]["R@20"] <= 1


@pytest.mark.parametrize("objective", ["softmax", "truncated-entropy", "bce"])
def test_every_objective_trains_on_vrd(capsys, tmp_path, objective):
    folder = write_vrd(tmp_path / "vrd", draw(24))
    options = ["--vrd", str(folder), "--objective", objective, "--validation", "4", "--hidden", "16"]
    more = {"softmax": "--leave-one-out", "bce": "--one-per-edge"}.get(objective, "--without-bias")
    out = ["--out", str(tmp_path / "run")]
    assert cli.main(["train", "scene-graph", *options, more, *out, "--epochs", "1"]) == 0
    assert re.search(
        r"Test results for epoch 1, the best on validation: R@20 \d.*%, .* \(vision-free\)",
        capsys.readouterr().out,
    )


@each_rejection(
    rejections("`{}` must be at least 1, but it is {}", "--k 0"),
    rejections("`{}` must be even and at least 2, but it is {}", "--hidden 7"),
    rejections("`{}` must be positive, but it is {}", "--clip nan", "--clip 0"),
    rejections("`{}` must be from 1 to ", "--validation 45"),
    rejections("`{}` must be at least 0 and less than 1, but it is {}.0", "--dropout 1"),
    rejections("`{}` must be finite and at least 0, but it is {}.0", "--weight-decay -1"),
    rejections("`{1}` (`{0}`) cannot be read", "--glove no.txt", "--counts no.npz"),
    {"--vrd x": "Pass exactly one of `--vg` (Visual Genome) and `--vrd`", "--objective hinge": "hinge"},
    {"--counts no.npz --without-bias": "`--counts` cannot be combined with `--without-bias`"},
    {"--leave-one-out --without-bias": "`--leave-one-out` cannot be combined with `--without-bias`"},
    {"--counts no.npz --leave-one-out": "`--counts` cannot be combined with `--leave-one-out`"},
    {"--region-features no.h5": "`no.h5` cannot be read: No such file"},
)
def test_bad_settings(capsys, vg, tmp_path, options, needle):
    assert needle in rejected(capsys, words(vg, tmp_path / "run", *options))
