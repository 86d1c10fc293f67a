"""Command-line flags that programs share: a parser with one-line errors, argument types, groups of flags.

Imports neither numpy nor the library, so that --help and a bad flag are quick.
"""
import argparse
import contextlib
import math
import os
import re
import sys

from pyops import COMPUTE_TYPES, CPU_PRECISIONS, FP8, PRECISIONS, __version__, examples
from pyops.environment import backend_name, exact_by_default
from pyops.errors import UserError, printable
from pyops.programs import command as module_command


class ArgumentParser(argparse.ArgumentParser):
    """argparse with --version and without abbreviated flags, since a flag that is added later may change their meaning.

    An error is one line, `PROGRAM: error: -e/--epochs: expected ..., got -1; see --help`, and exit status 2.  For an unknown
    flag, command or choice it names the nearest ones.
    """

    others = None           # the name in the namespace for the list of unknown arguments; None: they are an error

    def __init__(self, *args, docstring=None, **kwargs):
        """docstring: of the module, with examples for --help; pyops/examples.py has the examples of the commands of pyops."""
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.docstring = docstring
        # So that `-l -1e-3` is a flag with a bad value and not two flags; argparse itself knows only -1 and -1.5.
        self._negative_number_matcher = re.compile(r'-(\d|\.\d|inf|nan)')
        self.add_argument('--version', action='version', version=f'pyops {__version__}', help='print the version and exit')

    def format_help(self):
        return super().format_help() + examples.shown(self.prog, self.docstring)

    def parse_known_args(self, args=None, namespace=None):
        """Like argparse's, but unknown arguments are an error here: a subcommand reports them under its own name."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and self.others:
            setattr(namespace, self.others, unknown)
            return namespace, []
        if unknown:
            self.error(f'unrecognized arguments: {" ".join(unknown)}{self._nearest_flags(unknown)}')
        return namespace, unknown

    def _nearest_flags(self, unknown):
        typed = next((text.partition('=')[0] for text in unknown if re.match('--[a-z]', text)), None)
        if typed is None:
            return ''
        import difflib  # not at the top: needed only for an error
        flags = [flag for action in self._actions for flag in action.option_strings]
        alike = [flag for flag in flags if flag.startswith(typed[:6])]          # the same first four letters
        near = difflib.get_close_matches(typed, alike, 3, 0) or difflib.get_close_matches(typed, flags, 1, 0.75)
        return f'; did you mean {" or ".join(near)}?' if near else ''

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices)
            raise

    def error(self, message):
        message = printable(' '.join(message.removeprefix('argument ').split()))
        self.exit(2, f'{self.prog}: error: {message}{" See" if message.endswith("?") else "; see"} --help\n')

    def group(self, title, description=None):
        """Return the argument group with this title, made on first use.  --help and docs/programs.md list flags by group."""
        found = next((group for group in self._action_groups if group.title == title), None)
        return found or self.add_argument_group(title, description)

    def add_commands(self):
        """Return the object to which subcommands are added.  Each sets `run` with set_defaults(); without a subcommand `run`
        prints the help and exits with status 2."""
        def no_command(_):
            self.print_help(sys.stderr)
            self.exit(2)
        self.set_defaults(run=no_command)
        return self.add_subparsers(title='commands', metavar='COMMAND')


def did_you_mean(name, names):
    """Return '; did you mean X?' with the nearest of `names`, or '' if none is near."""
    import difflib
    by_lower_case = {str(known).lower(): known for known in names}
    near = difflib.get_close_matches(str(name).lower(), by_lower_case, 1, 0.6)
    return f'; did you mean {by_lower_case[near[0]]}?' if near else ''


def list_programs(package, description, programs, arguments=None):
    """Run `python -m PACKAGE` for a package that only contains programs: print a usage that lists them, and exit with status 2,
    or 0 for --help.

    programs: {name: one line}, for `python -m PACKAGE.NAME`
    """
    wide = max(map(len, programs))
    command = module_command(package)
    lines = [f'  {command}.{name:{wide}}  {text}' for name, text in programs.items()]
    parser = ArgumentParser(prog=command, usage=f'{command}.PROGRAM [FLAGS]',
                            description='\n'.join([description, '', *lines]),
                            epilog=f'{command}.PROGRAM --help lists the flags of a program.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ('-h', '--help', '--version'):
        parser.parse_args(arguments[:1])
    parser.print_help(sys.stderr)
    parser.exit(2)


def add_gpu_flag(parser, fp8=False):
    """-g, --gpu 1 or 0; --precision; --exact.   fp8: whether the program has layers for --precision fp8"""
    group = parser.group('GPU')
    group.add_argument('-g', '--gpu', type=int, choices=(0, 1), nargs='?', const=1,
                       help='1, or no value: run on a GPU, or on the emulator with PYOPS_EMULATE_CUDA=1; 0: run on the CPU, '
                       'whatever PYOPS_BACKEND is (default 0, or 1 if PYOPS_BACKEND=gpu)')
    group.add_argument('--precision', choices=(*PRECISIONS, FP8) if fp8 else PRECISIONS, type=str if fp8 else _no_fp8,
                       metavar=f'{{{",".join((*PRECISIONS, FP8))}}}',           # the same help in all programs
                       help='round the factors of matrix products to this precision; tf32: only on a GPU; bf16: on a GPU the '
                       'translators also store activations as bfloat16; everything else stays float32; fp8: only '
                       'transformer.train: as bf16, and linear layers multiply in FP8; see docs/cuda.md '
                       f'(default {PRECISIONS[0]})')
    group.add_argument('--exact', action=argparse.BooleanOptionalAction,
                       help='the same bits on every instruction set of x86-64, in more time; on the CPU with --precision fp32 '
                       '(default: as PYOPS_EXACT and, for a resumed run, as before)')


def _no_fp8(text):
    """An argparse type: any precision but fp8."""
    if text == FP8:
        raise argparse.ArgumentTypeError('fp8: only transformer.train has layers that multiply in FP8; give bf16')
    return text


def use_gpu(args):
    """Select the device from the flags of `add_gpu_flag`, else from $PYOPS_BACKEND, and set args.gpu to 0 or 1.

    UserError if there is no GPU, --precision tf32 is given without one, fp8 with one that cannot multiply in it, --exact with
    one or with another precision, or $PYOPS_BACKEND is unknown or, without -g, numpy.
    """
    name, source = backend_name(), 'PYOPS_BACKEND=gpu' if args.gpu is None else '-g 1'
    if args.gpu is None:
        if name == 'numpy':
            raise UserError('PYOPS_BACKEND=numpy: training and translation need the kernels of the library; '
                            'set it to cpu or gpu, or unset it')
        args.gpu = int(name == 'gpu')
    from pyops import backend
    precision = args.precision or PRECISIONS[0]
    exact, given = (exact_by_default(), 'PYOPS_EXACT=1') if args.exact is None else (args.exact, '--exact')
    if exact and args.gpu:
        raise UserError(f'{given}: a GPU gives other bits; give -g 0 to run on the CPU, or --no-exact')
    if exact and precision != 'fp32':
        raise UserError(f'{given}: expected --precision fp32, got {precision}; give that, or --no-exact')
    backend.HOST.exact = backend.HOST.fp8 = False       # bfloat16 excludes exact kernels
    if not args.gpu and name != 'cpu':
        os.environ['PYOPS_BACKEND'] = 'cpu'             # -g 0 wins; pyops.ndarray reads the variable when it is imported
        backend.use(backend.HOST)
    if args.gpu:
        from pyops.ndarray import use_gpu
        try:
            use_gpu(precision)
        except UserError as error:
            raise UserError(f'{source}: {error}') from error
        backend.HOST.precision = 'fp32'
    else:
        backend.HOST.fp8, rest = precision == FP8, 'bf16' if precision == FP8 else precision       # rest: of other products
        if rest not in CPU_PRECISIONS:
            raise UserError(f'--precision {precision}: needs a GPU; give -g 1, or --precision {" or ".join(CPU_PRECISIONS)}')
        backend.HOST.precision = rest
    if exact:
        try:
            backend.HOST.exact = True
        except ValueError as error:
            raise UserError(f'{given}: {error}; give --no-exact') from error


def select_storage(args, quant='none'):
    """On a GPU with --precision bf16 or fp8, store activations and their gradients as bfloat16, for models whose ops support
    it; with bf16 not for `quant`, the argument of --quant, which rounds float32 activations to other formats."""
    from pyops import backend
    if (args.precision == FP8 or args.precision == 'bf16' and quant == 'none') and not backend.current_device().is_host:
        backend.current_device().storage = 'bf16'


def use_device(args):
    """Select the device (`use_gpu`) and set the number of threads (`add_threads_flag`)."""
    use_gpu(args)
    if args.threads:
        from pyops import backend
        backend.set_threads(args.threads)


def add_rank_flags(parser, default):
    """--parts N, --reduce NAME: how ranks (pyops.distributed) share a batch.   default: of --parts, for --help"""
    group = parser.group('several processes')
    group.add_argument('--parts', type=power_of_two, metavar='N',
                       help='cut each batch into N parts, a power of two, whose gradients are added in a fixed order: with the '
                       f'same N, any number of ranks up to N trains the same bits (default: {default}1, under mpirun 8)')
    group.add_argument('--reduce', choices=('exact', 'fast'), default='exact',
                       help='exact: the fixed order; fast: the order of the library of MPI or NCCL, and one part for each rank '
                       '(default %(default)s)')
    group.add_argument('--shard-optimizer', action='store_true',
                       help='each rank keeps the moments of Adam of its share of the parameters, and updates this share; the '
                       'same bits and the same checkpoint')


def use_ranks(args):
    """Join the ranks that a launcher started, and give each its share of the cores.  Call it after use_device()."""
    from pyops import backend, distributed
    if args.shard_optimizer and args.reduce == 'fast':
        raise UserError('--shard-optimizer: needs the fixed order of sums; leave out --reduce fast')
    distributed.init()
    if distributed.size() == 1:
        return
    if not args.threads and not os.environ.get('OMP_NUM_THREADS'):
        backend.set_threads(distributed.share_cores())


def add_quant_flags(parser, default):
    """--quant, --quant-layers: which operands of matrix products are rounded to which number format (pyops.quantization).
    default: the recipe without --quant, for --help."""
    group = parser.group('number formats')
    group.add_argument('--quant', type=_recipe, metavar='RECIPE',
                       help='quantize the operands of matrix products to a format such as hifp8, mxfp8, nvfp4 or bf16; or some '
                       'operands, as operand=format separated by commas: fwd=mxfp8,dgrad.g=hifp8,attention=none; or @FILE, '
                       f'the recipe in a file; see docs/quantization.md (default: {default})')
    group.add_argument('--quant-layers', metavar='PATTERN',
                       help="quantize only layers with these names, such as 'encoder.*,output' "
                       f"(default: {'as in the checkpoint, else ' * ('checkpoint' in default)}all)")


def add_compute_flag(parser):
    """--compute TYPE, for pyops.load."""
    parser.group('compute type').add_argument(
        '--compute', choices=COMPUTE_TYPES, default=COMPUTE_TYPES[0],
        help='keep the weights in this type and multiply in it: bf16 takes half of the memory of float32, int8 a quarter, and '
        'both are faster; only on the CPU; see docs/compact.md (default %(default)s)')


def _recipe(text):
    """An argparse type: the text of a pyops.quantization.Recipe.  @FILE: the recipe in a file."""
    from pyops.quantization import Recipe, read_recipe
    try:
        return str(Recipe.parse(read_recipe(text[1:]) if text.startswith('@') else text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_threads_flag(parser, group='training'):
    """--threads N, for pyops.backend.set_threads."""
    parser.group(group).add_argument('--threads', type=int_up_to(1024), metavar='N',
                                     help='number of threads; results do not depend on it (default: all cores)')


def add_address_flags(group, port):
    """--port N, --host ADDRESS, for pyops.network.listen.   port: the default"""
    group.add_argument('--port', type=lambda text: _int(text, 0, 65535), default=port, metavar='N',
                       help='port; 0: any free port (default %(default)s)')
    group.add_argument('--host', default='127.0.0.1', metavar='ADDRESS',
                       help='address to listen on; 127.0.0.1 accepts only this machine (default %(default)s)')


def add_max_steps_flag(parser):
    """--max-steps N, of pyops.fit."""
    parser.group('training').add_argument('--max-steps', type=positive_int, metavar='N',
                                          help='stop after N training steps, with exit status 0 (default: no limit)')


def add_finite_flags(parser):
    """--max-skipped N, --check-finite [DIR], of pyops.finite."""
    group = parser.group('finite values')
    group.add_argument('--max-skipped', type=non_negative_int, default=0, metavar='N',
                       help='skip up to N steps of the run whose loss or gradient is infinite or NaN: such a step changes no '
                       'parameter; 0: the first one ends the run (default %(default)s)')
    group.add_argument('--check-finite', nargs='?', const='.', metavar='DIR',
                       help='for such a step, find the kernel that computed the first value that is not finite, and save its '
                       'inputs in DIR, for python -m pyops replay (default: off; DIR: the current folder)')


def add_plan_flags(parser):
    """--plan, --profile [FILE], --dot FILE: describe the training step instead of training;  -v: list its kernels first;
    --no-plan: train without a plan.

    args.listing: 'kernels' with -v, 'summary' without it; a program may add flags with other values, and the last one counts.
    """
    group = parser.group('training step', 'With --plan, --profile or --dot the program describes a training step and exits.')
    group.add_argument('--plan', action='store_true', help='print every tensor, every kernel and the memory of a step')
    group.add_argument('--profile', nargs='?', const=False, type=output_file, metavar='FILE',
                       help='time every kernel of a step; FILE: also write a Chrome trace, for chrome://tracing or Perfetto')
    group.add_argument('--dot', type=output_file, metavar='FILE', help='write the step as a graph for Graphviz')
    exclusive = group.add_mutually_exclusive_group()
    exclusive.add_argument('-v', '--verbose', dest='listing', action='store_const', const='kernels', default='summary',
                           help='list every kernel of a step, then train')
    exclusive.add_argument('--no-plan', action='store_true',
                           help='train, but run every step from Python: slower, same numbers')


def plan_requested(args):
    """Return whether the flags of `add_plan_flags` ask for a description of the step instead of training."""
    return bool(args.plan or args.profile is not None or args.dot is not None)


def output_file(text):
    """An argparse type: a file that can be written, checked before the work that produces its content.  An existing file is
    not changed."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, got ''")
    if not os.path.exists(text) or os.path.isfile(text) or os.path.isdir(text):     # not a pipe, whose reader would notice
        is_new = not os.path.exists(text)
        try:
            with open(text, 'ab'):
                pass
            if is_new:
                with contextlib.suppress(FileNotFoundError):    # another rank checks the same file
                    os.unlink(os.path.realpath(text))
        except OSError as error:
            raise argparse.ArgumentTypeError(f'{text}: cannot be written ({error.strerror}); '
                                             'name a file in a folder that exists') from None
    return text


LARGEST_INT = 10**18 - 1        # fits C's int64_t
POWERS_OF_TWO = [2 ** exponent for exponent in range(11)]


def positive_int(text):
    """An argparse type: a whole number >= 1."""
    return _int(text, 1)


def non_negative_int(text):
    """An argparse type: a whole number >= 0."""
    return _int(text, 0)


def int_up_to(most):
    """Return an argparse type: a whole number from 1 to `most`, for sizes where a typing error asks for too much memory."""
    return lambda text: _int(text, 1, most)


def power_of_two(text):
    """An argparse type: 1, 2, 4, ..., 1024."""
    if text in map(str, POWERS_OF_TWO):
        return int(text)
    raise _unexpected(text, 'a power of two from 1 to 1024')


def positive_float(text):
    """An argparse type: a number > 0 that is neither zero nor infinite as float32, which kernels calculate in."""
    return _float(text, 'a number from 1e-37 to 1e38', lambda value: 1e-37 <= value <= 1e38)


def non_negative_float(text):
    """An argparse type: a finite number >= 0."""
    return _float(text, 'a finite number >= 0', lambda value: 0 <= value < math.inf)


def fraction(text):
    """An argparse type: a number with 0 <= number < 1, as for a share held out or dropped."""
    return _float(text, 'a number >= 0 and < 1', lambda value: 0 <= value < 1)


def _int(text, least, most=LARGEST_INT):
    if re.fullmatch(r'[+-]?[0-9]{1,18}', text) and least <= int(text) <= most:
        return int(text)
    has_bound = most < LARGEST_INT or re.fullmatch(r'\+?[0-9]{19,}', text)     # else it is no part of the problem
    raise _unexpected(text, f'a whole number from {least} to {most}' if has_bound else f'a whole number >= {least}')


def _float(text, expected, is_good):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise _unexpected(text, expected)
    return value


def _unexpected(text, expected):
    return argparse.ArgumentTypeError(f'expected {expected}, got ' + (text or "''"))
