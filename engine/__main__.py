"""`python -m engine`: the same as the command `lanewise`."""

from __future__ import annotations

import sys

from engine.cli import main

sys.exit(main())
