"""`python -m app` is `vramwise app`."""

import sys

from app.cli import main

sys.exit(main(["app", *sys.argv[1:]]))
