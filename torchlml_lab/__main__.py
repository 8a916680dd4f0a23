"""Entry point for `python -m torchlml_lab`, equivalent to the command `torchlml`."""

import sys

from torchlml_lab.cli import main

sys.exit(main())
