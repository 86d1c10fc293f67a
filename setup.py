"""Build the kernel library with `make` and put it, with its header, into the package: `pip install .`"""
import shutil
import subprocess
import sys

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PROGRAMS = 'mnist', 'seq2seq', 'transformer'


class BuildWithLibrary(build_py):
    def run(self):
        if not shutil.which('make'):
            sys.exit('pyops: error: no `make`: install it (Debian: apt install make)')
        if subprocess.run(['make', 'cpu'], stdout=sys.stderr).returncode:
            sys.exit('pyops: error: the kernel library was not built; the line above says why')
        if subprocess.run(['make'], stdout=sys.stderr).returncode:      # adds the CUDA library where there is a GPU
            print('pyops: warning: the CUDA library was not built, and -g 1 will say so; the lines above say why',
                  file=sys.stderr)
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)       # of an earlier build, whose files would get into the wheel
        super().run()


class WithLibrary(Distribution):
    """A distribution with compiled libraries, so that setuptools builds a platform wheel."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """The library is no Python extension: any Python 3, one platform."""

    def get_tag(self):
        return 'py3', 'none', super().get_tag()[2]


# In a wheel the programs are below pyops.programs, since their names are too common for site-packages.  An editable install is
# the source tree, where they are top-level packages.
parent = '' if 'editable_wheel' in sys.argv else 'pyops.programs.'
programs = {parent + name: name for name in PROGRAMS}
setup(packages=[*find_packages(include=['pyops', 'pyops.*']), *programs], package_dir=programs,
      distclass=WithLibrary, cmdclass={'build_py': BuildWithLibrary, 'bdist_wheel': PlatformWheel})
