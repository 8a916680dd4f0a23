"""Token pruning: keep exactly k tokens of a sequence, and learn from the task loss which tokens to keep."""

import torch
from torch import nn
from torch.nn import functional as F

import torchlml

torch.manual_seed(0)
LENGTH, KEEP, WIDTH, CLASSES = 32, 4, 16, 5
marker, words = torch.randn(WIDTH), torch.randn(CLASSES, WIDTH)


def sequences(count):
    """Draw noise tokens, and add the class signal and a marker to four of them at random positions."""
    label = torch.randint(CLASSES, (count,))
    tokens = torch.randn(count, LENGTH, WIDTH)
    places = torch.rand(count, LENGTH).topk(KEEP).indices
    signal = (0.7 * words[label] + 1.5 * marker)[:, None].expand(-1, KEEP, -1)
    return tokens.scatter_add(1, places[..., None].expand(-1, -1, WIDTH), signal), label, places


scorer, head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)
optimizer = torch.optim.AdamW([*scorer.parameters(), *head.parameters()], lr=1e-2)
for step in range(301):
    tokens, label, places = sequences(128)
    keep = torchlml.topk_mask(scorer(tokens).squeeze(-1), KEEP)  # exactly four ones, with the gradient of lml
    pooled = (keep[..., None] * tokens).sum(1) / KEEP
    logits = head(pooled)
    loss = F.cross_entropy(logits, label)
    if step % 100 == 0:
        right = (logits.argmax(-1) == label).float().mean()
        found = keep.gather(1, places).mean()
        print(f"step {step:3d}: accuracy {right:.2f}, fraction of marked tokens kept {found:.2f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

kept = keep.nonzero()[:, 1].view(-1, KEEP)  # for inference: gather k tokens and drop the rest
print("shape after pruning:", tuple(tokens.gather(1, kept[..., None].expand(-1, -1, WIDTH)).shape))
