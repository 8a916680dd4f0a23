"""`python -m torchlml` is the command `torchlml`."""

import sys

from torchlml.cli import main

sys.exit(main())
