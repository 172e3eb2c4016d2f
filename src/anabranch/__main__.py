"""`python -m anabranch`: the command line."""

import sys

from anabranch._cli import main

sys.exit(main())
