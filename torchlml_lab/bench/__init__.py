"""`torchlml bench`: benchmarks of the projection, related operators and losses. Requires the `lab` extra."""
