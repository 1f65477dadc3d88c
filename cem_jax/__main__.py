"""`python -m cem_jax <command>`, the same as `cem <command>`."""

import sys

from cem_jax.cli import main

sys.exit(main())
