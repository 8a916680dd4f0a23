"""The solver behind `torchlml.balanced_lml`. Nothing here is called by users."""
