"""`python -m torchlml_lab` is the command `torchlml`."""

import sys

from torchlml_lab.cli import main

sys.exit(main())
