"""`python -m benchmarks OPERATION`."""

import sys

from ._driver import main

sys.exit(main())
