"""`torchlml bench`: benchmarks of the projection, related operators and losses; requires the `lab` extra."""
