"""Train a classifier whose last layer is sharded by labels across processes.

Run it with `torchrun --nproc-per-node 2 examples/sharded_labels.py`. After initialization, no process holds
the whole last layer, and no process ever holds the logits of all labels. The data set is synthetic: the
samples of each label are random points around a center. The program prints the final loss and recall@k.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchlml
from torchlml.metrics import TopKRecall

LABELS, FEATURES, K = 1000, 16, 5


class Classifier(nn.Module):
    """A classifier with two layers. The weight matrix of the second layer has one row per label."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU())
        self.head = nn.Linear(64, LABELS)

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return torchlml.linear_lml_loss(hidden, self.head.weight, target, K, linear_bias=self.head.bias)


def main() -> None:
    """Train the classifier, and print its last training loss and its recall@k."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("labels",))
    torch.manual_seed(0)  # the same first layer and the same batches on every process
    centers = torch.randn(LABELS, FEATURES)
    model = Classifier()
    parallelize_module(model, mesh, {"head": ColwiseParallel(use_local_output=False)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        target = torch.randint(LABELS, (128,))
        loss = model.loss(centers[target] + 0.3 * torch.randn(128, FEATURES), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model.head(model.body(centers)).to_local()
    recall = TopKRecall(K, group=mesh)
    recall.update(logits, torch.arange(LABELS))
    found = recall.compute()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, recall@{K} {found:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
