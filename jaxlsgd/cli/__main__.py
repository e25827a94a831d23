"""`python -m jaxlsgd.cli`."""

import sys

from jaxlsgd.cli import main

sys.exit(main())
