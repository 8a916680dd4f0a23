"""Lightning: use the loss in `training_step` and TopKRecall in `validation_step`."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlml
from torchlml.metrics import TopKRecall


class Tagger(lightning.LightningModule):
    def __init__(self, features, tags, k):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, tags))
        self.loss = torchlml.LMLLoss(k)
        self.recall = TopKRecall(k=k)

    def training_step(self, batch, _):
        x, labels = batch
        return self.loss(self.network(x), labels)

    def validation_step(self, batch, _):
        x, labels = batch
        self.recall(self.network(x), labels)
        self.log("recall", self.recall)  # Lightning calls compute() and reset() once per epoch

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(1200, 16)
labels = (x @ torch.randn(16, 40)).topk(3).indices
train = DataLoader(TensorDataset(x[:1000], labels[:1000]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(x[1000:], labels[1000:]), batch_size=64)
quiet = dict.fromkeys(
    ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
)
trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", **quiet)
model = Tagger(16, 40, k=3)
print(f"before: recall@3 {trainer.validate(model, test, verbose=False)[0]['recall']:.2f}")
trainer.fit(model, train, test)
print(f"after:  recall@3 {trainer.validate(model, test, verbose=False)[0]['recall']:.2f}")
