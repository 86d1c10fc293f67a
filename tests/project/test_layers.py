"""Imports point downward through the layers of docs/design.md, and never in a circle."""
import ast
import functools
import re

from conftest import ROOT

PROGRAMS = 'mnist', 'seq2seq', 'transformer'


def modules():
    """Return {name of a module: path} of the package and the programs."""
    found = {}
    for path in (path for top in ('pyops', *PROGRAMS) for path in (ROOT / top).rglob('*.py')):
        parts = path.relative_to(ROOT).with_suffix('').parts
        found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    return found


def imported(name, text, known, is_package=False):
    """Return the modules among `known` that a module imports when it runs, at the top or inside functions.

    Without imports for type checkers, and without those that name only `pyops` itself.
    """
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
            return [visit(child) for child in node.orelse]
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parts = name.split('.')[:len(name.split('.')) + is_package - node.level] if node.level else []
            base = '.'.join([*parts, *([node.module] if node.module else [])])
            found.update(f'{base}.{alias.name}' if f'{base}.{alias.name}' in known else base for alias in node.names)
        return [visit(child) for child in ast.iter_child_nodes(node)]
    visit(ast.parse(text))
    return found & set(known) - {'pyops', name}


@functools.cache
def all_imports():
    known = modules()
    return {name: frozenset(imported(name, path.read_text(), known, path.name == '__init__.py'))
            for name, path in known.items()}


def layers():
    """Return {module or package: number of its layer, 0 at the top} and the modules that every layer may import."""
    section = (ROOT / 'docs' / 'design.md').read_text().partition('## Layers')[2].partition('\n## ')[0]
    _, table, rest = section.split('```')
    numbers = dict.fromkeys(PROGRAMS, 0)
    for number, line in enumerate((line for line in table.splitlines() if line.startswith('pyops/')), 1):
        # at the start of a line pyops/a.py b.py or pyops/package; after it the other modules of the layer
        for name in {*re.findall(r'^pyops/(\w+)', line), *re.findall(r'(?<!/)\b(\w+)\.py', line)}:
            numbers.setdefault(f'pyops.{name}', number)
    shared = rest.partition('A `__main__.py`')[0]
    return numbers, {f'pyops.{name}' for name in re.findall(r'`pyops/(\w+)', shared)}


def layer_of(module, numbers):
    """Return the number of the layer of a module, by the longest name."""
    while module not in numbers:
        module, dot, _ = module.rpartition('.')
        assert dot, 'not in a layer'
    return numbers[module]


def test_imports_inside_functions_count_and_imports_for_type_checkers_do_not():
    known = {'pyops', 'pyops.a', 'pyops.a.b', 'pyops.c', 'pyops.d', 'pyops.e', 'pyops.f'}
    text = """
import pyops.a.b, sys
from pyops import c, __version__
from pyops.c import something
if TYPE_CHECKING:
    from pyops import d
else:
    from pyops import e
def function():
    from . import g
    from .. import f
"""
    assert imported('pyops.a', text, known, is_package=True) == {'pyops.a.b', 'pyops.c', 'pyops.e', 'pyops.f'}
    assert imported('pyops.a.x', text, known) == {'pyops.a', 'pyops.a.b', 'pyops.c', 'pyops.e', 'pyops.f'}


def test_imports_point_downward():
    numbers, shared = layers()
    assert len(set(numbers.values())) > 25 and {'pyops.errors', 'pyops.cache'} <= shared
    upward = []
    for module, found in all_imports().items():
        if not module.endswith('__main__'):
            is_shared = module in shared or module == 'pyops'
            upward += [f'{module} imports {other}' for other in sorted(found - shared)
                       if is_shared or layer_of(other, numbers) < layer_of(module, numbers)]
    assert not upward, 'see the layers in docs/design.md'


def test_no_module_imports_a_command():
    assert not [(module, other) for module, found in all_imports().items() for other in found
                if other.endswith('.__main__') and not module.endswith('.__main__')]


def test_modules_do_not_import_each_other_in_a_circle():
    left = {module: found - {f'{module}_rounded'} for module, found in all_imports().items()}
    left['pyops.methods'] -= {'pyops.numpy_protocols'}
    while free := [module for module, found in left.items() if not found & left.keys()
                   or not any(module in others for others in left.values())]:
        for module in free:
            del left[module]
    assert not left, '; '.join(f'{module} -> {", ".join(sorted(found & left.keys()))}' for module, found in left.items())
