"""`torchlml bench`: benchmarks of the projection and the losses. Requires the extra `lab`."""
