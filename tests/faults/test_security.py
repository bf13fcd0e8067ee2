"""Nothing that a user downloads runs code, or takes the machine: expressions of configurations, pickles of info files.

Random inputs are grown from what is valid; each must give plain data or one of the documented errors, in bounded time and memory.
"""
import ast
import io
import os
import pickle
import pickletools
import random
import resource
import sys
import time
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mmdet3d_ext.config.errors import ConfigError
from mmdet3d_ext.config.expressions import FUNCTIONS, Resolver
from mmdet3d_ext.datasets import restricted_pickle
from mmdet3d_ext.datasets.restricted_pickle import UnsafePickleError

SECONDS = 2.0  # of processor time for one hostile input, on a slow machine
PLAIN = (int, float, str, bool, type(None))
QUIET = settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck), derandomize=True, database=None)

# What must never happen: any of Python's audited events that start something, open something, or make code.
FORBIDDEN = ('exec', 'os.', 'subprocess.', 'open', 'socket.', 'ctypes.', 'marshal.', 'code.__new__', 'shutil.')
_watched = []
_hook_added = False


def _audit(event, args):
    if _watched and event.startswith(FORBIDDEN) and not (
            event == 'open' and args and args[0] in _watched[0]['files']):
        _watched[0]['events'].append((event, repr(args)[:200]))


class Nothing:
    """While it is entered, audited events are collected; ``check`` says that there were none."""

    def __init__(self, *files):
        global _hook_added
        if not _hook_added:
            sys.addaudithook(_audit)
            _hook_added = True
        self.seen = {'events': [], 'files': [*files, '/proc/self/statm']}

    def __enter__(self):
        _watched[:] = [self.seen]
        return self

    def __exit__(self, *_):
        _watched.clear()

    def check(self):
        assert not self.seen['events'], self.seen['events']


# ---- expressions -----------------------------------------------------------------------------------------------------------

TREE = {'a': 3, 'b': [1, 2.5, 'x'], 'c': {'d': {'e': [0, 1]}, 'f': 'text'}, 'g': '${a * 2}', 'h': [{'i': 1}], 'n': None, 'y': True}


def resolve(text, tree=None):
    """The value of ``text`` or the ConfigError; the time is bounded."""
    start = time.process_time()
    with Nothing() as nothing:
        try:
            found = Resolver({**(tree or TREE), 'target': text}, lambda path: 'file.yaml:1', {}).resolve()['target']
        except ConfigError as error:
            found = error
    nothing.check()
    assert time.process_time() - start < SECONDS, text[:200]
    return found


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, PLAIN) and is_plain(item) for key, item in value.items())
    return all(map(is_plain, value)) if type(value) is list else type(value) in PLAIN


def check(text, tree=None):
    found = resolve(text, tree)
    assert isinstance(found, ConfigError) or is_plain(found), (text, found)
    return found


names = st.sampled_from([*TREE, 'd', 'e', '__class__', '__import__', 'os', 'self', '_Resolver', 'known', 'tree', *FUNCTIONS])
atoms = st.one_of(names, st.integers(-10 ** 40, 10 ** 40).map(str), st.floats(allow_nan=False).map(repr), st.text(max_size=8).map(repr),
                  st.sampled_from(['True', 'None', '[]', '{}', '()', '10 ** 9', '"a" * 99999', '[0] * 99999', '1e308',
                                   '"${a}"', '"$" + "{a}"']))


def grown(inner):
    """Larger expressions from smaller ones: operators, calls, displays, subscripts, and what is not allowed."""
    two = st.tuples(inner, inner)
    binary = st.sampled_from(['+', '-', '*', '/', '//', '%', '**', '==', '<', 'in', 'and', 'or', 'is', '@', '<<', '|', ':='])
    return st.one_of(
        st.tuples(two, binary).map(lambda t: f'({t[0][0]} {t[1]} {t[0][1]})'),
        st.tuples(names, inner).map(lambda t: f'{t[0]}({t[1]})'), two.map(lambda t: f'min({t[0]}, {t[1]})'),
        inner.map(lambda t: f'[{t}]'), inner.map(lambda t: f'[*{t}]'), two.map(lambda t: f'{{{t[0]}: {t[1]}}}'),
        two.map(lambda t: f'({t[0]})[{t[1]}]'), two.map(lambda t: f'({t[0]})[{t[1]}:]'),
        st.tuples(inner, names).map(lambda t: f'({t[0]}).{t[1]}'),
        two.map(lambda t: f'({t[0]} if {t[1]} else {t[0]})'), inner.map(lambda t: f'not {t}'), inner.map(lambda t: f'-{t}'),
        inner.map(lambda t: f'(lambda: {t})()'), inner.map(lambda t: f'[x for x in {t}]'), inner.map(lambda t: f'f"{{{t}}}"'),
        inner.map(lambda t: f'"${{{t}}}"'), inner.map(lambda t: f'range({t})'), inner.map(lambda t: f'{{**{t}}}'))


@QUIET
@given(st.recursive(atoms, grown, max_leaves=25))
@example('([[0] * 90000] * 90000) == ([[0.0] * 90000] * 90000)')
@example('[[[0] * 300] * 300] * 300')
@example('max([["a" * 300] * 300] * 300)')
def test_grown_expressions_are_plain_data_or_refused(text):
    check('${' + text + '}')
    check('x${' + text + '}y')


@QUIET
@given(st.lists(st.sampled_from([*'abcdefgh_.()[]{}$"\'\\ 0123456789+-*/%<>=,:\n\t\x00é', '${', '}', '**', '__', 'lambda ']),
                max_size=120).map(''.join))
def test_any_text(text):
    check(text)
    check('${' + text)
    check('${' + text + '}')


@QUIET
@given(st.dictionaries(st.sampled_from('abcdefgh'), st.recursive(atoms, grown, max_leaves=6).map(lambda t: '${' + t + '}'), max_size=6))
def test_expressions_that_refer_to_each_other(tree):
    start = time.process_time()
    try:
        found = Resolver(tree, lambda path: 'file.yaml:1', {}).resolve()
        assert is_plain(found)
    except ConfigError:
        pass
    assert time.process_time() - start < SECONDS


BOMBS = {
    'nested products': '${[[0] * 10000] * 10000}', 'products of products': '${[[[[9] * 99] * 99] * 99] * 99}',
    'comparison of products': '${([[0] * 90000] * 90000) == ([[0.0] * 90000] * 90000)}', 'huge power': '${9 ** 9 ** 9 ** 9}',
    'power of a power': '${((2 ** 1000) ** 1000) ** 1000}', 'negative power': '${2 ** -(10 ** 9)}', 'float power': '${1e308 ** 1e308}',
    'long text': '${"a" * 10 ** 12}', 'many texts': '${["a" * 90000] * 90000}', 'deep parentheses': '${' + '(' * 900 + '1' + ')' * 900 + '}',
    'deep lists': '${' + '[' * 950 + ']' * 950 + '}', 'deep minus': '${' + '-' * 1950 + '1}', 'deep power': '${' + '2 ** ' * 380 + '1}',
    'deep subscripts': '${b' + '[0]' * 600 + '}', 'deep attributes': '${c' + '.d' * 900 + '}',
    'deep conditions': '${' + '1 if 1 else ' * 150 + '1}',
    'many expressions': '${a}' * 20000, 'nested expressions': '${' * 3000 + '}' * 3000, 'long number': '${' + '9' * 1900 + '}',
    'hexadecimal number': '${int("f" * 90000, 16)}', 'long range': '${[range(99999), range(99999), range(99999)] * 9}',
    'rounding': '${round(10 ** 300, -(10 ** 300))}', 'own text': '${"$" + "{a}" + "$" + "{a}"}', 'key': '${c["' + 'k' * 1900 + '"]}',
    'slice': '${("a" * 99999)[::-1][::-1]}', 'one that quotes itself': '${"${" + "target" + "}"}',
}


@pytest.mark.parametrize('name', BOMBS)
def test_bombs_are_bounded(name, fault_record):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check(BOMBS[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    if name in ('nested products', 'huge power', 'long text', 'deep lists'):
        fault_record(f'configuration with {name}', 'refused in milliseconds, with file and key')


def test_a_whole_configuration_is_bounded():
    """Keys that double each other, in text, lists and mappings."""
    for tree in ({'k0': 'x' * 999, **{f'k{i}': f'${{k{i - 1}}}${{k{i - 1}}}' for i in range(1, 40)}},
                 {'k0': [0], **{f'k{i}': f'${{[k{i - 1}, k{i - 1}]}}' for i in range(1, 40)}},
                 {'k0': {'a': 1}, **{f'k{i}': f'${{{{"l": k{i - 1}, "r": k{i - 1}}}}}' for i in range(1, 40)}}):
        start = time.process_time()
        with pytest.raises(ConfigError):
            Resolver(tree, lambda path: 'f', {}).resolve()
        assert time.process_time() - start < 20


def test_the_whitelist_is_what_it_was():
    """A new node or function is a decision: look at this file, then change the list."""
    nodes = sorted(name[len('_node_'):] for name in dir(Resolver) if name.startswith('_node_'))
    assert nodes == ['attribute', 'binop', 'boolop', 'call', 'compare', 'constant', 'dict', 'ifexp', 'list', 'name', 'subscript', 'tuple',
                     'unaryop']
    assert sorted(FUNCTIONS) == ['abs', 'float', 'int', 'len', 'max', 'min', 'range', 'round', 'str', 'sum']
    assert all(hasattr(ast, node) for node in ('Attribute', 'BinOp', 'Call'))


# ---- pickles ------------------------------------------------------------------------------------------------------------------

INFO = {'infos': [{'token': 't', 'gt_boxes': np.arange(14.0).reshape(2, 7), 'gt_names': np.array(['car', 'truck']), 'valid': np.ones(2, bool),
                   'speed': np.float32(2.5), 'raw': b'ab', 'objects': np.array(['a', None], object), 'path': 'x/y.bin', 'n': 10 ** 30,
                   'set': {1, 2}, 'o': OrderedDict(a=1), 'c': 1 + 2j, 'r': range(3), 'ba': bytearray(b'q')}], 'metadata': {'version': 'v1.0'}}
SEEDS = [pickle.dumps(INFO, protocol) for protocol in range(6)]
DATA_TYPES = (*PLAIN, bytes, bytearray, complex, list, tuple, dict, set, frozenset, OrderedDict, slice, range, np.ndarray, np.generic, np.dtype)
GLOBALS = [b'os\nsystem', b'posix\nsystem', b'builtins\neval', b'builtins\nexec', b'builtins\ngetattr', b'builtins\n__import__',
           b'subprocess\nPopen', b'numpy\ndtype', b'numpy\nndarray', b'numpy\nload', b'numpy.core.multiarray\n_reconstruct',
           b'numpy.core.multiarray\nscalar', b'_codecs\nencode', b'builtins\nbytearray', b'builtins\nset', b'collections\nOrderedDict',
           b'builtins\nrange', b'copyreg\n_reconstructor', b'functools\npartial', b'operator\nattrgetter', b'numpy\ndtype.__class__',
           b'torch\nload', b'mmcv\nConfig', b'pickle\nloads', b'numpy.core.numeric\n_frombuffer']


def only_data(value, budget=20000):
    """Whether a value holds nothing but data types (each object is looked at once, a bounded number of them)."""
    seen, left = {}, [value]
    while left and len(seen) < budget:
        item = left.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if not isinstance(item, DATA_TYPES):
            # A file may leave a name that it could have called where a value belongs: it is inert, one of the reader's own.
            if not any(item is known for known in restricted_pickle._REAL.values()):
                return False
            continue
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            left += item
        elif isinstance(item, np.ndarray) and item.dtype == object:
            left += item.ravel().tolist()
    return True


def load(data, path):
    """Load bytes; the value, or the documented error. Time, memory and events are watched."""
    path.write_bytes(data)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Nothing(str(path), path, os.fspath(path)) as nothing:
        try:
            found = restricted_pickle.load(path)
        except (UnsafePickleError, ValueError) as error:
            found = error
            assert str(path) in str(error)
    nothing.check()
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_500_000  # KiB; the limit of the first pass
    return found


def check_pickle(data, path):
    found = load(data, path)
    if not isinstance(found, ValueError) and not isinstance(found, UnsafePickleError):
        assert only_data(found), type(found)
    return found


def test_seeds_are_read(tmp_path):
    for data in SEEDS:
        pickle.loads(data)  # codecs are imported when they are first used
        assert load(data, tmp_path / 'x')['infos'][0]['token'] == 't'


def mutated(rng, data):
    """Bytes changed, cut, doubled, exchanged for opcodes, or a global put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:at + rng.randrange(1, 20)]
        elif kind == 3:
            piece = data[at:at + rng.randrange(1, 40)]
            data[at:at] = piece * rng.choice((1, 2, 50))
        elif kind == 4:
            data[at:at] = rng.choice(OPCODES)
        elif kind == 5:
            data[at:at] = b'c' + rng.choice(GLOBALS) + b'\n' + rng.choice((b'', b'(K\x01tR', b')R', b')\x81', b'}b', b'J\xff\xff\xff\x7f\x85R'))
        else:
            data[at:at + 4] = rng.choice((b'\xff\xff\xff\x7f', b'\xff\xff\xff\xff', b'\x00\x00\x00\x80', b'\x00\x00\x00\x00'))
        if not data:
            data = bytearray(b'.')
    return bytes(data)


OPCODES = [op.code.encode('latin1') for op in pickletools.opcodes]


@pytest.mark.parametrize('protocol', range(6))
def test_mutated_info_files(tmp_path, protocol):
    rng = random.Random(protocol)
    data_found = 0
    for _ in range(800):
        found = check_pickle(mutated(rng, SEEDS[protocol]), tmp_path / 'x')
        data_found += not isinstance(found, Exception)
    assert 0 < data_found < 800  # some changes hit a value only


def test_random_opcodes(tmp_path):
    """Programs of valid opcodes with small arguments, calls of everything that is allowed among them."""
    rng = random.Random(0)
    small = [b'N', b'K\x01', b'J\xff\xff\xff\x7f', b'(', b')', b']', b'}', b'\x8f', b'(K\x01K\x02t', b'\x85', b'\x86', b'\x87', b'R', b'b',
             b'\x81', b'a', b'e', b's', b'u', b'\x90', b'0', b'1', b'2', b'q\x00', b'h\x00', b'\x94',
             b'X\x02\x00\x00\x00f8', b'X\x02\x00\x00\x00O8',
             b'C\x08AAAAAAAA', b'\x88', b'\x89', b'i' + GLOBALS[7] + b'\n', b'o', b'\x92', b'\x93', b'r\xff\xff\xff\xff', b'G' + b'\x00' * 8,
             *(b'c' + name + b'\n' for name in GLOBALS)]
    for _ in range(2500):
        program = b'\x80\x04' + b''.join(rng.choice(small) for _ in range(rng.randrange(2, 25))) + b'.'
        check_pickle(program, tmp_path / 'x')


class Bomb:
    def __reduce__(self):
        return os.mkdir, ('hacked',)


def test_code_never_runs(tmp_path, monkeypatch, fault_record):
    monkeypatch.chdir(tmp_path)
    for protocol in range(6):
        assert isinstance(load(pickle.dumps({'infos': [Bomb()]}, protocol), tmp_path / 'x'), UnsafePickleError)
    for name in GLOBALS[:7]:
        for call in (b'(S"true"\ntR.', b'(S"true"\no.', b')\x81.', b'.'):
            assert isinstance(load(b'c' + name + b'\n' + call, tmp_path / 'x'), UnsafePickleError | ValueError)
    assert sorted(os.listdir(tmp_path)) == ['x']
    fault_record('an info file that would run code', 'refused, naming what it asked for; nothing ran')


HUGE = {
    'memo index': b'\x80\x02Nr\xff\xff\xff\xff.', 'memo index as text': b'Np4294967295\n.', 'bytes': b'\x8e' + b'\xff' * 7 + b'\x7fx.',
    'text': b'\x8d' + b'\xff' * 7 + b'\x7fx.', 'frame': b'\x80\x04\x95' + b'\xff' * 7 + b'\x7fN.', 'long': b'\x8b\xff\xff\xff\x7f1.',
    'bytearray': b'\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.', 'bytearray call': b'cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.',
    'set of range': b'cbuiltins\nset\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.', 'depth': b']' * 200000 + b'a' * 199999 + b'.',
    'decimal number': b'L' + b'9' * 2_000_000 + b'L\n.', 'array': pickle.dumps(np.zeros(2), 2).replace(b'K\x02\x85', b'J\xff\xff\xff\x7f\x85'),
}


@pytest.mark.parametrize('name', HUGE)
def test_small_files_that_ask_for_much(tmp_path, name, fault_record):
    check_pickle(HUGE[name], tmp_path / 'x')
    if name in ('memo index', 'set of range', 'bytearray call'):
        fault_record(f'an info file of {len(HUGE[name])} bytes that asks for gigabytes ({name})', 'refused')


def test_a_stream_is_not_trusted_by_its_name():
    """The class that reads is never reachable by the plain pickle module."""
    with pytest.raises(Exception):  # noqa: B017
        pickle.load(io.BytesIO(b'cmmdet3d_ext.datasets.restricted_pickle\nnothing\n.'))
