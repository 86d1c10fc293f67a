"""The archive of benchmark results: bench/results/NAME.jsonl, one JSON object per line, the newest last."""
import contextlib
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

from pyops.doctor import cpu_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'bench' / 'results'


def commit():
    """Return the commit of this tree; '' if git is not installed or the tree is a copy without its repository."""
    try:
        found = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT, text=True, capture_output=True)
    except FileNotFoundError:
        return ''
    return found.stdout.strip()


def torch_version():
    try:
        return importlib.metadata.version('torch')
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model():
    """Return an x86 CPU's family, model and stepping, such as '25.1.1'; '' elsewhere.  Virtual machines give different CPUs
    the same name."""
    with contextlib.suppress(OSError):
        text = Path('/proc/cpuinfo').read_text()
        return '.'.join(found[1] for name in ('cpu family', 'model', 'stepping')
                        if (found := re.search(rf'^{name}\s*: (\d+)$', text, re.M)))
    return ''


def about():
    """Return date, commit, machine and PyTorch version: the first items of each result."""
    return {'date': datetime.date.today().isoformat(), 'commit': commit(), 'machine': cpu_name(), 'cpu': cpu_model(),
            'torch': torch_version()}


def save(name, figures):
    """Append figures to NAME.jsonl, after the items of about()."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f'{name}.jsonl'
    with open(path, 'a') as file:
        file.write(json.dumps(about() | figures) + '\n')
    print(f'appended to {path.relative_to(ROOT)}', file=sys.stderr)      # standard output may be JSON


def load(name, folder=FOLDER):
    """Return the results saved under that name, oldest first."""
    path = folder / f'{name}.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
