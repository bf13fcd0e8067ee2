"""What libraries say, read from libraries that were compiled for the test and from torch's own."""
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from mmdet3d_ext.doctor import elf


@pytest.fixture
def compiled(tmp_path):
    if shutil.which('gcc') is None:
        pytest.skip('needs gcc')

    def make(name, *flags, source='int f(void) { return 1; }'):
        (tmp_path / 'x.c').write_text(source)
        subprocess.run(['gcc', '-shared', '-fPIC', '-o', str(tmp_path / name), str(tmp_path / 'x.c'), *flags], check=True)
        return tmp_path / name

    return make


def test_needed_and_search_paths(compiled, tmp_path):
    compiled('libinner.so', '-Wl,-soname,libinner.so.3')
    outer = compiled('libouter.so', f'-L{tmp_path}', '-Wl,--no-as-needed', '-linner', '-Wl,--enable-new-dtags,-rpath,$ORIGIN/deps:/opt/x')
    found = elf.read(outer)
    assert 'libinner.so.3' in found.needed and found.runpath == ['$ORIGIN/deps', '/opt/x'] and not found.rpath and found.soname == ''
    assert elf.read(tmp_path / 'libinner.so').soname == 'libinner.so.3'
    old = elf.read(compiled('libold.so', '-Wl,--disable-new-dtags,-rpath,/opt/y'))
    assert old.rpath == ['/opt/y'] and not old.runpath


def test_where_the_loader_looks(compiled, tmp_path):
    inner = compiled('libinner.so', '-Wl,-soname,libinner.so.3')
    library = elf.read(compiled('libouter.so', f'-L{tmp_path}', '-Wl,--no-as-needed', '-linner', '-Wl,--enable-new-dtags,-rpath,$ORIGIN/deps'))
    find = lambda loaded=(), **env: elf.find('libinner.so.3', library, loaded, env)  # noqa: E731
    assert find() is None
    for folder, how in (('deps', {}), ('path', {'LD_LIBRARY_PATH': f'/none:{tmp_path / "path"}'}), ('torch', {'loaded': [tmp_path / 'torch']})):
        (tmp_path / folder).mkdir()
        shutil.copy(inner, tmp_path / folder / 'libinner.so.3')
        assert find(**how) == tmp_path / folder / 'libinner.so.3'
        shutil.rmtree(tmp_path / folder)
    assert elf.find('libc.so.6', library, (), {}) is not None  # by the loader's cache


def fatbin(*entries):
    """A ``.nv_fatbin`` section: one container per tuple of (kind, architecture)."""
    found = b''
    for kinds in entries:
        body = b''.join(struct.pack('<HHIQIIHHI', kind, 0x101, 64, 40, 0, 0, 7, 1, arch) + bytes(32) + bytes(40) for kind, arch in kinds)
        found += struct.pack('<IHHQ', elf.FATBIN, 1, 16, len(body)) + body
    return found


def test_gpu_architectures(compiled, tmp_path):
    (tmp_path / 'code').write_bytes(fatbin([(2, 70), (2, 80)], [(2, 90), (1, 90)]))
    library = compiled('libgpu.so')
    subprocess.run(['objcopy', '--add-section', f'.nv_fatbin={tmp_path / "code"}', str(library)], check=True)
    found = elf.read(library).gpu
    assert found == {('sm', 70), ('sm', 80), ('sm', 90), ('ptx', 90)} and elf.describe(found) == 'sm_70 sm_80 compute_90 sm_90'
    assert not elf.read(compiled('libcpu.so')).gpu


@pytest.mark.skipif(not torch.version.cuda, reason='needs a CUDA build of torch')
def test_gpu_architectures_of_torch_itself():
    path = Path(torch.__file__).parent / 'lib' / 'libtorch_cuda.so'
    flags = torch._C._cuda_getArchFlags() or ''  # torch.cuda.get_arch_list() answers only where there is a GPU
    stated = {int(arch.split('_')[1]) for arch in flags.split() if arch.startswith('sm_')}
    assert stated
    assert stated <= {arch for kind, arch in elf.read(path).gpu if kind == 'sm'}


@pytest.mark.parametrize('gpu, capability, runs', [
    ({('sm', 70)}, 70, True), ({('sm', 70)}, 75, True), ({('sm', 75)}, 70, False), ({('sm', 70)}, 80, False),
    ({('sm', 80)}, 89, True), ({('ptx', 70)}, 90, True), ({('ptx', 90)}, 80, False), (set(), 80, False), ({('sm', 90)}, 100, False)])
def test_what_runs_where(gpu, capability, runs):
    assert elf.runs_on(gpu, capability) is runs


@pytest.mark.parametrize('content, reason', [(b'', 'is no ELF'),
                                             (b'PK\x03\x04' + bytes(100), 'is no ELF'), (b'\x7fELF\x01\x01' + bytes(100), '64-bit')])
def test_files_that_are_no_libraries(tmp_path, content, reason):
    (tmp_path / 'x.so').write_bytes(content)
    with pytest.raises(elf.NotElf, match=reason):
        elf.read(tmp_path / 'x.so')


def test_a_library_cut_anywhere_is_an_error_or_readable(compiled):
    """Never anything but NotElf."""
    path = compiled('libx.so')
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        try:
            elf.read(path)
        except elf.NotElf as error:
            assert str(path) in str(error)
