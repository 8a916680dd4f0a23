"""Hugging Face Trainer: pass the LML loss as `compute_loss_func`, with correct gradient accumulation."""

import tempfile

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

import torchlml

CLASSES, K = 20, 3


def lml_loss(outputs, labels, num_items_in_batch=None):
    """Return the contribution of one micro-batch to the mean loss over all samples of a step.

    `num_items_in_batch` counts the entries of `labels` in the step that are not -100. For multi-hot labels
    this is CLASSES times the number of samples.
    """
    total = torchlml.lml_loss(outputs["logits"], labels, K, reduction="sum")
    rows = len(labels) if num_items_in_batch is None else num_items_in_batch / CLASSES
    return total / rows


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, CLASSES)

    def forward(self, features, labels=None):
        return {"logits": self.linear(features)}


def train(size, parts):
    """Train with `parts` micro-batches of `size` samples per step. Return the weights and the mean loss."""
    torch.manual_seed(0)
    features, model = torch.randn(96, 8), Model()
    labels = torch.zeros(96, CLASSES).scatter(1, torch.rand(96, CLASSES).topk(K).indices, 1.0)
    data = [{"features": x, "labels": y} for x, y in zip(features, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            learning_rate=0.1,
            optim="sgd",
            use_cpu=True,
            **quiet,
        )
        trainer = Trainer(model, args, train_dataset=data, compute_loss_func=lml_loss)
        trainer.remove_callback(PrinterCallback)
        result = trainer.train()
    return model.linear.weight.detach(), result.training_loss


whole, loss = train(size=24, parts=1)
accumulated, again = train(size=6, parts=4)
print(f"mean loss {loss:.3f} with one batch per step, {again:.3f} with four micro-batches")
print(f"weights differ by less than 1e-5: {(whole - accumulated).abs().max().item() < 1e-5}")
