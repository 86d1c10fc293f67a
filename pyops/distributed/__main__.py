"""python -m pyops.distributed doctor: check the ranks that a launcher starts."""
from __future__ import annotations

from argparse import Namespace

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'pyops.distributed'


def parser() -> ArgumentParser:
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Check the processes that mpirun starts.')
    command = p.add_commands().add_parser('doctor', help='print ranks, hosts and versions, compare sums, and time them',
                                          description='Print ranks, hosts and versions; compare the bits of sums over ranks, '
                                          'and time them.  Start it as the training: mpirun -n 2 python -m pyops.distributed '
                                          'doctor')
    command.set_defaults(run=doctor)
    return p


def doctor(_: Namespace) -> None:
    from pyops.distributed import doctor
    doctor.run()


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    args.run(args)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
