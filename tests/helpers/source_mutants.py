"""Tests of the op table: the C sources are changed at one place at a time, and the tests must fail.

A change is drawn from the text of csrc/.  Only the objects with the changed file are compiled; the others are linked again.
The tests run in a process that has already collected them.  It forks for every change, and the child loads the new library
behind the functions of the first one (build_proxy).  Only tests that reach the changed function run; a build with
-finstrument-functions says which.
"""
import bisect
import collections
import ctypes
import faulthandler
import functools
import importlib.util
import json
import os
import random
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'build' / 'mutants'
REACH = FOLDER / 'reach.so'
# Without exact kernels, which would double the time to compile an instruction set; -O1 compiles in half the time.
FLAGS = '-O1 -DPYOPS_WITHOUT_EXACT=1'
# The library of `make schedules`: threads in an order drawn from a seed, also for small sizes.
DRAWN, RUNTIME = 'build/drawn', 'build/drawn/schedules.o'
SEEDS = 0, 1, 2, 3, 4, 5
KINDS = {'relation': 'a comparison', 'arithmetic': 'an operator of arithmetic', 'logic': 'and, or', 'assignment': '+=, -=, *=',
         'constant': 'a constant', 'bound': 'the bound of a loop by 1', 'extreme': 'smallest for largest',
         'statement': 'a statement is deleted', 'index': 'another index', 'condition': 'a condition is always true or false',
         'barrier': 'a barrier is removed'}
# Places that change only the time or the size of memory, with the reason.  No changes are drawn from these lines.
ONLY_TIME = {
    r'PYOPS_SHARE_|is_large|\bthreads > 1\b|num_threads|const int (few|whole) =': 'when several threads share the work',
    r'__builtin_prefetch|PREFETCH|\bt\.(next|far|jump)\b|\bshare = NR|\bAHEAD': 'what is read ahead into a cache',
    r'_work\(|\bl\.\w+ = |pyops_scratch|posix_memalign': 'the size and order of work memory: too large is not wrong',
    r'^\s*enum \{|PYOPS_TUNED|\.(MC|KC|KB|B) = ': 'the size of blocks, which `make buggify` draws'}
# Whole functions of that kind: sizes of work memory, prefetches, how threads share a product.
OF_TIME = re.compile(r'^\w[^\n;]*\b(?:pyops_\w+_work|prefetch_row|grid_rows|fetch\w*(?=\(const call\b))\([^;{]*'
                     r'\{(?:[^\n]*\}$|.*?^\})', re.M | re.S)
FILES_LEFT_OUT = {'kernels/float32_body.inc': 'a loop that measures the machine'}


class Mutation(NamedTuple):
    """The characters [start, end) of file (relative to csrc/) become `new`.  kind: one of KINDS"""
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    kind: str

    def __str__(self):
        return f'csrc/{self.file}:{self.line} {self.kind}: {" ".join(self.old.split())} -> {" ".join(self.new.split())}'

    def applied(self, text):
        return text[:self.start] + self.new + text[self.end:]


class Result(NamedTuple):
    """outcome: 'test', 'crash', 'time' (killed), 'survives', 'unreached' (no test runs the function), 'equal' (the same object
    code), 'invalid' (does not compile).  by: the test that failed"""
    mutation: Mutation
    outcome: str
    by: str = ''


PATIENCE = 5.0           # seconds that a test may take beside ten times its usual time
KILLED = 'test', 'crash', 'time'
SECONDS = 20.0          # usual seconds of all tests of a change


# ---- changes of a text -----------------------------------------------------------------------------------------------

def code_of(text):
    """Return the text with spaces for comments, strings, preprocessor lines and messages of errors; newlines stay."""
    def blank(match):
        return re.sub(r'[^\n]', ' ', match[0])
    code = re.sub(r'/\*.*?\*/|//[^\n]*', blank, text, flags=re.S)
    code = re.sub(r'^[ \t]*#[ \t]*(?!define)\w+(?:\\\n|[^\n])*', blank, code, flags=re.M)
    code = re.sub(r'^[ \t]*#[ \t]*define[ \t]+\w+(\([^)]*\))?', blank, code, flags=re.M)
    code = re.sub(r'_Static_assert\(.*?\);', blank, code, flags=re.S)
    code = re.sub(r'"(?:\\.|[^"\\\n])*"(?:[^;]*(?=\);))', blank, code)     # a message and its values, up to the end of the call
    return re.sub(r'"(?:\\.|[^"\\\n])*"', blank, code)


def in_macro(text, line):
    """Return whether a line (from 1) belongs to a #define."""
    lines = text.split('\n')
    at = line - 1
    while at > 0 and lines[at - 1].endswith('\\'):
        at -= 1
    return re.match(r'\s*#\s*define', lines[at]) is not None


def mutations_of(file, text):
    """Return the Mutations of a text, in its order."""
    code = code_of(text)
    lines = code.split('\n')
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    found = []

    def add(start, end, new, kind):
        line = bisect.bisect_right(starts, start)
        found.append(Mutation(file, line, start, end, text[start:end], new, kind))

    def replace(pattern, table, kind):
        for match in re.finditer(pattern, code):
            for new in table[match[0].strip()]:
                add(match.start(), match.end(), match[0].replace(match[0].strip(), new), kind)
    replace(r' (?:<=?|>=?|==|!=) ', {'<': ['<='], '<=': ['<'], '>': ['>='], '>=': ['>'], '==': ['!='], '!=': ['==']},
            'relation')
    replace(r'(?<=[\w)\]]) [-+*/%] (?=[\w(\-!~*&])', {'+': ['-'], '-': ['+'], '*': ['+'], '/': ['*'], '%': ['/']}, 'arithmetic')
    replace(r' (?:&&|\|\|) ', {'&&': ['||'], '||': ['&&']}, 'logic')
    replace(r' [-+*]= ', {'+=': ['=', '-='], '-=': ['+=', '='], '*=': ['=']}, 'assignment')
    replace(r'\bpyops_(?:min|max)\(', {'pyops_min(': ['pyops_max('], 'pyops_max(': ['pyops_min(']}, 'extreme')
    for match in re.finditer(r'(?<![\w.])(\d+)(?![\w.])', code):
        value = int(match[1])
        add(match.start(), match.end(), str(value + 1), 'constant')
        if value:
            add(match.start(), match.end(), str(value - 1), 'constant')
    for match in re.finditer(r'(?<![\w.])(\d+\.\d+)(?=f?\b)', code):
        add(match.start(), match.end(), f'{float(match[1]) * 1.01 + 0.01:.9g}', 'constant')
    for match in re.finditer(r'\bfor \((?:const )?\w+ \w+ = ([^;,]+)[^;]*; \w+ <=? ([^;&|]+);', code):
        add(match.end(2), match.end(2), ' - 1', 'bound')
        add(match.end(1), match.end(1), ' + 1', 'bound')
    _add_lines(code, lines, starts, add)
    works = [match.span() for match in OF_TIME.finditer(code)]
    return [m for m in found if not any(re.search(pattern, text.split('\n')[m.line - 1]) for pattern in ONLY_TIME)
            and not any(start <= m.start < end for start, end in works)]


def _add_lines(code, lines, starts, add):
    """Add the kinds that need whole lines: statements, conditions, indices."""
    loops = []                                          # (indentation, variable) of the loops around a line
    for number, line in enumerate(lines):
        if line.startswith('}'):
            loops = []
        indent = len(line) - len(line.lstrip())
        if line.strip():
            loops = [(depth, name) for depth, name in loops if depth < indent]
        here = re.findall(r'\bfor \((?:const )?\w+ (\w+) = ', line)
        names = {name for _, name in loops} | set(here)
        at = starts[number]
        for match in re.finditer(r'\[([^\[\]]+)\]', line):
            for name in re.finditer(r'\b[a-zA-Z_]\w*\b', match[1]):
                if name[0] in names:
                    for other in sorted(names - {name[0]}):
                        add(at + match.start(1) + name.start(), at + match.start(1) + name.end(), other, 'index')
        loops += [(indent, name) for name in here]
        statement = re.fullmatch(r'(\s*(?:(?:if|for|else)\b.*[)] |else )?)'
                                 r'((?:\*?[\w\->.]+(?:\[.*\])? (?:[-+*/|&^]|<<|>>)?= .*|[\w\->.]+\(.*\));)(\s*\\)?', line)
        if statement and indent and statement[2].count('(') == statement[2].count(')') and statement[2].count(';') == 1:
            add(at + statement.start(2), at + statement.end(2), ';', 'statement')
        if match := re.search(r'\b(?:continue|break);', line):
            add(at + match.start(), at + match.end(), ';', 'statement')
        for match in re.finditer(r'\bif \(', line):
            start = at + match.end()
            end = _closing(code, start)
            if end and '\n' not in code[start:end]:
                add(start, end, f'1 || ({code[start:end].strip()})', 'condition')
                add(start, end, f'0 && ({code[start:end].strip()})', 'condition')


def _closing(code, start):
    depth = 1
    for at in range(start, min(len(code), start + 400)):
        depth += {'(': 1, ')': -1}.get(code[at], 0)
        if not depth:
            return at
    return None


# ---- libraries -------------------------------------------------------------------------------------------------------

def _make(*target):
    """Build a library by make; return {object: its command}."""
    command = ['make', '-s', *target, 'V=1']
    environment = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}
    cores = len(os.sched_getaffinity(0))
    subprocess.run([*command, f'-j{cores}'], cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL)
    shown = subprocess.run([*command, '-n', '-B'], cwd=ROOT, check=True, env=environment, text=True, capture_output=True).stdout
    commands = {}
    for line in shown.splitlines():
        if ' -c -o ' in line and (words := shlex.split(line))[-2] != RUNTIME:
            commands[words[-2]] = words
    return commands


def make_base():
    """Build the library that is changed; return _make()."""
    library = f'{_relative(FOLDER)}/base/libpyops.so'
    return _make(library, f'BUILD={_relative(FOLDER)}/base', f'LIBRARY={library}', f'EXTRA_CFLAGS={FLAGS}')


def _relative(path):
    return str(path.relative_to(ROOT))


class Build:
    """The objects of one instruction set, and how to compile each again."""

    def __init__(self, isa, schedules=False):
        """schedules: with the stand-in for OpenMP's runtime"""
        self.isa, self.schedules, self.work = isa, schedules, FOLDER / ('barriers' if schedules else 'changes')
        folder = DRAWN if schedules else f'{_relative(FOLDER)}/base'
        self.base, self.proxy = ROOT / folder / ('schedules.so' if schedules else 'libpyops.so'), ROOT / folder / 'proxy.so'
        self.commands = _make('schedules-library') if schedules else make_base()
        self.compiler = next(iter(self.commands.values()))[0]
        self.objects = collections.defaultdict(list)        # file in csrc/ -> the objects with it
        for name in self.commands:
            source = Path(name).relative_to(folder).with_suffix('')
            if source.parent.name == 'kernels' and source.name != isa:
                continue
            needs = (ROOT / name).with_suffix('.d').read_text().replace('\\\n', ' ').split('\n')[0].partition(':')[2]
            for path in map(os.path.normpath, needs.split()):
                if path.startswith('csrc/'):
                    self.objects[path.removeprefix('csrc/')].append(name)

    @property
    def files(self):
        """The files with changes: those that at most two objects of the instruction set include."""
        left_out = 'pyops.h', 'kernels/table_body.inc', f'kernels/{self.isa}.c', *FILES_LEFT_OUT
        return sorted(file for file, objects in self.objects.items() if len(objects) <= 2 and file not in left_out)

    def texts(self):
        return {file: (ROOT / 'csrc' / file).read_text() for file in self.files}

    def library(self, mutation, target):
        """Write the library with a mutation to `target`; return 'equal' or 'invalid' if there is none."""
        tree = self.work / 'source'
        tree.mkdir(parents=True, exist_ok=True)
        subprocess.run(['cp', '-ru', str(ROOT / 'csrc'), str(tree)], check=True)
        source, original = tree / 'csrc' / mutation.file, (ROOT / 'csrc' / mutation.file).read_text()
        changed = {}
        try:
            source.write_text(mutation.applied(original))
            for name in self.objects[mutation.file]:
                new = changed[name] = self.work / Path(name).name
                words = [f'-I{ROOT}/{word[2:]}' if word.startswith('-Ibuild') else str(new) if word == name else word
                         for word in self.commands[name] if word not in ('-MMD', '-MP')]
                if subprocess.run([*words, '-w'], cwd=tree, capture_output=True, timeout=300).returncode:
                    return 'invalid'
        finally:
            source.write_text(original)
        if all(new.read_bytes() == (ROOT / name).read_bytes() for name, new in changed.items()):
            return 'equal'
        objects = [str(changed.get(name, ROOT / name)) for name in self.commands]
        openmp = [str(ROOT / RUNTIME)] if self.schedules else ['-fopenmp']
        subprocess.run([self.compiler, '-shared', '-o', str(target), *objects, *openmp, '-lm'], check=True)
        return None


REACHED = r'''
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#define PLAIN __attribute__((no_instrument_function))
/* Hidden: the C library has empty functions of these names. */
#define HIDDEN __attribute__((visibility("hidden")))
extern HIDDEN const char __ehdr_start;
enum { MOST = 1 << 25, LIST = 1 << 15 };
static atomic_uchar seen[MOST];
static uint32_t list[LIST];
static atomic_uint count;
HIDDEN PLAIN void __cyg_profile_func_enter(void *function, void *caller) {
    const uint64_t at = (uint64_t)((const char *)function - &__ehdr_start);
    (void)caller;
    if (at < MOST && !atomic_load_explicit(seen + at, memory_order_relaxed) && !atomic_exchange(seen + at, 1)) {
        const unsigned i = atomic_fetch_add(&count, 1);
        if (i < LIST) list[i] = (uint32_t)at;
    }
}
HIDDEN PLAIN void __cyg_profile_func_exit(void *function, void *caller) { (void)function, (void)caller; }
/* Copy the functions seen since the last call, as offsets in this library; returns their number. */
PLAIN __attribute__((visibility("default"))) unsigned reached(uint32_t *to) {
    const unsigned n = atomic_exchange(&count, 0);
    memcpy(to, list, n * sizeof *to);
    for (unsigned i = 0; i < n; i++) atomic_store(seen + list[i], 0);
    return n;
}
'''


def build_reach():
    """Build the library that records the functions which run."""
    recorder = FOLDER / 'reached.c'
    FOLDER.mkdir(parents=True, exist_ok=True)
    recorder.write_text(REACHED)
    commands = _make('schedules-library')           # the same objects; without a seed all constants have their usual values
    subprocess.run(['gcc', '-shared', '-fPIC', '-fopenmp', '-O1', '-o', str(REACH), str(recorder),
                    *(str(ROOT / name) for name in commands), '-lm'], check=True)


def functions_of(library):
    """Return {offset: (file, line)} of the functions of a library with debug information.  The body of a parallel region is a
    part of its function: gcc does not instrument it."""
    names = subprocess.run(['nm', str(library)], check=True, capture_output=True, text=True).stdout
    offsets = [fields[0] for fields in map(str.split, names.splitlines())
               if len(fields) == 3 and fields[1] in 'tT' and '._omp_fn' not in fields[2]]
    lines = subprocess.run(['addr2line', '-e', str(library), *offsets], check=True, capture_output=True, text=True).stdout
    found = {}
    for offset, place in zip(offsets, lines.splitlines(), strict=True):
        path, _, line = place.partition(':')
        _, csrc, file = path.rpartition('csrc/')
        if csrc and re.match(r'\d+', line):
            found[int(offset, 16)] = (os.path.normpath(file), int(re.match(r'\d+', line)[0]))
    return found


def build_proxy(base, proxy):
    """Build a library with the functions of `base`, each of which jumps to the one of the library that was loaded last."""
    listed = subprocess.run(['nm', '-D', '--defined-only', str(base)], check=True, capture_output=True, text=True).stdout
    names = [line.split()[2] for line in listed.splitlines() if line.split()[1] == 'T']
    quoted = ', '.join(f'"{name}"' for name in names)
    text = [f'''#include <dlfcn.h>
enum {{ COUNT = {len(names)} }};
static const char *const names[COUNT] = {{{quoted}}};
__attribute__((visibility("hidden"))) void *targets[COUNT];
int proxy_load(const char *path) {{
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return -1;
    for (int i = 0; i < COUNT; i++)
        if (!(targets[i] = dlsym(library, names[i]))) return i + 1;
    return 0;
}}
__attribute__((constructor)) static void start(void) {{ proxy_load("{base}"); }}''']
    for i, name in enumerate(names):
        text.append(f'__asm__(".globl {name}\\n.type {name},@function\\n{name}: jmp *targets+{8 * i}(%rip)\\n");')
    source = proxy.with_suffix('.c')
    source.write_text('\n'.join(text) + '\n')
    subprocess.run(['gcc', '-shared', '-fPIC', '-O1', '-o', str(proxy), str(source), '-ldl'], check=True)


# ---- tests -----------------------------------------------------------------------------------------------------------

TESTS = [*sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'tests/ops').glob('test_*.py') if 'mutants' not in path.name),
         *(f'tests/backend/test_{name}.py'
           for name in ('arguments', 'kernels', 'strided', 'formats', 'scaled_formats', 'hadamard', 'narrow_sums', 'fp8',
                        'ndarray')),
         'tests/text/test_beam_search.py', 'tests/training/test_optim.py']
LEFT_OUT = 'not PYOPS_ISA and not only_the_abi'         # they test another library than the changed one


def _passes(item):
    from _pytest.runner import runtestprotocol
    return all(not report.failed for report in runtestprotocol(item, nextitem=None, log=False))


class Collected:
    """A plugin: after the collection of the tests it calls run(items) in place of running them."""

    def __init__(self, run):
        self.run = run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        self.run(session.items)
        return True


def with_tests(library, isa, run, threads=1):
    """Collect the tests of ops on a library, and call run(items).  PyTorch is imported once, not in each child."""
    if importlib.util.find_spec('torch'):
        importlib.import_module('torch')
    os.environ.update(PYOPS_LIBRARY=str(library), PYOPS_ISA=isa, OMP_NUM_THREADS=str(threads))
    status = pytest.main(['-q', '--no-header', '--no-summary', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-k', LEFT_OUT,
                          *TESTS], plugins=[Collected(run)])
    if status not in (0, 5):
        raise RuntimeError(f'pytest ends with status {status}')


EACH = 40               # so many parameters of each test function are recorded, and more as long as they take
RECORDED = 5.0          # less than this time in seconds: all of them would take many minutes


def spread(items, each=EACH):
    """Return the items in two lists: at most `each` of the parameters of a test function, evenly spaced, and the others at
    random."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[item.nodeid.partition('[')[0]].append(item)
    first = [group[len(group) * i // n] for group in groups.values() for n in [min(each, len(group))] for i in range(n)]
    rest = sorted(set(items) - set(first), key=lambda item: item.nodeid)
    random.Random(0).shuffle(rest)
    return first, rest


def record_reach(isa, target):
    """Write {test: [seconds, [[file, line of a function], ...]]} of the tests that pass.  Run it in a process of its own."""
    places = functions_of(REACH)

    def run(items):
        reached = ctypes.CDLL(str(REACH)).reached
        buffer, found = (ctypes.c_uint32 * (1 << 15))(), {}
        at_load = {places[at] for at in buffer[:reached(buffer)] if at in places}       # every test depends on constructors
        first, rest = spread(items)
        spent = collections.Counter()
        for i, item in enumerate(first + rest):
            function = item.nodeid.partition('[')[0]
            if i >= len(first) and spent[function] > RECORDED:
                continue
            start = time.process_time()
            passed = _passes(item)
            seconds = time.process_time() - start
            spent[function] += seconds
            seen = at_load | {places[at] for at in buffer[:reached(buffer)] if at in places}
            if passed:
                found[item.nodeid] = [round(seconds, 4), sorted(seen)]
        target.write_text(json.dumps({'functions': sorted(set(places.values())), 'tests': found}))
    with_tests(REACH, isa, run)


class Reach:
    """Which tests run a line, cheap and different tests first."""

    def __init__(self, path):
        read = json.loads(path.read_text())
        self.seconds = {name: seconds for name, (seconds, _) in read['tests'].items()}
        self.starts = collections.defaultdict(list)
        for file, line in read['functions']:
            self.starts[file].append(line)
        self.tests = collections.defaultdict(list)
        for name, (_, places) in read['tests'].items():
            for file, line in places:
                self.tests[file, line].append(name)

    def of(self, mutation, text):
        """Return the tests for a mutation of a file with this text; [] if none reaches it."""
        starts = sorted(set(self.starts[mutation.file]))
        at = bisect.bisect_right(starts, mutation.line)
        if in_macro(text, mutation.line) or not at:
            names = {name for start in starts for name in self.tests[mutation.file, start]}
        else:
            names = set(self.tests[mutation.file, starts[at - 1]])
        rank = collections.Counter()

        def order(name):
            function = name.partition('[')[0]
            rank[function] += 1
            return rank[function] + 20 * self.seconds[name]
        return sorted(sorted(names, key=self.seconds.get), key=order)


def _processor_time(process):
    """Return the seconds of processor time of a process so far."""
    fields = Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def others(names, tests):
    """Return those of `names` that are not in tests, but are the same test functions: first those with the same first word of
    the parameters, as the name of a row of the op table."""
    def word(name):
        return re.split(r'[-\]]', name.partition('[')[2], maxsplit=1)[0]
    known, functions, words = set(tests), {name.partition('[')[0] for name in tests}, {word(name) for name in tests}
    found = [name for name in names if name not in known and name.partition('[')[0] in functions]
    return sorted(found, key=lambda name: word(name) not in words)


def outcome(items, tests, seconds, load, most=SECONDS):
    """Run tests in a child process after load(); return 'test', 'crash', 'time' or 'survives', and the last test.

    A test may take PATIENCE and ten times its usual seconds of processor time, or ten times as much on a busy machine.  Tests
    run until they have taken `most` usual seconds."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 3
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
            load()
            spent = 0.0
            status = 0
            for i, name in enumerate(tests):
                os.write(write, i.to_bytes(4, 'little'))
                if not _passes(items[name]):
                    status = 1
                    break
                spent += seconds[name]
                if spent > most:
                    break
        finally:
            os._exit(status)
    os.close(write)
    last, late, used, waits = -1, False, 0.0, 0
    while not late:
        limit = PATIENCE + 10 * (seconds[tests[last]] if last >= 0 else 1)
        if select.select([read], [], [], limit)[0]:
            told = os.read(read, 4)
            if len(told) < 4:
                break
            last, used, waits = int.from_bytes(told, 'little'), _processor_time(child), 0
        else:
            waits += 1
            late = _processor_time(child) - used > limit or waits == 10
    if late:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    name = tests[last] if last >= 0 else ''
    if late:
        return 'time', name
    if status == 3:
        raise RuntimeError('the child process failed before its tests')
    return ('crash' if status < 0 else 'test' if status else 'survives'), name


def drawn(build, seed, files=()):
    """Return all Mutations of the files (default: all of the build) in a random order."""
    found = [m for file, text in build.texts().items() if not files or file in files for m in mutations_of(file, text)]
    return sorted(found, key=lambda mutation: random.Random(f'{seed} {mutation}').random())


def barriers(build):
    """Return the Mutations that take a barrier away: an explicit one, or the one at the end of a loop or `single`, unless the
    region ends there too."""
    found = []
    for file, text in build.texts().items():
        for match in re.finditer(r'^ *#pragma omp (barrier|(?:for|single)\b(?!.*nowait)[^/\n]*)', text, re.M):
            line = text.count('\n', 0, match.start(1)) + 1
            if match[1] == 'barrier':
                found.append(Mutation(file, line, match.start(), match.end(), match[0], '', 'barrier'))
            elif not _ends_region(text.split('\n'), line):
                end = match.start(1) + len(match[1].rstrip())
                found.append(Mutation(file, line, end, end, '', ' nowait', 'barrier'))
    return found


def _ends_region(lines, line):
    """Return whether the parallel region ends after the loop of the pragma at a line (from 1)."""
    def indent(text):
        return len(text) - len(text.lstrip())
    depth = indent(lines[line - 1])
    region = next((indent(text) for text in reversed(lines[:line - 1]) if '#pragma omp parallel' in text), None)
    after = [text for text in lines[line + 1:] if text.strip()]         # behind the line of the loop itself
    after = next((text for text in after if indent(text) < depth or (indent(text) == depth and text.strip() != '}')), '')
    return after.strip() == '}' and indent(after) == region


def prepare(isa, schedules=False):
    """Build all libraries, record which tests reach which functions, and return (Build, Reach)."""
    build = Build(isa, schedules)
    build_proxy(build.base, build.proxy)
    path = FOLDER / f'reach_{isa}.json'
    newest = max(path.stat().st_mtime for path in [*(ROOT / 'csrc').rglob('*.*'), *map(ROOT.joinpath, TESTS)])
    if not path.exists() or path.stat().st_mtime < newest:
        build_reach()
        subprocess.run([sys.executable, '-c', f'import sys; sys.path[:0] = {sys.path!r}; import source_mutants; from pathlib '
                        f'import Path; source_mutants.record_reach({isa!r}, Path({str(path)!r}))'], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)
    return build, Reach(path)


def run(build, reach, mutations, note):
    """Try mutations until note(Result) returns true."""
    texts, library = build.texts(), build.work / 'mutant.so'

    def load(seed, library=library):
        if status := ctypes.CDLL(str(build.proxy)).proxy_load(str(library).encode()):
            raise RuntimeError(f'{library}: cannot be loaded ({status})')
        if build.schedules:
            ctypes.CDLL(str(library)).schedule_seed(ctypes.c_long(seed))

    def passes_unchanged(by_name, name, seed):
        return outcome(by_name, [name], reach.seconds, functools.partial(load, seed, build.base))[0] == 'survives'

    def loop(items):
        by_name = {item.nodeid: item for item in items}
        for mutation in mutations:
            tests = [name for name in reach.of(mutation, texts[mutation.file]) if name in by_name]
            if build.schedules:         # which take many times their usual seconds
                tests = [name for name in tests if reach.seconds[name] < 0.2]
            result, by = build.library(mutation, library), ''
            if not result and not tests:
                result = 'unreached'
            seeds = SEEDS if build.schedules else [0]
            for seed in seeds:
                while result in (None, 'survives'):
                    result, by = outcome(by_name, tests, reach.seconds, functools.partial(load, seed), SECONDS / len(seeds))
                    if not build.schedules or result == 'survives' or passes_unchanged(by_name, by, seed):
                        break
                    tests.remove(by)            # its tolerance is too small for blocks of the least size
                    result = None
            if result == 'survives' and not build.schedules and (rest := others(by_name, tests)):
                usual = collections.defaultdict(lambda: 0.05, reach.seconds)
                result, by = outcome(by_name, rest, usual, functools.partial(load, 0), SECONDS / 2)
            if note(Result(mutation, result, by)):
                break
    if build.schedules:
        os.environ['PYOPS_BUGGIFY'] = '0'
    with_tests(build.proxy, build.isa, loop, threads=3 if build.schedules else 1)
