"""`python -m rollverify.dry_run [--world-size N] [--gpu-gib G] [flags]`."""

import sys

from rollverify.dry_run.check import main

sys.exit(main(sys.argv[1:]))
