"""Change the C sources at one place at a time, and count the changes that the tests of ops reject.

    python -m scripts.source_mutants --seconds 600          go on with the changes of seed 1 for ten minutes
    python -m scripts.source_mutants --again                try the survivors again, after tests were added
    python -m scripts.source_mutants --barriers             take away each barrier; threads run in orders drawn from seeds
    python -m scripts.source_mutants --save                 also write the counts to docs/reliability.md

Results are kept in build/mutants, so a long run can be made in portions.
"""
import fnmatch
import json
import math
import sys
import time
from collections import Counter, defaultdict

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int
from scripts.generated import paragraph
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.source_mutants'
# Survivors that change no result, and the reason: files, a part of the line, a part of the change.
EQUIVALENT = [
    ('batch_norm.c', 'v < 0.0f ?', '', 'both values are 0'),
    ('batch_norm.c', 'P > 1 && c < n', '', 'a sum of one value'),
    ('batch_norm.c', 'r < R; r += ROWS', '<=', 'a block without rows adds 0'),
    ('strided.c', 'if (size[d] <= 0) return;', '', 'a piece without elements'),
    ('conv2d.c', 's->kh == 3 && s->kw == 3', '', 'which of two algorithms computes the same'),
    ('attention.c', 'return all * thread / threads', '', 'when several threads share the work'),
    ('gemm.c', 'jc += (K > k->KC ? SUMS : to - from)', '- ->', 'a step past the end of the only block'),
    ('gemm.c', 'if (b_step[d] || a_step[d]', '1 ||', 'matrices are multiplied one by one in place of together'),
    ('kernels/*', '; i + VL <= n; i += VL)', '<=', 'the last vector is computed number by number'),
    ('gemm.c', '? bias + from : NULL, M, to - from', '', 'K is at least 1 where a product starts at another column'),
    ('gemm.c', 'is_half', '', 'unused columns of the last tile are computed'),
    ('gemm.c', 'int packs =', '', 'whether a is packed: the same sums'),
    ('gemm.c', 'k->any_col :', '', 'whether a is packed: the same sums'),
    ('gemm.c', 'if (N == 1 && ldc == 1', '', 'a column as a row: the same sums'),
    ('conv2d.c', 'run == ', '', 'which of three ways copies a run'),
    ('conv2d.c', 'const int in_image', '', 'which of two ways writes the result'),
    ('batch_norm.c', 'p < P; p += POSITIONS', '<=', 'a piece without positions adds 0'),
    ('strided.c', '.piece = -1,', '', 'any number below 0 says that there is none'),
    ('rnn.c', 'if (p.whole) continue;', '', 'copies of rows that no one reads'),
    ('topk.c', 'i < chunks && parts', '<=', 'a chunk without columns adds nothing'),
    ('strided.c', 'r.pieces = pyops_min(', '', 'into how many pieces a sum is cut'),
    ('gather.c', 'length <= total - sum', '', 'a later check compares the whole sum; this one keeps it from overflowing'),
    ('scaled_formats.c', 'const int64_t all =', '', 'an early return, and when several threads share the work'),
    ('linear_cross_entropy.c', 'for (int64_t v = 0; v < V; v += COLUMNS)', '<=', 'a chunk without columns adds 0'),
    ('cross_entropy.c', 'C <= PYOPS_NARROW ? 256', '256', 'the size of a block'),
]
# Survivors that change a result only where these tests do not look, in the same form.
ELSEWHERE = [
    ('dispatch.c', 'have = 0;', '', 'without memory, when there is no buffer of any size'),
    ('*.c', 'failed', '', 'without memory, in tests/training/test_faults.py'),
]


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Test the tests of ops with changed C sources.')
    p.add_argument('files', nargs='*', metavar='FILE', help='only these files of csrc/, as in kernels/norm.inc (default: all)')
    p.add_argument('--seconds', type=non_negative_int, metavar='N',
                   help='time to run (default: 60, and until all barriers are tried)')
    p.add_argument('--seed', type=non_negative_int, default=1, metavar='N',
                   help='seed of the order of all changes (default %(default)s)')
    p.add_argument('--isa', choices=('generic', 'avx2'), default='avx2',
                   help='the instruction set to change and test (default %(default)s)')
    p.add_argument('--barriers', action='store_true',
                   help='take away each barrier instead, and run threads one at a time in several orders')
    p.add_argument('--again', action='store_true', help='try the survivors again')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    seconds = args.seconds if args.seconds is not None else math.inf if args.barriers else 60
    sys.path[:0] = [str(ROOT), *(str(ROOT / 'tests' / name) for name in ('helpers', 'ops', 'backend', ''))]
    import source_mutants
    from source_mutants import Mutation, Result

    kept = source_mutants.FOLDER / f'results_{args.isa}_{"barriers" if args.barriers else args.seed}.jsonl'
    results = {}
    if kept.exists():
        for fields, outcome, by in map(json.loads, kept.read_text().splitlines()):
            results[Mutation(*fields)] = Result(Mutation(*fields), outcome, by)
    build, reach = source_mutants.prepare(args.isa, args.barriers)
    if unknown := set(args.files) - set(build.files):
        raise UserError(f'{min(unknown)}: no file of csrc/ with changes; expected one of {", ".join(build.files)}')
    drawn = source_mutants.barriers(build) if args.barriers else source_mutants.drawn(build, args.seed, args.files)
    known = set(drawn)
    results = {mutation: result for mutation, result in results.items() if mutation in known or args.files}
    todo = [m for m in drawn if (results[m].outcome in ('survives', 'unreached') if m in results else not args.again)]
    if not args.again:
        todo = [m for m in todo if m not in results]
    start = time.perf_counter()
    with open(kept, 'a') as file:
        def note(result):
            results[result.mutation] = result
            file.write(json.dumps(result) + '\n')
            file.flush()
            if result.outcome in ('survives', 'unreached'):
                print(f'{result.outcome:9s} : {text_of(result.mutation)}', flush=True)
            return time.perf_counter() - start > seconds
        if seconds:
            source_mutants.run(build, reach, todo, note)
    counts = Counter(result.outcome for result in results.values())
    killed = sum(counts[name] for name in source_mutants.KILLED)
    open_ = [r.mutation for r in results.values() if r.outcome in ('survives', 'unreached')]
    print(f'{killed} of {killed + len(open_)} changes rejected; {counts["equal"]} with equal object code, '
          f'{counts["invalid"]} that do not compile; {len(drawn)} in all, in {time.perf_counter() - start:.0f} s')
    if args.save and args.barriers:
        write('barriers', barrier_text(results, len(drawn)), f'python -m {PROGRAM} --barriers --save')
    elif args.save:
        write('source mutants', table(args, len(build.files), results, len(drawn)), f'python -m {PROGRAM} --save')
    return int(any(not reason_of(mutation) for mutation in open_))


def barrier_text(results, all_barriers):
    """Return the text of the page about barriers."""
    from source_mutants import KILLED
    kept = sorted(r.mutation for r in results.values() if r.outcome not in KILLED)
    all_known = f'there are {all_barriers}' if len(results) < all_barriers else 'these are all'
    text = f'{len(results) - len(kept)} of {len(results)} removed barriers are found; {all_known}.'
    listed = [paragraph(f'`{mutation.file}:{mutation.line}`: {reason_of(mutation) or "not explained"}', '- ')
              for mutation in kept]
    return '\n'.join([text, *([''] if listed else []), *listed, ''])


def reason_of(mutation, rules=None):
    """Return the reason of a survivor by the rules, all by default; None if there is none."""
    line = (ROOT / 'csrc' / mutation.file).read_text().split('\n')[mutation.line - 1]
    change = f'{mutation.old} -> {mutation.new}'
    return next((reason for file, part, changes, reason in rules or EQUIVALENT + ELSEWHERE
                 if fnmatch.fnmatch(mutation.file, file) and part in line and changes in change), None)


def text_of(mutation):
    line = (ROOT / 'csrc' / mutation.file).read_text().split('\n')[mutation.line - 1].strip()
    reason = reason_of(mutation)
    return f'{mutation}\n            {line}' + (f'\n            ({reason})' if reason else '')


def table(args, files, results, all_changes):
    """Return the text of the page.  A change that alters no result cannot be killed, so both rates are given: of all
    changes, and of those that can alter a result, as mutation scores are usually defined."""
    from source_mutants import KILLED, KINDS
    counts = Counter(result.outcome for result in results.values())
    killed = sum(counts[name] for name in KILLED)
    survivors = sorted(r.mutation for r in results.values() if r.outcome in ('survives', 'unreached'))
    by_reason = {name: defaultdict(list) for name in ('equivalent', 'elsewhere', 'none')}
    for mutation in survivors:
        name = 'equivalent' if reason_of(mutation, EQUIVALENT) else 'elsewhere' if reason_of(mutation) else 'none'
        by_reason[name][reason_of(mutation)].append(mutation)
    equivalent = sum(map(len, by_reason['equivalent'].values()))
    tried = killed + len(survivors)
    rates = [killed / max(n, 1) for n in (tried - equivalent, tried)]
    lines = [paragraph(
        f'{len(results)} of {all_changes} possible changes (seed {args.seed}) of {files} files, on {args.isa}: '
        f'{counts["equal"]} give equal object code, {counts["invalid"]} do not compile. Of the other {tried}, {killed} are '
        f'killed: {counts["test"]} by a test, {counts["crash"]} by a crash, {counts["time"]} by the limit of time. '
        f'{len(survivors)} survive, {equivalent} of which alter no result; {counts["unreached"]} are in functions that no '
        f'recorded test runs. So {rates[1]:.1%} of all are killed, and {rates[0]:.1%} of those that can alter a result.'), '',
        '| change | tried | killed |', '|---|---|---|']
    by_kind = defaultdict(Counter)
    by_file = defaultdict(Counter)
    for mutation, result in results.items():
        if result.outcome not in ('equal', 'invalid'):
            by_kind[mutation.kind][result.outcome in KILLED] += 1
            by_file[mutation.file][result.outcome in KILLED] += 1
    lines += [f'| {KINDS[kind]} | {by_kind[kind].total()} | {by_kind[kind][True]} |' for kind in KINDS if by_kind[kind]]
    lines += ['', paragraph('Killed changes of each file: ' + ', '.join(
        f'`{file}` {count[True]}/{count.total()}' for file, count in sorted(by_file.items())) + '.')]
    titles = {'equivalent': 'Survivors that alter no result:', 'elsewhere': 'Survivors in cases that these tests do not have:'}
    for name, title in titles.items():
        reasons = sorted(by_reason[name].items(), key=lambda pair: (-len(pair[1]), pair[0]))
        lines += ['', title, ''] if reasons else []
        for reason, found in reasons:
            lines.append(paragraph(f'{reason}: ' + ', '.join(f'`{m.file}:{m.line}`' for m in found), '- '))
    if rest := by_reason['none'][None]:
        lines += ['', 'Survivors without an explanation:', '', *(f'- `{mutation}`' for mutation in rest)]
    return '\n'.join([*lines, ''])


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
