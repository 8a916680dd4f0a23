"""MotifNet-LeftRight (Zellers et al. 2018) for predicate classification with given boxes and labels."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding

from torchlml_lab.studies.scene_graph.graphs import Batch

GRID = 8  # cells per side of the masks
POSITION = 128


class MotifNet(nn.Module):
    """Computes a score for every predicate on every candidate edge of every image in a batch.

    Args:
        objects: The number of object classes.
        outputs: The number of scores per edge: one per predicate, plus one for "no relation" if learned.
        bias: (objects, objects, outputs) the initial frequency bias, or None for no bias.
        vectors: (objects, d) the initial object embeddings (zero rows are initialized randomly), or None.
        regions: The sizes of the region features of boxes and unions; None for a model without vision.
        hidden: The size of the context of an object, over both directions.
        dropout: The dropout probability of embeddings and contexts.
    """

    def __init__(
        self,
        objects: int,
        outputs: int,
        bias: Tensor | None = None,
        vectors: Tensor | None = None,
        regions: tuple[int, int] | None = None,
        hidden: int = 256,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        width = 200 if vectors is None else vectors.shape[1]
        # Motifs embeds the labels twice, for the object context and for the edge context.
        self.object_embedding, self.edge_embedding = (_embedding(objects, width, vectors) for _ in range(2))
        self.position = nn.Sequential(nn.Linear(6, POSITION), nn.ReLU())
        seen = 0 if regions is None else regions[0]
        self.object_context = _Context(width + POSITION + seen, hidden)
        self.edge_context = _Context(width + seen + hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.subject, self.object = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 2 * hidden)
        self.masks = nn.Sequential(
            _SmallConvolution(2, 16, GRID),
            nn.ReLU(),
            _SmallConvolution(16, 32, GRID // 2),
            nn.ReLU(),
            nn.Linear(32 * (GRID // 4) ** 2, 2 * hidden),
        )
        self.union = None if regions is None else nn.Linear(regions[1], 2 * hidden)
        self.predicates = nn.Linear(2 * hidden, outputs)
        for end in (self.subject, self.object):
            # The product of two contexts must be large enough to matter, but not saturate the tanh.
            nn.init.normal_(end.weight, std=1.3 * hidden**-0.5)
        self.bias = None if bias is None else nn.Embedding.from_pretrained(bias.flatten(0, 1), freeze=False)
        self.objects = objects

    def forward(self, batch: Batch) -> Tensor:
        """The scores (E, outputs) of the candidate edges of a batch."""
        seen = [] if batch.box_features is None else [batch.box_features]
        position = self.position(_places(batch.boxes))
        inputs = torch.cat((*seen, self.object_embedding(batch.labels), position), 1)
        context = self.object_context(self.dropout(inputs), batch.box_offsets)
        inputs = torch.cat((*seen, self.edge_embedding(batch.labels), context), 1)
        context = self.dropout(self.edge_context(self.dropout(inputs), batch.box_offsets))
        subject, object_ = batch.edges.unbind(1)
        pair = embedding(subject, self.subject(context)) * embedding(object_, self.object(context))
        region = self.masks(masks(batch.boxes[subject], batch.boxes[object_]).flatten(1))
        if self.union is not None:
            region = region + self.union(batch.union_features)
        # The pair is multiplied by 1 + region, so that it passes while the region features are still small.
        scores = self.predicates(torch.tanh(torch.addcmul(pair, pair, region)))
        if self.bias is not None:
            scores = scores + self.bias(batch.labels[subject] * self.objects + batch.labels[object_])
        if batch.bias_shift is not None:
            scores = scores + batch.bias_shift[:, -scores.shape[1] :]
        return scores


class _SmallConvolution(nn.Conv2d):
    """A 3 x 3 convolution with stride 2 of flattened images.

    It is one matrix product over all edges. The matrix is the convolution of the unit images, which are far
    fewer than the edges. The backward pass of a direct convolution of so many tiny images takes twice as
    long.
    """

    def __init__(self, channels: int, more: int, side: int) -> None:
        super().__init__(channels, more, 3, stride=2, padding=1)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        units = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        units = units.view(-1, self.in_channels, self.side, self.side)
        matrix = conv2d(units, self.weight, None, self.stride, self.padding).flatten(1)
        assert self.bias is not None
        bias = self.bias.repeat_interleave(matrix.shape[1] // self.out_channels)
        return torch.addmm(bias, x, matrix)


class _Context(nn.Module):
    """Computes the context of each box with LSTMs over the boxes from left to right and back."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.onward, self.back = (nn.LSTM(inputs, hidden // 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.diff()
        image = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
        place = torch.arange(len(x), device=x.device) - offsets[image]
        mirrored = lengths[image] - 1 - place
        # The padding follows the boxes of an image in either direction, so that it does not affect them. A
        # packed sequence would not need padding, but takes 1.5 times as long on a CPU.
        empty = x.new_zeros(len(lengths), int(lengths.max()), x.shape[1])
        onward = self.onward(empty.index_put((image, place), x))[0][image, place]
        back = self.back(empty.index_put((image, mirrored), x))[0][image, mirrored]
        return torch.cat((onward, back), 1)


def masks(subject: Tensor, object_: Tensor) -> Tensor:
    """Draw two boxes on a small grid over their union, as Motifs does.

    Args:
        subject: (E, 4) boxes.
        object_: (E, 4) boxes.

    Returns:
        (E, 2, GRID, GRID): the share of each cell covered by the subject and by the object, minus 0.5.
    """
    low = torch.minimum(subject[:, :2], object_[:, :2]).unsqueeze(1)
    size = (torch.maximum(subject[:, 2:], object_[:, 2:]).unsqueeze(1) - low).clamp(min=1e-6)
    corners = torch.stack((subject, object_), 1).unflatten(2, (2, 2))
    corners = (corners - low.unsqueeze(2)) / size.unsqueeze(2) * GRID  # (E, box, low or high, x or y)
    cell = torch.arange(GRID, device=subject.device)
    start, end = corners.unsqueeze(-1).unbind(2)
    covered = (torch.minimum(end, cell + 1) - torch.maximum(start, cell)).clamp(min=0)
    # covered is (E, box, x or y, cell); a rectangle is the outer product of its two sides.
    return covered[:, :, 1].unsqueeze(3) * covered[:, :, 0].unsqueeze(2) - 0.5


def _places(boxes: Tensor) -> Tensor:
    """The center, size and log size of boxes in [0, 1]."""
    size = boxes[:, 2:] - boxes[:, :2]
    return torch.cat((boxes[:, :2] + size / 2, size, size.clamp(min=1e-4).log()), 1)


def _embedding(objects: int, width: int, vectors: Tensor | None) -> nn.Embedding:
    table = nn.Embedding(objects, width)
    if vectors is not None:
        known = (vectors != 0).any(1, keepdim=True)
        table.weight.data.copy_(torch.where(known, vectors, table.weight.data))
    return table
