"""Build the conda package of conda/recipe.yaml and run its tests in an environment with it, for `make conda`.

    python -m scripts.conda_package dist/conda

It needs py-rattler-build (`pip install 'pyops[conda]'`), not conda, and takes what the recipe requires from conda-forge.
"""
from pathlib import Path

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'scripts.conda_package'
RECIPE = Path(__file__).resolve().parents[1] / 'conda/recipe.yaml'


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Build a conda package and test it.')
    p.add_argument('folder', metavar='FOLDER', help='folder for the package; it is created')
    p.add_argument('--channel', metavar='NAME', default='conda-forge',
                   help='conda channel with the requirements, a name or a URL (default %(default)s)')
    return p


def rendered():
    """Return the recipe for this machine, as rattler-build understands it."""
    try:
        from rattler_build import Stage0Recipe, VariantConfig
    except ImportError as error:
        raise UserError("py-rattler-build is not installed; install it with: pip install 'pyops[conda]'") from error
    variant, = Stage0Recipe.from_file(str(RECIPE)).render(VariantConfig())
    return variant


def main(argv=None):
    args = parser().parse_args(argv)
    variant = rendered()
    from rattler_build import Package, RattlerBuildError, ToolConfiguration
    try:
        built = variant.run_build(channels=[args.channel], output_dir=args.folder,
                                  tool_config=ToolConfiguration(test_strategy='skip'))
        path, = built.packages
        results = Package.from_file(str(path)).run_tests(channel=[args.channel])
    except RattlerBuildError as error:
        reason = ' '.join(str(error).split()).removeprefix('PyRattlerBuildError: ')
        raise UserError(f'cannot build with channel {args.channel} ({reason}); name another with --channel') from error
    for result in results:
        if not result.success:
            raise UserError(f'{path}: the package is built, but its test {result.test_index + 1} failed: '
                            f'{" / ".join(result.output[-3:])}')
    print(f'{path} : {len(results)} tests passed')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
