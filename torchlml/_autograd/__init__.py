"""The operators `torch.ops.torchlml.*` and their derivatives."""
