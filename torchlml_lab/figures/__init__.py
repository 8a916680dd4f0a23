"""`torchlml figures NAME`: draw the figures of the documentation and of the studies."""
