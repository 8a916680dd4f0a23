"""`torchlml bench`: what the projection costs beside softmax; needs the extra `lab`."""
