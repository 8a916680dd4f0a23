"""Everything that trains, measures and draws with torchlml, behind the command `torchlml`."""
