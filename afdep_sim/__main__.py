"""`python -m afdep_sim` is the `afdep` command."""

import sys

from afdep_sim.cli import main

sys.exit(main())
