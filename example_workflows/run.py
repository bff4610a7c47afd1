"""Makes a video with one command: `python example_workflows/run.py`. See --help; standard library only."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (said in words instead of a syntax error further on)
    sys.exit("run.py needs Python 3.10 or newer, this is " + sys.version.split()[0])

from _runner.cli import run_script

if __name__ == "__main__":
    run_script()
