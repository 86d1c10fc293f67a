"""The stand-in for OpenMP's runtime runs the threads of a region in an order drawn from a seed: `make schedules`."""
import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from conftest import ROOT
from places import on_the_cpu

needs_gcc = pytest.mark.skipif(not shutil.which('gcc'), reason='the stand-in replaces the runtime of gcc: install it')
pytestmark = [on_the_cpu, needs_gcc]
RUNTIME = ROOT / 'tests/helpers/schedules.c'
SOURCE = r'''
#include <omp.h>
/* y[i] = sum of the squares of 0 to n - 1, from partial sums of each thread; critical, dynamic and single have their share */
void sums(double *y, double *work, long n, int threads) {
    int order = 0;
    double total = 0;
    #pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        work[thread] = 0;
        for (long i = thread; i < n; i += all) work[thread] += (double)i * i;
        BARRIER
        double sum = 0;
        for (int t = 0; t < all; t++) sum += work[t];
        #pragma omp for schedule(dynamic, 3)
        for (long i = 0; i < n; i++) y[i] = sum;
        #pragma omp single
        order = 1;
        #pragma omp critical
        total += y[n - 1] * order;
    }
    y[0] = total / threads;
}
static int last, changes;
static __attribute__((noinline)) void step(int thread) {
    changes += last != thread;
    last = thread;
}
/* How often, at most, another thread runs between two calls of step(): 1 if each runs to its end */
int turns(int threads) {
    int most = 0;
    last = -1;
    #pragma omp parallel num_threads(threads)
    {
        const int before = changes;
        for (int i = 0; i < 50; i++) step(omp_get_thread_num());
        most = most > changes - before ? most : changes - before;
    }
    return most;
}
int nested(void) {
    int inside = 0;
    #pragma omp parallel num_threads(3)
    {
        #pragma omp parallel
        {
            #pragma omp critical
            inside += omp_get_num_threads();
        }
    }
    return inside;
}
'''


@pytest.fixture(scope='module')
def libraries(tmp_path_factory):
    """The functions above with the stand-in, with and without their barrier."""
    folder, found = tmp_path_factory.mktemp('schedules'), {}
    (folder / 'sums.c').write_text(SOURCE)
    for name, barrier in (('right', '_Pragma("omp barrier")'), ('wrong', '')):
        subprocess.run(['gcc', '-O1', '-fPIC', '-fopenmp', '-finstrument-functions', f'-DBARRIER={barrier}', '-c', '-o',
                        folder / f'{name}.o', folder / 'sums.c'], check=True)
        subprocess.run(['gcc', '-O1', '-Wall', '-Wextra', '-Werror', '-fPIC', '-shared', '-o', folder / f'{name}.so',
                        folder / f'{name}.o', RUNTIME], check=True)
        found[name] = ctypes.CDLL(str(folder / f'{name}.so'))
    return found


def sums(library, seed, threads, n=20):
    y, work = np.full(n, np.nan), np.full(8, 1000.0)
    library.schedule_seed(ctypes.c_long(seed))
    library.sums(y.ctypes, work.ctypes, ctypes.c_long(n), threads)
    return y


@pytest.mark.parametrize('threads', [1, 2, 3, 8])
def test_a_right_region_has_the_same_result_in_every_order(libraries, threads):
    for seed in range(20):
        assert (sums(libraries['right'], seed, threads) == sum(i * i for i in range(20))).all(), seed


def test_a_missing_barrier_is_seen_and_a_seed_repeats_it(libraries):
    right, wrong = libraries['right'], libraries['wrong']
    seen = [seed for seed in range(6) if not np.array_equal(sums(right, seed, 3), sums(wrong, seed, 3))]
    assert len(seen) >= 3
    for seed in seen:
        assert np.array_equal(sums(wrong, seed, 3), sums(wrong, seed, 3))


def test_a_region_inside_another_has_one_thread(libraries):
    for seed in range(4):
        libraries['right'].schedule_seed(ctypes.c_long(seed))
        assert libraries['right'].nested() == 3


def test_the_runtime_has_every_entry_that_the_library_needs(tmp_path):
    """Its objects, compiled by gcc, need no other function of OpenMP."""
    def entries(path, *options):
        names = subprocess.run(['nm', *options, path], capture_output=True, text=True, check=True).stdout.split()
        return {name.partition('@')[0] for name in names if name.startswith(('GOMP_', 'omp_', '__kmpc'))}
    needed = entries(ROOT / 'pyops/libpyops.so', '-D', '--undefined-only')
    if any(name.startswith('__kmpc') for name in needed):
        pytest.skip('compiled by clang, whose runtime has other entries: run `make` with gcc')
    subprocess.run(['gcc', '-O1', '-c', '-o', tmp_path / 'runtime.o', RUNTIME], check=True)
    assert needed and needed <= entries(tmp_path / 'runtime.o', '--defined-only')


def test_threads_are_interrupted_between_barriers(libraries):
    """Without interruptions a thread would run a function that has none of the runtime's entries to its end."""
    seen = set()
    for seed in range(60):
        libraries['right'].schedule_seed(ctypes.c_long(seed))
        seen.add(libraries['right'].turns(3))
    assert 1 in seen and len(seen) > 1
