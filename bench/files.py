"""Time the translation of a file against CTranslate2 with the same weights, from raw text to raw text.

    python -m bench.files CKPT                              1000 sentences, greedy and with a beam of 5, in float32
    python -m bench.files CKPT --sentences 100000 --beam 1 5 --compute float32 int8 --threads 2 --save

The sentences are sources of the corpus in random order, repeated if there are too few.  Each contestant is a process that reads
a file, and writes a line for each of its lines.  They take turns: a turn is a window, the lines that pyops.load(CKPT).translate
reads ahead and sorts by length.  Ours are this function, in one process, and the program transformer.translate in --processes
processes, without their start.  CTranslate2 gets a whole window, sorts it, and uses the fastest of several batch sizes, and of
--threads threads for one batch or one thread each for --threads batches.  All split words with our tokenizer.  CPU seconds and
memory are sums over the processes of a contestant; memory that several share, such as libraries, counts for each.

Checked: the number of lines; equal lines have equal translations; a sample has the same translations line by line.  The exit
status is 1 if a check fails.
"""
import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import results
from bench.contest import NAMES, Contestant, require
from bench.worker import peak_mib
from pyops import COMPUTE_TYPES
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, int_up_to, positive_int
from pyops.text import decoding, serving
from pyops.text.flags import BATCH_ROWS, LARGEST_BEAM, PROCESSES, serving_parser

PROGRAM = 'bench.files'
FEW = 1000              # lines after which the peak memory is read, and on which CTranslate2 tries its settings
LEAST = 5               # turns: a short file is translated several times
SAMPLE = 50             # lines that are translated again, one by one
ROWS = 160, 320, 640    # hypotheses of a batch that CTranslate2 tries
FILES = 'lines', 'few', 'sample'
OURS = 'ours', 'command'


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('checkpoint', metavar='CKPT', help='a checkpoint of the transformer, or a folder of them')
    p.add_argument('--sentences', type=positive_int, default=1000, metavar='N', help='lines of the file (default %(default)s)')
    p.add_argument('--beam', type=int_up_to(LARGEST_BEAM), nargs='+', default=[1, 5], metavar='N', help='(default 1 5)')
    p.add_argument('--compute', nargs='+', choices=COMPUTE_TYPES, default=['float32'], help='(default float32)')
    p.add_argument('--no-ctranslate2', action='store_true', help='ours alone')
    p.add_argument('--threads', type=positive_int, metavar='N', help='for every contestant (default: all cores)')
    p.add_argument('--processes', type=int_up_to(64), metavar='N',
                   help=f'of transformer.translate (default: one for each thread, at most {PROCESSES})')
    p.add_argument('-f', '--corpus', metavar='FILE', help='sentence pairs (default: fra-eng if found, else embedded)')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for the data (default $PYOPS_DATA, then ./data)')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    return p.parse_args(argv)


def window_of(beam):
    """Return the number of lines that a Translator reads ahead with its default batch size."""
    from pyops.text.translator import WINDOW, texts_per_batch
    return WINDOW * texts_per_batch(None, beam)


# ---- a contestant, in its own process ----------------------------------------------------------------------------------

def translate(folder, kind, threads=1):
    """Return turn(file, lines, beam, batch, workers, first, last), which translates these lines of the first `lines` of a file
    and appends them to a file, and a function that turns its result into the worker's answer.

    A turn from line 0 begins a new pass over the file; others continue it.   batch: sentences, 0 for the default
    """
    who, _, compute = kind.partition('/')
    decoding.REPEATS = sys.maxsize          # CTranslate2 does not cut a repetition
    path = (folder / 'checkpoint').read_text()
    stream = {'ours': _ours, 'command': _Command, 'ct2': _CTranslate2}[who](folder, path, compute, threads)
    outputs = iter(())

    def turn(file, lines, beam, batch, workers, first, last):
        nonlocal outputs
        name = FILES[file]
        if first == 0:
            outputs = stream(_lines(folder / f'{name}.txt', lines), beam, batch, workers)
        pids = getattr(stream, 'pids', [])
        start = _cpu_seconds(pids)
        with open(output_of(folder, kind, beam, name), 'a' if first else 'w', encoding='utf-8') as written:
            count = sum(bool(written.write(line + '\n')) for line in itertools.islice(outputs, last - first))
        return dict(lines=count, cpu=_cpu_seconds(pids) - start, peak_mib=round(sum(map(peak_mib, ['self', *pids])), 1))
    return turn, lambda told: told


def _cpu_seconds(pids):
    """Return the CPU seconds of this process and of others."""
    ticks = [Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[11:13] for pid in pids]      # utime, stime
    return time.process_time() + sum(int(user) + int(system) for user, system in ticks) / os.sysconf('SC_CLK_TCK')


def _lines(path, count):
    """Yield the first `count` lines of a file."""
    with open(path, encoding='utf-8') as file:
        for line in itertools.islice(file, count):
            yield line.rstrip('\n')


def output_of(folder, kind, beam, name):
    """Return the path of a contestant's translations of a file."""
    return folder / f'{kind.replace("/", "-")}-{beam}-{name}.txt'


def _ours(folder, path, compute, threads):
    import pyops
    model = pyops.load(path, compute=compute)
    return lambda lines, beam, batch, workers: model.translate(lines, beam, batch_size=batch or None)


class _Command:
    """As transformer.translate: each window is a file.  Its processes run until other settings or the end of this one."""

    def __init__(self, folder, path, compute, threads):
        self.file, self.flags = folder / f'window-{compute}.txt', ['-c', path, '--compute', compute]
        self.parser = serving_parser('transformer.translate')
        self.translator, self.start = serving.open_with_start(self.parser.parse_args(self.flags), 'transformer')
        self.settings, self.work = None, contextlib.ExitStack()

    def __call__(self, lines, beam, batch, workers):
        if (beam, batch, workers) != self.settings:
            self.work.__exit__(None, None, None)
            flags = ['--beam', str(beam), '--processes', str(workers), *(['-b', str(batch)] if batch else [])]
            args = self.parser.parse_args([*self.flags, *flags])
            self.settings = beam, batch, workers
            self.work = serving.divided(args, self.translator, self.start, serving.Output(self.translator, args), uncut)
            self.work.start()
        return self._translated(lines, beam)

    @property
    def pids(self):
        return self.work.pids

    def _translated(self, lines, beam):
        while some := list(itertools.islice(lines, window_of(beam))):
            self.file.write_text(''.join(f'{line}\n' for line in some), encoding='utf-8')
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
                with open(self.file, 'rb') as file:
                    self.work.run(serving.read_windows(file, self.file.name, self.work.window))
            yield from out.getvalue().split('\n')[:-1]


def uncut(*arguments):
    """serving.printed, without the end of repetitions; in any process."""
    decoding.REPEATS = sys.maxsize
    return serving.printed(*arguments)


class _CTranslate2:
    """Translates a stream of lines with the model in folder/ct2, a window at a time."""

    def __init__(self, folder, path, compute, threads):
        from pyops import checkpoint
        from pyops.text.tokenizer import restore
        self.folder, self.compute, self.threads, self.workers = folder / 'ct2', compute, threads, 0
        state = checkpoint.find(path, serving=True, parameters_only=True).state
        self.source, self.target = restore(state['vocabularies'])
        self.longest = state['settings']['num_steps']
        self.source_tokens, tokens = (self._tokens(side) for side in ('source', 'target'))
        self.ids = {token: i for i, token in enumerate(tokens)}

    def _tokens(self, side):
        """Return the tokens of a vocabulary in the order of their ids."""
        path = self.folder / f'{side}_vocabulary.json'
        return json.loads((path if path.exists() else self.folder / 'shared_vocabulary.json').read_text(encoding='utf-8'))

    def __call__(self, lines, beam, batch, workers):
        import ctranslate2
        if workers != self.workers:
            self.translator = ctranslate2.Translator(str(self.folder), compute_type=self.compute, inter_threads=workers,
                                                     intra_threads=self.threads // workers)
            self.workers = workers
        while some := list(itertools.islice(lines, window_of(beam))):
            encoded = self.source.encode([self.source.read(line) for line in some])
            tokens = [self.source_tokens[id] for id in encoded.ids.tolist()]
            ends = np.cumsum(encoded.lengths).tolist()
            texts = [tokens[first:end] for first, end in zip([0, *ends], ends, strict=False)]
            for found in self.translator.translate_batch(texts, beam_size=beam, max_batch_size=batch,
                                                         max_decoding_length=self.longest, max_input_length=self.longest):
                yield self.target.decode(np.array([self.ids[token] for token in found.hypotheses[0]], np.int32))


# ---- the contest -------------------------------------------------------------------------------------------------------

def write_files(args, folder):
    """Write the files that contestants read.   Return the lines, their references, and a line about the corpus."""
    from pyops.text.translation import open_corpus
    corpus, about = open_corpus(args.corpus, args.data_dir)
    pairs = [(' '.join(source.split()), target) for source, target in corpus.texts() if source.split()]
    random.Random(0).shuffle(pairs)
    pairs = list(itertools.islice(itertools.cycle(pairs), args.sentences))
    lines, references = map(list, zip(*pairs, strict=True))
    sample = random.Random(1).sample(range(len(lines)), min(SAMPLE, len(lines)))
    for name, some in zip(FILES, (lines, lines[:FEW], [lines[n] for n in sample]), strict=True):
        (folder / f'{name}.txt').write_text(''.join(f'{line}\n' for line in some), encoding='utf-8')
    return lines, references, sample, about


def settings_of(worker, kind, beam, lines, threads, processes):
    """Return the fastest batch size and number of batches at the same time, for CTranslate2; ours has defaults."""
    if kind.startswith(OURS):
        from pyops.text.translator import WORKERS
        return 0, processes if kind.startswith('command') else min(threads, WORKERS)
    few, tried = min(FEW, lines), {}
    for workers in sorted({1, threads}):
        for batch in (max(1, rows // beam) for rows in ROWS):
            turns = [worker.turn(FILES.index('few'), few, beam, batch, workers, 0, few)['seconds'] for _ in range(2)]
            tried[batch, workers] = min(turns)
    return min(tried, key=tried.get)


def measure(workers, beam, lines, threads, processes):
    """Return {kind: figures} of the whole file with a beam."""
    few, turns = min(FEW, lines), {kind: [] for kind in workers}
    figures = {}
    for kind, worker in workers.items():
        batch, parallel = settings_of(worker, kind, beam, lines, threads, processes)
        told = worker.turn(FILES.index('few'), few, beam, batch, parallel, 0, few)
        figures[kind] = {'batch': batch or BATCH_ROWS // beam, 'workers': parallel, 'peak_mib_few': told['peak_mib']}
    window = window_of(beam)
    for _ in range(max(1, LEAST // math.ceil(lines / window))):
        for first in range(0, lines, window):
            for kind, worker in workers.items():
                f, last = figures[kind], min(first + window, lines)
                told = worker.turn(0, lines, beam, f['batch'], f['workers'], first, last)
                turns[kind].append([(last - first) / told[name] for name in ('seconds', 'cpu')])
                f['peak_mib'] = told['peak_mib']
    for kind, rates in turns.items():
        wall, cpu = np.median(rates, 0).round(2).tolist()
        figures[kind] |= {'turns': len(rates), 'per_s': wall, 'per_cpu_s': cpu}
    return figures


def check(folder, kind, beam, lines, sample, worker):
    """Return the translations of a file, and a list of lines about what is wrong with them."""
    found = list(_lines(output_of(folder, kind, beam, 'lines'), None))
    if len(found) != len(lines):
        return found, [f'{NAMES[kind]}, beam {beam}: {len(found)} lines for {len(lines)}']
    seen, wrong = dict(zip(lines, found, strict=True)), []
    if kind.startswith(OURS):
        differ = sum(seen[line] != text for line, text in zip(lines, found, strict=True))
        worker.turn(FILES.index('sample'), len(sample), beam, 1, 1, 0, len(sample))
        alone = list(_lines(output_of(folder, kind, beam, 'sample'), None))
        others = sum(found[n] != text for n, text in zip(sample, alone, strict=True))
        wrong += [f'{NAMES[kind]}, beam {beam}: {differ} lines differ from equal ones'] * bool(differ)
        wrong += [f'{NAMES[kind]}, beam {beam}: {others} of {len(sample)} lines have another translation alone'] * bool(others)
    return found, wrong


def contest(args, kinds, threads):
    """Return a line about the corpus, {beam: {kind: figures}}, and a list of what is wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / 'checkpoint').write_text(args.checkpoint)
        if not args.no_ctranslate2:
            exported = subprocess.run([sys.executable, '-m', 'pyops', 'export', 'ctranslate2', args.checkpoint, folder / 'ct2'],
                                      cwd=results.ROOT, text=True, capture_output=True)
            if exported.returncode:
                raise UserError(exported.stderr.strip())
        lines, references, sample, about = write_files(args, folder)
        workers = {kind: stack.enter_context(Contestant('files', 'translate', kind, folder, threads)) for kind in kinds}
        figures, wrong = {}, []
        for beam in args.beam:
            figures[beam] = measure(workers, beam, len(lines), threads, args.processes or min(threads, PROCESSES))
            for kind, worker in workers.items():
                found, problems = check(folder, kind, beam, lines, sample, worker)
                wrong += problems
                figures[beam][kind]['bleu'] = bleu(found, references)
    return about, figures, wrong


def bleu(found, references):
    """Return sacrebleu's BLEU of raw text against a reference for each line; None if the lines are not as many."""
    import sacrebleu
    return round(sacrebleu.corpus_bleu(found, [references]).score, 2) if len(found) == len(references) else None


def print_table(beam, figures, lines):
    few = min(FEW, lines)
    print(f'{f"beam {beam}":20} {"texts/s":>9} {"texts/CPU s":>12} {"x peer":>7} {"x, CPU":>7} {"BLEU":>6} '
          f'{f"MiB at {few}":>12} {f"at {lines}":>10}  batches')
    for kind, f in figures.items():
        peer = figures.get(f'ct2/{kind.partition("/")[2]}') if kind.startswith(OURS) else None
        ratios = [f'{f[name] / peer[name]:.2f}' if peer else '' for name in ('per_s', 'per_cpu_s')]
        print(f'{NAMES[kind]:20} {f["per_s"]:9.0f} {f["per_cpu_s"]:12.0f} {ratios[0]:>7} {ratios[1]:>7} {f["bleu"]:6.2f} '
              f'{f["peak_mib_few"]:12.0f} {f["peak_mib"]:10.0f}  {f["workers"]} x {f["batch"]}')


def main(argv=None):
    args = parse(argv)
    for package in ['sacrebleu'] + ['ctranslate2'] * (not args.no_ctranslate2):
        require(package)
    if not args.no_ctranslate2 and importlib.util.find_spec('transformer.export') is None:
        raise UserError('transformer.export is missing; install a newer pyops, or give --no-ctranslate2')
    from pyops import backend
    threads = args.threads or backend.threads()
    kinds = [f'{who}/{compute}' for compute in args.compute for who in (OURS if args.no_ctranslate2 else (*OURS, 'ct2'))
             if f'{who}/{compute}' != 'ct2/bf16']
    about, figures, wrong = contest(args, kinds, threads)
    told = {'threads': threads, 'isa': backend.isa(), 'sentences': args.sentences, 'corpus': os.path.basename(about),
            'beams': figures}
    if args.json:
        print(json.dumps(told))
    else:
        print(f'{args.sentences} sentences, {about}; {threads} threads, {backend.float32_isa()}')
        for beam, some in figures.items():
            print_table(beam, some, args.sentences)
    for line in wrong:
        print(line, file=sys.stderr)
    if args.save:
        results.save('files', told)
    return int(bool(wrong))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
