"""`python -m torchlml` is the command `torchlml`."""

import sys

from torchlml_lab.cli import main

sys.exit(main())
