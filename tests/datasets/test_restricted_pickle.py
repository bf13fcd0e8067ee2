"""Data come back as they were, from every protocol; arrays and sizes that data do not need are refused."""
import io
import pickle
import struct
import time
from collections import OrderedDict

import numpy as np
import pytest

from mmdet3d_ext.datasets import restricted_pickle
from mmdet3d_ext.datasets.restricted_pickle import UnsafePickleError

DATA = {
    'floats': np.arange(6, dtype=np.float64).reshape(2, 3), 'columns': np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    'names': np.array(['car', 'pedestrian']), 'bytes_': np.array([b'a', b'bcd']), 'bools': np.array([True, False]),
    'none': np.zeros((0, 7)), 'scalar_array': np.array(3, np.int16), 'big_endian': np.arange(3, dtype='>f8'),
    'complex_': np.array([1 + 2j]), 'objects': np.array(['a', None, {'x': 1}], dtype=object), 'half': np.array([1.5], np.float16),
    'numbers': [np.float32(2.5), np.int64(-3), np.bool_(True), np.float64('nan'), np.str_('x')],
    'sets': [{1, 2}, frozenset({3}), set()], 'raw': [b'', b'ab\xff', bytearray(b'xy')], 'tuple': (1, 2.5, None, True, 'ü'),
    'others': [1 + 2j, slice(1, None, 2), range(3), OrderedDict([('a', 1)])], 'large': 2 ** 200,
}


def same(a, b):
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.flags.f_contiguous == b.flags.f_contiguous and (
            a.tolist() == b.tolist() or a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.parametrize('protocol', range(6))
def test_data_come_back_from_every_protocol(tmp_path, protocol):
    (tmp_path / 'x').write_bytes(pickle.dumps(DATA, protocol))
    found, expected = restricted_pickle.load(tmp_path / 'x'), pickle.loads(pickle.dumps(DATA, protocol))
    assert found['big_endian'].tolist() == [0, 1, 2]
    for name in DATA:
        assert same(expected[name], found[name]), name  # NumPy reads the other byte order into this machine's
    found['floats'][0, 0] = 7  # writable


def test_what_numpy_2_writes(tmp_path):
    (tmp_path / 'x').write_bytes(pickle.dumps(DATA['floats'], 0).replace(b'numpy.core.multiarray', b'numpy._core.multiarray'))
    assert same(restricted_pickle.load(tmp_path / 'x'), DATA['floats'])


def refused(tmp_path, data, match):
    (tmp_path / 'x').write_bytes(data)
    start = time.process_time()
    with pytest.raises(UnsafePickleError, match=match) as caught:
        restricted_pickle.load(tmp_path / 'x')
    assert str(tmp_path / 'x') in str(caught.value) and time.process_time() - start < 2


class Call:
    """Pickles as a call: ``Call(function, args[, state])``."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def as_pickle(value, protocol=2):
    return pickle.dumps(value, protocol)


@pytest.mark.parametrize('call, match', [
    (lambda: Call(bytearray, (10 ** 12,)), 'bytearray of other than bytes'), (lambda: Call(bytes, (10 ** 12,)), 'bytes of other than'),
    (lambda: Call(set, (range(10 ** 6),)), 'set of other than a list'),
    (lambda: range(10 ** 12), 'a range of more than'), (lambda: Call(np.ndarray, ((10 ** 12,), 'f8')), 'calls numpy.ndarray'),
    (lambda: Call(np.ndarray, ((1,), 'O', b'AAAAAAAA')), 'calls numpy.ndarray'),
    (lambda: Call(np.dtype, ('V8', False, True)), "type 'V8'"), (lambda: Call(np.dtype, ([('a', 'O')],)), 'type'),
    (lambda: Call(np.dtype, ('f8,' * 10 ** 5,)), 'type'), (lambda: np.array(['2020-01-01'], 'M8[D]'), "type 'M8'"),
    (lambda: np.zeros(2, [('a', 'f4')]), "type 'V4'"),
    (lambda: Call(print, ('x',)), 'it asks for __builtin__.print'), (lambda: eval, 'it asks for __builtin__.eval'),
])
def test_calls_that_data_do_not_need(tmp_path, call, match):
    refused(tmp_path, as_pickle(call()), match)


def with_state(array, change):
    """The pickle of ``array`` in protocol 2 after ``change`` of its bytes."""
    data = as_pickle(array)
    changed = change(data)
    assert changed != data
    return changed


def test_an_array_of_objects_made_of_bytes(tmp_path):
    """Type O with the flags of a plain type: NumPy would take the file's bytes for the addresses of objects."""
    objects = as_pickle(np.dtype('O'))
    assert objects.count(b'K\x3ft') == 1
    refused(tmp_path, objects.replace(b'K\x3ft', b'K\x00t'), 'described as another')
    # numbers told to be objects
    refused(tmp_path, as_pickle(np.dtype('f8')).replace(b'K\x00t', b'K\x3ft'), 'described as another')
    # the whole array, as it would be written
    forged = with_state(np.array([1.0]), lambda d: d.replace(b'X\x02\x00\x00\x00f8', b'X\x02\x00\x00\x00O8'))
    refused(tmp_path, forged, 'described as another')
    # text whose items are declared larger than they are
    refused(tmp_path, as_pickle(np.dtype('U1')).replace(b'K\x04K\x04K\x08t', b'K\x40K\x04K\x08t'), 'described as another')


def test_arrays_whose_bytes_do_not_fit(tmp_path):
    refused(tmp_path, with_state(np.arange(3.0), lambda d: d.replace(b'K\x03\x85', b'K\x04\x85')), 'do not fit its shape')
    for protocol, shape in ((4, b'K\x03\x85'), (5, b'K\x03\x85')):
        data = pickle.dumps(np.arange(3.0), protocol)
        refused(tmp_path, data.replace(shape, b'K\x04\x85'), 'do not fit its shape')


def test_ten_bytes_that_ask_for_gigabytes(tmp_path):
    """A memo index takes sixteen bytes of memory each up to it."""
    refused(tmp_path, b'\x80\x02N' + b'r' + struct.pack('<I', 2 ** 32 - 1) + b'.', 'more memory than data of 9 bytes need')


def test_what_may_be_called_cannot_be_changed(tmp_path):
    """BUILD sets attributes: of a function, its defaults."""
    stream = io.BytesIO()
    stream.write(b'\x80\x02c_codecs\nencode\n')  # the function itself ...
    stream.write(b'N}X\x0c\x00\x00\x00__defaults__)s\x86b.')  # ... gets the state (None, {'__defaults__': ()})
    refused(tmp_path, stream.getvalue(), 'changes what it should only call')
    assert same(restricted_pickle._encode_latin1('ä', 'latin1'), b'\xe4')


def test_arrays_are_not_written_to(tmp_path):
    data = as_pickle(np.arange(3.0))
    (tmp_path / 'x').write_bytes(data[:-1] + b'K\x00K\x05s.')
    with pytest.raises(ValueError):
        restricted_pickle.load(tmp_path / 'x')


def test_the_memory_limit_is_taken_back(tmp_path):
    import resource
    before = resource.getrlimit(resource.RLIMIT_AS)
    for content in (as_pickle(DATA['names']), b'\x80\x02N', b'cos\nsystem\n.'):
        (tmp_path / 'x').write_bytes(content)
        try:
            restricted_pickle.load(tmp_path / 'x')
        except ValueError:
            pass
        except UnsafePickleError:
            pass
        assert resource.getrlimit(resource.RLIMIT_AS) == before
