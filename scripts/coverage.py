"""Count the lines and branches of csrc/ that the tests run; `make coverage` builds the library and runs them first.

    python -m scripts.coverage build/coverage               print a table, and write what does not run to uncovered.txt there
    python -m scripts.coverage build/coverage --save        also write the table to docs/reliability.md
    python -m scripts.coverage build/coverage --check       exit status 1 for a new branch that is not taken, without a reason
"""
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import paragraph
from scripts.generated import text as page_text
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.coverage'
NO_MEMORY = 'without memory: `tests/training/test_faults.py` lets each allocation fail'
# Branches that the op table does not take: their files, a part of their line (both regular expressions), and the reason.
REASONS = [
    ('', r'pyops_scratch|failed|NO_MEMORY|no_memory|if \(!?(scratch|spare|parts|work|packed)\b|&& (scratch|parts|spare)\b'
     r'|TRY\(|REQUIRE\(status|!status|if \(status|: PYOPS_OK;|if \(filled',        # of a kernel that another one calls
     NO_MEMORY),
    ('strided_double.c', r'^PYOPS_FOR\(r, R, R \* C > PYOPS_SHARE_EXPS', NO_MEMORY),     # the statement of the macro
    ('dispatch.c|kernels/kernels.inc', '',
     'other instruction sets, and settings of a process: `tests/backend/test_kernels.py` and `test_exact.py` start processes'),
    ('kernels/', r'^(else )?switch |\bROWS\(1\)|^ROUND$',
     'made by macros for every height, width and operation: callers use some'),
    ('', r'\bt\.(next|far|jump) =|k->any_col|k->is_exact|j < n; j \+= VL|is_bf16|width >= VL'
     r'|memcpy\(to, &pairs|last == VL|&rows\[VL - 1\]',
     'tiles and vectors of other instruction sets'),
    ('linear_argmax.c', r'compare_exchange', 'two threads that change a number in the same moment'),
    ('gemm.c', r'^PYOPS_FOR\(i, products, threads > 1',
     'a loop is compiled twice; the one of several threads has no `dots` or `whole`'),
    ('linear_cross_entropy.c', r'D \* V <= AHEAD', 'a large weight and many rows: `make buggify` draws both bounds'),
    ('gemm.c', r'^if \(!K\) bias_only', 'a packed product of no terms without a bias: no caller has one'),
    ('', r'^(#pragma|_Pragma\("?) *omp', 'made by the compiler: how the threads of OpenMP divide a loop'),
]


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Count the lines and branches of csrc/ that ran.')
    p.add_argument('folder', type=Path, help='with the objects and counts of gcc --coverage')
    p.add_argument('--isa', default='avx2', help='the instruction set that ran; others are left out (default %(default)s)')
    p.add_argument('--tests', default='the tests of ops and kernels', metavar='TEXT', help='the tests that ran, for the page')
    p.add_argument('--check', action='store_true', help='exit with status 1 if a file has more branches that are not taken, '
                   f'without a reason, than {PAGE.relative_to(ROOT)} says')
    p.add_argument('--save', action='store_true', help=f'write the table to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    counts = sorted(path for path in args.folder.rglob('*.gcda') if path.parent.name != 'kernels' or path.stem == args.isa)
    if not counts:
        raise UserError(f'{args.folder}: expected counts of gcc --coverage (*.gcda); run `make coverage`')
    lines, branches = read(counts)
    text = table(lines, branches)
    print(text)
    (args.folder / 'uncovered.txt').write_text(''.join(
        f'{file}:{line}: {source(file, line)}\n' for file, line in sorted(open_branches(lines, branches))))
    more = more_than(page_text(PAGE, 'coverage'), without_reason(branches)) if args.check else []
    for file, count, known in more:
        print(f'{file}: {count} branches are not taken and have no reason, {known} on {PAGE.relative_to(ROOT)}; see '
              f'{args.folder}/uncovered.txt, and add a test, or a reason to {Path(__file__).name}')
    if args.save:
        write('coverage', f'By {args.tests}, on {args.isa}:\n\n{text}', f'python -m {PROGRAM} {args.folder} --save')
    return int(bool(more))


def read(counts):
    """Return ({(file, line): count}, {(file, line, function, number): count}) of files with counts, by gcov; files of csrc/.

    Counts of a header, and of code that a macro makes, are added up over all objects and functions."""
    lines, branches = Counter(), Counter()
    for path in counts:
        run = subprocess.run(['gcov', '--json-format', '--stdout', '--branch-probabilities', str(path)], capture_output=True,
                             text=True, cwd=ROOT)
        if run.returncode:
            raise UserError(f'gcov {path}: {run.stderr.strip().splitlines()[-1]}; use the gcov of the compiler')
        for file in json.loads(run.stdout)['files']:
            name = file['file'].partition('csrc/')
            if not name[1] or name[0]:
                continue
            for line in file['lines']:
                lines[name[2], line['line_number']] += line['count']
                for number, branch in enumerate(line['branches']):
                    branches[name[2], line['line_number'], line.get('function_name'), number] += branch['count']
    return lines, branches


def source(file, line):
    return (ROOT / 'csrc' / file).read_text().split('\n')[line - 1].strip()


def reason_of(file, line):
    """Return why a branch is not taken, None if that is not known."""
    text = source(file, line)
    return next((reason for files, part, reason in REASONS if re.match(files, file) and re.search(part, text)), None)


def open_branches(lines, branches):
    """Return {(file, line)} with a line or branch that never ran and has no reason."""
    missed = {key for key, count in lines.items() if not count} | {key[:2] for key, count in branches.items() if not count}
    return {(file, line) for file, line in missed if not reason_of(file, line)}


def without_reason(branches):
    """Return {file: number of its branches that are not taken and have no reason}, a Counter."""
    return Counter(file for (file, line, *_), count in branches.items() if not count and not reason_of(file, line))


def more_than(page, found):
    """Return (file, number, number on the page) of each file with more branches without a reason than the page says."""
    known = {file: int(n) for file, n in re.findall(r'`([\w./]+)`\s+\((\d+)\)', page.partition('without a reason')[2])}
    return [(file, n, known.get(file, 0)) for file, n in sorted(found.items()) if n > known.get(file, 0)]


def table(lines, branches):
    """Return the text of the page."""
    rows = defaultdict(lambda: [0, 0, 0, 0])
    for (file, _), count in lines.items():
        for name in (_folder(file), 'all'):
            rows[name][0] += 1
            rows[name][1] += count > 0
    for (file, *_), count in branches.items():
        for name in (_folder(file), 'all'):
            rows[name][2] += 1
            rows[name][3] += count > 0
    text = ['| files | lines | run | branches | taken |', '|---|---|---|---|---|']
    text += [f'| {name} | {n} | {ran / n:.1%} | {m} | {taken / max(m, 1):.1%} |'
             for name, (n, ran, m, taken) in sorted(rows.items(), key=lambda pair: (pair[0] == 'all', pair[0]))]
    reasons = Counter(reason_of(*key[:2]) for key, count in branches.items() if not count)
    text += ['', 'Branches that are not taken:', '']
    text += [paragraph(f'{count}: {reason}', '- ') for reason, count in reasons.most_common() if reason]
    if rest := without_reason(branches):
        listed = ', '.join(f'`{file}` ({n})' for file, n in rest.most_common())
        text.append(paragraph(f'{rest.total()}: without a reason, in {listed}', '- '))
    return '\n'.join([*text, ''])


def _folder(file):
    return '`csrc/kernels/`' if file.startswith('kernels/') else '`csrc/*.h`' if file.endswith('.h') else '`csrc/`'


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
