"""Which statements of a package have run: each is given a probe, and those that have run lose it, so that they cost nothing.

The functions that are loaded get new code, compiled from their sources with `reached[n] = 1` before statement n.  sys.settrace
makes Python several times slower, and sys.monitoring, which can turn a line off as well, needs Python 3.12.
"""
import ast
import gc
import os
from types import CodeType, FunctionType

_NAME = '__reached__'               # of the bytearray, in the globals of each function
_BODIES = 'body', 'orelse', 'finalbody', 'handlers', 'cases'


class Probes:
    """The statements in functions of the files below a folder.  Module and class bodies ran when they were imported."""

    def __init__(self, root):
        self._root = os.path.join(root, '')
        self._reached, self._known = bytearray(), bytearray()      # a byte for each statement: whether it has run
        self._first = {}            # file -> (number of its first statement, number after its last)
        self._full = {}             # file -> its code with all probes, of _compiled
        self._thinned = {}          # file -> (how many of its statements had run, its code without their probes)
        self._original = {}         # key of a function -> its code without probes

    def prepare(self):
        """Compile the files of all loaded functions.  Processes that are forked after that need not do it."""
        for function in self._functions():
            self._file(function.__code__)

    def install(self):
        """Give a probe to each statement of the loaded functions.  None has run yet."""
        self.prepare()
        self._thinned.clear()
        self._reached[:] = self._known[:] = bytes(len(self._reached))
        self._replace(self._full)

    def has_new(self):
        """Return whether a statement has run for the first time since the last call, or since install()."""
        if self._reached == self._known:
            return False
        self._known[:] = self._reached
        return True

    def thin(self):
        """Remove the probes of statements that have run, and give probes to functions that were imported since."""
        self.prepare()
        for file, (first, end) in self._first.items():
            if (reached := sum(self._reached[first:end])) != self._thinned.get(file, (0,))[0]:
                self._thinned[file] = reached, self._compiled(file)
        self._replace(self._full | {file: codes for file, (_, codes) in self._thinned.items()})

    def remove(self):
        """Give back all functions their code."""
        for function in self._functions():
            function.__code__ = self._original[_key(function.__code__)]

    def _functions(self):
        return [found for found in gc.get_objects() if isinstance(found, FunctionType)
                and found.__code__.co_filename.startswith(self._root) and not found.__code__.co_name.startswith('<')]

    def _file(self, code):
        """Note the code of a function, and compile its file if that is new."""
        file = code.co_filename
        if file not in self._first:
            self._first[file] = len(self._reached), len(self._reached)
            self._full[file] = self._compiled(file)
        if _key(code) not in self._original:
            self._original |= {_key(each): each for each in _nested(code)}

    def _replace(self, codes):
        for function in self._functions():
            code = codes[function.__code__.co_filename].get(_key(function.__code__))
            if code is not None:                    # None: the file was changed since its import
                function.__globals__[_NAME] = self._reached
                function.__code__ = code

    def _compiled(self, file):
        """Return {key: code} of the functions in a file, with probes for the statements that have not run."""
        with open(file, 'rb') as stream:
            tree = ast.parse(stream.read(), file)
        number = self._first[file][0]
        for body in list(_bodies(tree)):
            statements = []
            for statement in body:
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):     # a docstring
                    if number == len(self._reached):
                        self._reached.append(0)
                        self._known.append(0)
                    if not self._reached[number]:
                        statements.append(_probe(number, statement))
                    number += 1
                statements.append(statement)
            body[:] = statements
        self._first[file] = self._first[file][0], number
        return {_key(code): code for code in _nested(compile(tree, file, 'exec', dont_inherit=True))}


def _key(code):
    return code.co_filename, code.co_firstlineno, code.co_qualname


def _nested(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _bodies(node, inside=False):
    """Yield the lists of statements inside functions."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name in _BODIES:
        for child in getattr(node, name, ()):
            yield from _bodies(child, inside)
        if inside and name not in ('handlers', 'cases') and getattr(node, name, ()):
            yield getattr(node, name)


def _probe(number, statement):
    """Return the statement `__reached__[number] = 1` at the place of another."""
    place = ast.Subscript(ast.Name(_NAME, ast.Load()), ast.Constant(number), ast.Store())
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([place], ast.Constant(1)), statement))
