"""Support for rows whose labels are sharded across processes: the argument `group`, and DTensors.

These modules are private. They are imported when a call needs them, because importing
`torch.distributed.tensor` takes longer than importing torchlml.
"""
