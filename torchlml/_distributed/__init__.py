"""Rows whose labels are sharded across processes: `group=` and DTensors in the functions of the library.

Users do not call anything here. The modules are imported when a call needs them, because importing
`torch.distributed.tensor` takes longer than importing torchlml.
"""
