"""`python -m rollverify.launch --nproc N -- [flags]`, which run_train.sh calls."""

import signal

# While the rest is loaded Ctrl-C ends us without a traceback: nothing is started yet.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys

from rollverify.launch.launcher import main

sys.exit(main(sys.argv[1:]))
