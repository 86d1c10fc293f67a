"""A pytest plugin: a record of every test as it ends, and a deadline after which tests are left out.

    GPU_CHECK_RECORD=FILE GPU_CHECK_DEADLINE=SECONDS python -m pytest -p bench.deadline ...

FILE gets a JSON object per line: test, outcome (passed, failed, skipped or left out), seconds, and the last line of an error.
SECONDS count from the start of pytest.
"""
import json
import os
import time

import pytest

LEFT_OUT = 'left out: the time limit is over'
_start = time.monotonic()


def pytest_runtest_setup(item):
    if time.monotonic() - _start > float(os.environ.get('GPU_CHECK_DEADLINE', 'inf')):
        pytest.skip(LEFT_OUT)


def pytest_runtest_logreport(report):
    if report.when != 'call' and report.passed:
        return
    error = report.longreprtext.strip().splitlines()[-1] if report.failed and report.longrepr else ''
    outcome = 'left out' if report.skipped and LEFT_OUT in str(report.longrepr) else report.outcome
    _record(test=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), error=error)


def pytest_collectreport(report):
    if report.failed:
        _record(test=report.nodeid, outcome='failed', seconds=0.0, error=report.longreprtext.strip().splitlines()[-1])


def _record(**line):
    path = os.environ.get('GPU_CHECK_RECORD')
    if path:
        with open(path, 'a') as file:
            file.write(json.dumps(line) + '\n')
