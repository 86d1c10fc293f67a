"""The archive of benchmark results: bench/results/NAME.jsonl, one JSON object per line, the newest last."""
import datetime
import importlib.metadata
import json
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


def about():
    """Return date, commit, machine and PyTorch version: the first items of each result."""
    return {'date': datetime.date.today().isoformat(), 'commit': commit(), 'machine': cpu_name(), 'torch': torch_version()}


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
