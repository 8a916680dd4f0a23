"""`torchlml figures NAME`: every picture of the documentation and of the studies, drawn again."""
