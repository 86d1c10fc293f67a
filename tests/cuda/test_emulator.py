"""The emulator of CUDA in cuda/emu: that it catches bugs, raises no false alarm, and gives what the instructions should.

Programs and libraries are built by `make emulator`, for the tests of this file alone.
"""
import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import conformance
import pytest
from conftest import ROOT, environment_without

BUILD = ROOT / 'build'
WRAPPERS = ('cuda/common/gpu.cuh', 'cuda/common/hopper.cuh')
# By default ThreadSanitizer sleeps for a second before a process exits, for threads that still run: these programs join theirs.
SANITIZERS = {'ASAN_OPTIONS': 'detect_leaks=0', 'TSAN_OPTIONS': 'halt_on_error=0:atexit_sleep_ms=0'}
VARIANTS = ('plain', 'asan', 'tsan')


def make(*targets):
    if not all(map(shutil.which, ('make', 'g++'))):
        pytest.skip('make and g++ are needed')
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / 'emulator.lock', 'w') as lock:            # several workers of pytest-xdist may get here
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(['make', *targets], cwd=ROOT, env=environment_without(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'warning:' not in done.stderr, done.stderr


@pytest.fixture(scope='module')
def programs():
    make('emulator')
    return BUILD / 'emulator'


def run(program, *arguments, **environment):
    """-> its status and all that it printed.  ThreadSanitizer requires addresses that are not randomised."""
    command = [program, *arguments]
    if program.parent.name == 'tsan' and shutil.which('setarch'):
        command = ['setarch', '-R', *command]
    ours = {name: value for name, value in os.environ.items() if not name.startswith('EMU_')}
    done = subprocess.run([*map(str, command)], env=ours | SANITIZERS | environment, capture_output=True, text=True,
                          errors='replace')
    return done.returncode, done.stdout + done.stderr


# ---- no false alarms ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('variant', VARIANTS)
def test_good_kernels_are_right_and_raise_no_alarm(programs, variant):
    status, out = run(programs / variant / 'good', 'all', '64')
    assert status == 0 and out.count(' ok ') == len(out.splitlines()) == 19, out


@pytest.mark.parametrize('environment', [
    {'EMU_ORDER': 'reverse'}, {'EMU_ORDER': '1'}, {'EMU_ORDER': '2'}, {'EMU_ORDER': '3'}, {'EMU_LAZY': '1'},
    {'EMU_WORKERS': '2'}, {'EMU_GUARD': '1'}], ids=lambda e: '_'.join([*e.keys(), *e.values()]))
def test_good_kernels_are_right_in_any_order(programs, environment):
    status, out = run(programs / 'plain' / 'good', 'all', '64', **environment)
    assert status == 0 and out.count(' ok ') == 19, out


# ---- bugs ---------------------------------------------------------------------------------------------------------
# What must be said of each bug of tests/cuda/bugs.cu, as a pattern: by the program as it is, under AddressSanitizer and
# UndefinedBehaviorSanitizer, under ThreadSanitizer; None where it goes unseen and the results are right.
def in_all(pattern):
    return pattern, pattern, pattern


NAN = r'cudaSuccess, [1-9]\d* NaN'
WRONG = r'cudaSuccess, \d+ NaN, [1-9]\d* wrong'
RACE = r'data race(?s:.*)bugs\.cu:\d+'
NONE = r'cudaSuccess, 0 NaN, 0 wrong'
BUGS = {
    # memory
    'missing_barrier': (NAN, NAN, RACE),
    'missing_warp_barrier': (NAN, NAN, RACE),
    'blocks_race': (None, None, RACE),
    'missing_grid_barrier': (NAN, NAN, RACE),
    'relaxed_flag': (None, None, RACE),
    'shared_overrun': (None, r'bugs\.cu:\d+:\d+: runtime error: index 63 out of bounds', None),
    'dynamic_overrun': (None, r'AddressSanitizer(?s:.*)bugs\.cu:\d+', None),
    'global_overrun': (None, r'AddressSanitizer(?s:.*)bugs\.cu:\d+', None),
    'misaligned': (None, r'bugs\.cu:\d+:\d+: runtime error: .* misaligned address', None),
    'never_written': in_all(NAN),
    'copy_not_waited_for': in_all(NAN),
    'copy_of_other_threads': (NAN, NAN, RACE),
    'copy_left_behind': in_all('exits without having waited for its asynchronous copies'),
    'used_after_free': (None, r'heap-use-after-free(?s:.*)bugs\.cu:\d+', 'heap-use-after-free'),
    # warps and barriers
    'shuffle_in_a_branch': in_all('exits while its warp waits for it in a warp operation'),
    'mask_without_the_caller': in_all('lanes fffffffe, and is not one of them'),
    'two_operations': in_all('the lanes of a warp met in different warp operations'),
    'barrier_in_a_branch': in_all(r'DEADLOCK in barrier_in_a_branch(?s:.*)at barrier 0(?s:.*)'),
    'grid_barrier_alone': in_all('a barrier of the grid in a launch that is not cooperative'),
    'grid_barrier_of_some_blocks': in_all('a barrier of the grid after some of its blocks have exited'),
    'flag_of_nobody': in_all('DEADLOCK: load_acquire waits for an event that no thread can cause'),
    'flag_of_a_later_block': in_all('DEADLOCK: load_acquire waits for an event that no thread can cause'),
    # kernels that start early
    'early_read': in_all('early<Early::read>, block .* reads device memory before wait_for_last_kernel'),
    'early_write': in_all('early<Early::write>, block .* writes device memory before wait_for_last_kernel'),
    'early_atomic': in_all('early<Early::atomic>, block .* writes device memory before wait_for_last_kernel'),
    'early_copy': in_all('early<Early::copy>, block .* cp.async before wait_for_last_kernel'),
    'early_read_by_some_threads': in_all(r'early<Early::read_by_some>, block \(1, .* reads device memory before wait_for'),
    'early_return': in_all('early<Early::returns>, block .* exits without wait_for_last_kernel'),
    'early_cluster_copy': in_all('early<Early::copy>, block .* cp.async before wait_for_last_kernel'),
    'early_cluster_return': in_all('early<Early::returns>, block .* exits without wait_for_last_kernel'),
    'early_bulk_load': in_all('early_bulk_load, block .* a bulk load before wait_for_last_kernel'),
    # Hopper
    'ring<Ring::empty_not_waited_for>': in_all('more arrivals than the mbarrier expects'),
    'ring<Ring::full_not_waited_for>': in_all('DEADLOCK: a wait at an mbarrier'),
    'ring<Ring::never_released>': in_all('DEADLOCK: a wait at an mbarrier'),
    'ring<Ring::released_twice>': in_all('DEADLOCK: a wait at an mbarrier|more arrivals than the mbarrier expects'),
    'ring<Ring::not_initialised>': in_all('an mbarrier that was not initialised'),
    'ring<Ring::too_few_bytes>': in_all('DEADLOCK: a wait at an mbarrier'),
    # NaN if a copy is in flight when its other half is read
    'sharing<Sharing::own_consumers_alone>': (f'{WRONG}|{NAN}', f'{WRONG}|{NAN}', f'{WRONG}|{NAN}|data race'),
    'sharing<Sharing::never_released_there>': in_all('DEADLOCK: a wait at an mbarrier'),
    'sharing<Sharing::too_few_bytes>': in_all(f'DEADLOCK: a wait at an mbarrier|{NAN}|{WRONG}|in flight'),
    'sharing<Sharing::no_first_barrier>': in_all('an mbarrier that was not initialised'),
    'sharing<Sharing::no_last_barrier>': in_all('at one of its mbarriers is in flight|has exited, so it has no mbarrier'),
    'product<Product::waited_for_late>': in_all(WRONG),
    'product<Product::not_waited_for>': in_all('exits without having waited for its wgmma'),
    'product<Product::no_fence>': in_all('wgmma without wg_fence'),
    'product<Product::half_a_warpgroup>': in_all('wgmma requires a whole warpgroup'),
    'product<Product::read_too_early>': in_all(r'cudaSuccess, 1 NaN, 0 wrong'),
    'promotion<Promotion::added_too_early>': in_all(NAN),
    'promotion<Promotion::not_begun_anew>': in_all(WRONG),
    'promotion<Promotion::other_format>': in_all(WRONG),
    'store<Store::not_waited_for>': in_all('exits before its bulk stores have read shared memory'),
    'store<Store::overwritten>': in_all(WRONG),
    'store<Store::not_fenced>': in_all('what thread 0 wrote, without fence_proxy_async'),
    'store<Store::fenced_by_the_storing_thread>': in_all('what thread 1 wrote, without fence_proxy_async'),
    'pieces<Pieces::matrices_not_fenced>': in_all('what thread 0 wrote, without fence_proxy_async'),
    'pieces<Pieces::not_waited_for>': in_all(WRONG),
    'pieces<Pieces::waited_for_late>': in_all(WRONG),
    'cluster_without_barrier': in_all('has not reached this shared variable yet|data race|' + NAN),
    'passed_too_early': (None, None, RACE),
    'passed_and_arrived_twice': in_all('a second cluster_arrive without cluster_wait'),
    'passed_without_waiting': in_all('exits between cluster_arrive and cluster_wait'),
    # the host
    'too_many_threads': in_all('cudaErrorInvalidConfiguration'),
    'no_blocks': in_all('cudaErrorInvalidConfiguration'),
    'too_much_shared_memory': in_all('cudaErrorInvalidValue'),
    'cooperative_grid_too_large': in_all('cudaErrorCooperativeLaunchTooLarge'),
    'cluster_does_not_divide_the_grid': in_all('cudaErrorInvalidConfiguration'),
    'legacy_stream_while_capturing': in_all('cudaErrorStreamCaptureImplicit'),
    'malloc_while_capturing': in_all('cudaErrorStreamCaptureUnsupported'),
    'synchronise_while_capturing': in_all('cudaErrorStreamCaptureInvalidated'),
    'freed_twice': in_all('cudaErrorInvalidValue'),
    'copy_beyond_the_end': in_all('cudaErrorInvalidValue'),
    'unaligned_tensor_map': in_all('cudaErrorInvalidValue'),
}
# Those that go unseen unless the environment asks for more.
UNSEEN = {
    'read_without_waiting': ({'EMU_LAZY': '1'}, NAN),
    'staging_changed_too_early': ({'EMU_LAZY': '1'}, NAN),
    'host_reads_device_memory': ({'EMU_GUARD': '1'}, 'the host touched device memory'),
}


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('bug', BUGS)
def test_a_bug_is_caught(programs, bug, variant):
    pattern = BUGS[bug][VARIANTS.index(variant)]
    # blocks that wait for each other use all cores until their patience ends
    patience = '1' if pattern and 'DEADLOCK' in pattern else '3'
    _, out = run(programs / variant / 'bugs', bug, EMU_PATIENCE=patience)
    if bug == 'used_after_free' and pattern is None:
        return                                  # whatever lies there now
    assert re.search(pattern or NONE, out), out
    if pattern != RACE and 'data race' not in (pattern or '') and variant == 'tsan':
        # these bugs also let a copy and a thread, or two copies, meet at one address, if the time is right
        assert 'data race' not in out or bug in ('copy_not_waited_for', 'product<Product::waited_for_late>',
                                                 'sharing<Sharing::too_few_bytes>'), out


@pytest.mark.parametrize('bug', UNSEEN)
def test_a_bug_is_caught_where_the_environment_asks_for_it(programs, bug):
    environment, pattern = UNSEEN[bug]
    assert re.search(NONE, run(programs / 'plain/bugs', bug)[1])
    _, out = run(programs / 'plain/bugs', bug, **environment)
    assert re.search(pattern, out), out


def test_every_bug_of_the_file_is_in_a_table():
    text = (ROOT / 'tests/cuda/bugs.cu').read_text()
    named = {*re.findall(r'\bis\("(\w+)"\)', text), *re.findall(r'^ +(?:KERNEL|SHARED_BY_TWO)\(([\w<>:]+)[,)]', text, re.M)}
    assert named == {*BUGS, *UNSEEN}


# ---- the device that a program sees -----------------------------------------------------------------------------------
@pytest.mark.parametrize(('environment', 'error'), [
    ({'EMU_DEVICES': '0'}, 'cudaErrorNoDevice'), ({'EMU_DEVICES': '-1'}, 'cudaErrorInsufficientDriver'),
    ({'EMU_CAPABILITY': '7.5'}, 'cudaErrorNoKernelImageForDevice')])
def test_a_device_that_is_not_there_or_too_old(programs, environment, error):
    assert error in run(programs / 'plain/good', 'sum', **environment)[1]


def test_hoppers_instructions_stop_a_kernel_on_an_older_device(programs):
    _, out = run(programs / 'plain/good', 'matmul_wgmma', EMU_CAPABILITY='8.0')
    assert re.search(r'emulator: matmul_wgmma, block .* requires a device of capability 9.0, this one has 8.0', out), out


def test_a_setting_that_is_no_number_is_refused(programs):
    status, out = run(programs / 'plain/good', 'sum', EMU_ORDER='backwards')
    assert status and 'EMU_ORDER=backwards: not forward, reverse or a number' in out


def test_memory_has_an_end(programs):
    """A kernel whose arrays do not fit gets NULL, and its launch is not tried: here the copies to NULL are refused."""
    status, out = run(programs / 'plain/good', 'sum', EMU_MEMORY=str(1 << 16))
    assert status, out


# ---- what instructions give -----------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def emulated():
    make('build/conformance/emulated.so')
    return conformance.Library(BUILD / 'conformance/emulated.so')


@pytest.mark.parametrize('kind', ['integers', 'normal'])
def test_every_wrapper_gives_what_its_formula_says(emulated, kind):
    assert {*conformance.FORMULAS} - {'stmatrix_trans_2'} <= {*emulated.cases}
    for name, (_, count, _) in emulated.cases.items():
        x = conformance.inputs(name, count, kind)
        gap = conformance.difference(emulated.run(name, x), conformance.expected(name, x))
        assert gap <= conformance.allowed(name, kind, emulated=True), name


def code(path):
    """The text of a file of C++ without comments and strings."""
    text = (ROOT / path).read_text()
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', ' ', text, flags=re.S)


def wrappers():
    """The macros and functions that gpu.cuh and hopper.cuh offer to kernels: without those that a macro launches with."""
    names, launching = set(), ''
    for path in WRAPPERS:
        text = re.sub(r'\\\n', ' ', code(path))
        launching += ' '.join(re.findall(r'#define LAUNCH.*', text))
        names |= set(re.findall(r'#define ((?:LAUNCH|SHARED|DYN_SHARED)\w*)\(', text))
        names |= set(re.findall(r'^(?:template <[^>]*> )?DEVICE [\w:]+ \*?(\w+)\(', text, re.M))
        names |= set(re.findall(r'^static inline [\w:]+ (\w+)\(', text, re.M))
    return {name for name in names if name.startswith('LAUNCH') or not re.search(rf'\b{name}\b', launching)}


def test_every_wrapper_has_a_kernel_that_compares_it():
    found, text = wrappers(), code('cuda/test/conformance.cu')
    assert {'LAUNCH', 'mma_bf16', 'cp_async_wait', 'wgmma_tf32', 'load_acquire', 'map_shared', 'make_tensor_map_2d'} <= found
    missing = {name for name in found if not re.search(rf'\b{name}\b', text)}
    assert not missing, f'cuda/test/conformance.cu has no kernel for {sorted(missing)}'


# ---- what stands where ----------------------------------------------------------------------------------------------
# What g++ cannot parse, and sums whose order nobody knows, by the name under which they are reported.
ELSEWHERE = {
    'a launch': r'<<<',
    'a declaration of shared memory': r'\b__shared__\b',
    'an instruction': r'\b(?:__)?asm(?:__)?\b',
    'cooperative groups': r'\bcooperative_groups\b',
    'an atomic on floats': r'\batomic\w+\s*\(\s*reinterpret_cast<(?:float|double)\b|\batomic\w+\s*\([^;]*\d\.\d*f?\b',
}


def offences(text):
    return [name for name, pattern in ELSEWHERE.items() if re.search(pattern, text)]


SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / 'cuda').rglob('*.cu*')
                 if path.relative_to(ROOT).as_posix() not in WRAPPERS)


def test_only_the_wrappers_say_what_gcc_cannot_parse():
    assert 'cuda/dropout.cu' in SOURCES and 'cuda/common/block.cuh' in SOURCES
    assert {path: found for path in SOURCES if (found := offences(code(path)))} == {}


@pytest.mark.parametrize(('text', 'name'), [
    ('kernel<<<1, 32>>>(x);', 'a launch'), ('__shared__ float tile[32];', 'a declaration of shared memory'),
    ('asm volatile("bar.sync 0;");', 'an instruction'), ('cooperative_groups::this_grid().sync();', 'cooperative groups'),
    ('atomicAdd(sum, 1.0f);', 'an atomic on floats')])
def test_what_may_not_stand_elsewhere_is_found(text, name):
    assert offences(text) == [name]


def compiled(source):
    """Check a file by the compiler, without code generation."""
    if not shutil.which('g++'):
        pytest.skip('g++ is not installed: install g++')
    folders = [f'-I{folder}' for folder in ('cuda/emu/include', 'cuda/common', 'cuda', 'csrc')]
    return subprocess.run(['g++', '-std=c++17', '-fsyntax-only', '-x', 'c++', *folders, source], cwd=ROOT, capture_output=True,
                          text=True)


def test_every_header_includes_what_it_uses():
    """Each compiles alone, so it depends on no include before it."""
    headers = sorted((ROOT / 'cuda').rglob('*.cuh'))
    assert len(headers) > 15
    failed = {path.name: done.stderr for path in headers if (done := compiled(path)).returncode}
    assert not failed, '\n'.join(failed.values())


def test_a_sum_of_floats_by_atomics_does_not_compile(tmp_path):
    source = tmp_path / 'sum.cu'
    source.write_text('#include "gpu.cuh"\n__global__ void sum(float *x, float y) { atomicAdd(x, y); }\n')
    done = compiled(source)
    assert done.returncode and 'use of deleted function' in done.stderr


def test_no_environment_variable_is_left_out_of_the_page():
    read = set(re.findall(r'"(EMU_\w+)"', ''.join(path.read_text() for path in (ROOT / 'cuda/emu').glob('*.cpp'))))
    told = set(re.findall(r'`(EMU_\w+)', Path(ROOT / 'docs/emulator.md').read_text()))
    assert read == told
