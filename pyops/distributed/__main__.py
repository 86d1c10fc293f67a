"""python -m pyops.distributed doctor: check the ranks that a launcher starts;  model: predict the time of a step."""
from __future__ import annotations

from argparse import Namespace

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, fraction, non_negative_float, positive_float, positive_int

PROGRAM = 'pyops.distributed'


def parser() -> ArgumentParser:
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Check several processes, and predict their speed.')
    commands = p.add_commands()
    command = commands.add_parser('doctor', help='print ranks, hosts and versions, compare sums, and time them',
                                  description='Print ranks, hosts and versions; compare the bits of sums over ranks, and time '
                                  'them.  Start it as the training: mpirun -n 2 python -m pyops.distributed doctor')
    command.add_argument('-g', '--gpu', type=int, choices=(0, 1), default=0,
                         help='1: each rank uses a GPU, and NCCL adds; 0: the CPU (default %(default)s)')
    command.set_defaults(run=doctor)
    command = commands.add_parser('model', help='predict the time of a training step on 1 to 1,024 ranks',
                                  description='Predict the time of a training step on 1 to 1,024 ranks.  python -m '
                                  'bench.scaling measures the costs; docs/scaling.md explains the model.')
    costs = command.group('costs of a step on one rank')
    costs.add_argument('--part-ms', type=non_negative_float, required=True, metavar='X', help='of each part, whatever its size')
    costs.add_argument('--sample-ms', type=positive_float, required=True, metavar='X', help='of each sample')
    costs.add_argument('--add-ms', type=non_negative_float, required=True, metavar='X',
                       help='of a pass that adds the gradients of two parts')
    costs.add_argument('--update-ms', type=non_negative_float, required=True, metavar='X', help='of the norm and the optimizer')
    costs.add_argument('--megabytes', type=positive_float, required=True, metavar='X', help='of gradients that are sent')
    costs.add_argument('--hidden', type=fraction, default=0.0, metavar='F',
                       help='share of the time of a part in which gradients are sent (default %(default)s)')
    costs.add_argument('--sums', type=positive_int, default=1, metavar='N',
                       help='sums over ranks that the gradients are divided into (default %(default)s)')
    batch, link = command.group('batch'), command.group('link')
    batch.add_argument('--samples', type=positive_int, required=True, metavar='N', help='samples of a batch')
    batch.add_argument('--shard-optimizer', action='store_true', help='each rank updates its share of the parameters')
    link.add_argument('--gbit', type=positive_float, required=True, metavar='X', help='bandwidth in Gbit/s, each way')
    link.add_argument('--latency-us', type=non_negative_float, default=50.0, metavar='X',
                      help='time of an empty message in microseconds (default %(default)s)')
    command.set_defaults(run=model)
    return p


def doctor(args: Namespace) -> None:
    from pyops.distributed import doctor
    doctor.run(bool(args.gpu))


def model(args: Namespace) -> None:
    from pyops.distributed.model import Link, Work, table
    work = Work(args.part_ms / 1e3, args.sample_ms / 1e3, args.add_ms / 1e3, args.update_ms / 1e3, args.megabytes * 1e6 / 4,
                args.hidden, args.sums)
    print(table(work, Link(args.latency_us / 1e6, args.gbit * 1e9 / 8), args.samples, args.shard_optimizer))


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    args.run(args)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
