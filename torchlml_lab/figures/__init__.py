"""`torchlml figures NAME`: draw the figures in the documentation and the studies."""
