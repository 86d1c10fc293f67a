"""Build the kernel library with `make` and put it, with its header, into the package: `pip install .`"""
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildWithLibrary(build_py):
    def run(self):
        if not shutil.which('make'):
            sys.exit('pyops: error: no `make`: install it (Debian: apt install make)')
        if subprocess.run(['make', 'cpu'], stdout=sys.stderr).returncode:
            sys.exit('pyops: error: the kernel library was not built; the line above says why')
        super().run()


class PlatformWheel(bdist_wheel):
    """The library is no Python extension: any Python 3, one platform."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return 'py3', 'none', super().get_tag()[2]


setup(cmdclass={'build_py': BuildWithLibrary, 'bdist_wheel': PlatformWheel})
