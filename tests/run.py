"""Sets up and runs all tests: `python tests/run.py`. Needs nothing but Python 3.10 or newer; see --help.

The last line is `N passed, N failed, N skipped`, summed over the lanes. Exit code 0 = tests ran and none failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from run_parts.lanes import LANES, Lane
from run_parts.setup import ROOT, LaneSkippedError, Setup, load_runner

_NOT_PASSED_ON = ("COMFYUI_PATH", "FASTAR_TEST_HOST", "FASTAR_TEST_HOST_27", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass
class Count:
    """Tests by outcome; an error in a fixture or while collecting counts as failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    lanes = "\n".join(f"  {lane.name:<12}{lane.what}" for lane in LANES)
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"lanes:\n{lanes}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [lane.name for lane in LANES]
    parser.add_argument("--lane", action="append", choices=names, help="only this lane; may be repeated")
    parser.add_argument(
        "-k", dest="expression", metavar="EXPRESSION", help="only tests whose names match, as in pytest"
    )
    parser.add_argument("--fast", action="store_true", help="only the main lane, without the tests that start servers")
    parser.add_argument("--offline", action="store_true", help="never download; lanes that need something are skipped")
    parser.add_argument("--python", type=Path, metavar="PATH", help="use this interpreter and install nothing into it")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    return parser


def count_results(report: Path, code: int) -> Count:
    """Read pytest's XML report; a run that left none counts as one failure unless it had nothing to do (code 5)."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return Count(failed=0 if code == 5 else 1)
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    count = Count(max(total - failed - skipped, 0), failed, skipped)
    if code not in (0, 5) and not failed:
        count.failed = 1  # pytest ended with an error outside of any test
    return count


def pytest_command(lane: Lane, python: Path, options: argparse.Namespace, report: Path) -> list[str]:
    """The command line of one lane."""
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", "--durations=5", "--durations-min=2"]
    command += ["--continue-on-collection-errors"]  # one broken file must not hide what the others say
    command += [f"--ignore={path}" for path in lane.left_out + (lane.slow if options.fast else ())]
    if lane.host_tests_only:
        command += ["-p", "run_parts.host_tests"]
    if options.expression:
        command += ["-k", options.expression]
    return [*command, *options.pytest, *lane.paths]


def lane_environment(added: Mapping[str, str], lane: Lane) -> dict[str, str]:
    """This process's environment, without what would change what is tested, with the lane's own variables."""
    environ = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    environ |= {"FASTAR_LANE": lane.name, "PYTHONIOENCODING": "utf-8", **added}
    environ.setdefault("OMP_NUM_THREADS", "1")
    paths = [str(ROOT / "tests"), *filter(None, [added.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)  # for plugins, which load before pytest reads its settings
    return environ


def run_lane(lane: Lane, setup: Setup, options: argparse.Namespace) -> Count:
    """One pytest process; its output goes straight to ours."""
    print(f"\n--- {lane.name}: {lane.what}", flush=True)
    try:
        added = lane.prepare(setup)
    except LaneSkippedError as reason:
        print(f"skipped: {reason}", flush=True)
        return Count(skipped=1)
    with tempfile.TemporaryDirectory(prefix="fastar-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = pytest_command(lane, setup.python, options, report)
        begin = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=lane_environment(added, lane), check=False)
        count = count_results(report, done.returncode)
    print(f"{lane.name}: {count} in {time.monotonic() - begin:.0f} s", flush=True)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen lanes; 0 = tests ran and none failed."""
    options = build_parser().parse_args(arguments)
    load_runner()
    from _runner.errors import RunnerError

    try:
        setup = Setup.make(options.python, options.offline)
    except RunnerError as error:
        print(f"Error: {error}", file=sys.stderr)
        print("0 passed, 1 failed, 0 skipped", flush=True)
        return int(error.code)
    chosen = [lane for lane in LANES if (options.lane is None or lane.name in options.lane)]
    if options.fast:
        chosen = [lane for lane in chosen if lane.in_fast]
    count = Count()
    for lane in chosen:
        count += run_lane(lane, setup, options)
    print(f"\n{count}", flush=True)
    if not count.passed and not count.failed:
        print("no test ran", file=sys.stderr)
    return 0 if count.passed and not count.failed else 1


if __name__ == "__main__":
    sys.exit(main())
