"""Top-5 classification with label noise: a fraction of the training labels is random."""

import torch
from torch import nn
from torch.nn import functional as F

import torchlml
from torchlml.metrics import TopKRecall

torch.manual_seed(0)
classes, k = 50, 5
centers = torch.randn(classes, 20)


def draw(count, noise):
    """Draw points around the class centers, and resample a fraction `noise` of their labels."""
    label = torch.randint(classes, (count,))
    features = centers[label] + 1.5 * torch.randn(count, 20)
    return features, torch.where(torch.rand(count) < noise, torch.randint(classes, (count,)), label)


test_features, test_labels = draw(4000, noise=0.0)
losses = {
    "cross-entropy": F.cross_entropy,
    "truncated entropy": torchlml.TruncatedEntropyLoss(k),
    "LML": torchlml.LMLLoss(k),
}
for noise in (0.0, 0.4):
    features, labels = draw(4000, noise)
    for name, loss in losses.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, classes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(200):
            batch = torch.randint(len(labels), (256,))
            optimizer.zero_grad()
            loss(model(features[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            recall = TopKRecall(k=(1, k))(model(test_features), test_labels)
        print(f"noise {noise}  {name:17s}  top-1 {recall['recall@1']:.2f}, top-5 {recall['recall@5']:.2f}")
