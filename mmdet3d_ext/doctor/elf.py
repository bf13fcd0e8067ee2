"""What a compiled library says about itself: needed libraries, search paths, GPU architectures. Nothing of it is loaded.

Sources: System V ABI (ELF-64), ld.so(8) for the search order; the GPU code's container (``.nv_fatbin``) is described by
GrigoryEvko/nvopen-tools, fatbin/FORMAT_SPECIFICATION.md, and agrees with ``torch.cuda.get_arch_list()`` on torch's libraries.
"""
from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Dict, Iterable, List, Mapping, Optional, Set, Tuple

NEEDED, STRTAB, SONAME, RPATH, RUNPATH = 1, 5, 14, 15, 29
FATBIN = 0xBA55ED50
PTX, CUBIN = 1, 2


class NotElf(ValueError):
    """A file that is no 64-bit little-endian ELF library: cut off, empty, or of another machine."""


@dataclass
class Library:
    """``needed``: names of the libraries that it links; ``gpu``: (kind 'sm' or 'ptx', architecture such as 80)."""

    path: Path
    needed: List[str] = field(default_factory=list)
    soname: str = ''
    rpath: List[str] = field(default_factory=list)
    runpath: List[str] = field(default_factory=list)
    gpu: Set[Tuple[str, int]] = field(default_factory=set)


def read(path: Path) -> Library:
    """Read the dynamic section and the GPU code's headers of ``path``.

    Raises:
        NotElf: naming the file and the reason.
        OSError: if it cannot be read.
    """
    with open(path, 'rb') as file:
        try:
            return _read(file, Path(path))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise NotElf(f'{path} ({os.path.getsize(path)} bytes) is cut off or damaged: {error}') from None


def _read(file: BinaryIO, path: Path) -> Library:
    head = file.read(64)
    if head[:4] != b'\x7fELF':
        raise NotElf(f'{path} ({os.path.getsize(path)} bytes) is no ELF library')
    if head[4:6] != b'\x02\x01':
        raise NotElf(f'{path} is no 64-bit little-endian library')
    phoff, shoff = struct.unpack_from('<QQ', head, 32)
    phentsize, phnum, shentsize, shnum, shstrndx = struct.unpack_from('<HHHHH', head, 54)
    segments = [struct.unpack('<IIQQQQQQ', _at(file, phoff + i * phentsize, 56)) for i in range(phnum)]
    library = Library(path)
    for kind, _, offset, _, _, size, _, _ in segments:
        if kind == 2:  # PT_DYNAMIC
            _dynamic(file, segments, _at(file, offset, size), library)
    sections = [struct.unpack('<IIQQQQIIQQ', _at(file, shoff + i * shentsize, 64)) for i in range(shnum)] if shoff else []
    if sections:
        names = _at(file, sections[shstrndx][4], sections[shstrndx][5])
        for section in sections:
            if _text(names, section[0]) == '.nv_fatbin' and section[1] != 8:  # SHT_NOBITS holds nothing
                library.gpu |= set(_architectures(file, section[4], section[5]))
    return library


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise struct.error(f'{size} bytes at {offset} are missing')
    return data


def _text(table: bytes, start: int) -> str:
    return table[start:table.index(b'\0', start)].decode()


def _dynamic(file: BinaryIO, segments: List[tuple], data: bytes, library: Library) -> None:
    entries = [struct.unpack_from('<QQ', data, i) for i in range(0, len(data) - 15, 16)]
    address = next((value for tag, value in entries if tag == STRTAB), None)
    if address is None:
        return
    for kind, _, offset, virtual, _, size, _, _ in segments:
        if kind == 1 and virtual <= address < virtual + size:  # PT_LOAD
            table = _at(file, offset + address - virtual, min(size - (address - virtual), 1 << 26))
            break
    else:
        return
    for tag, value in entries:
        if tag == NEEDED:
            library.needed.append(_text(table, value))
        elif tag == SONAME:
            library.soname = _text(table, value)
        elif tag in (RPATH, RUNPATH):
            folders = [part for part in _text(table, value).split(':') if part]
            setattr(library, 'rpath' if tag == RPATH else 'runpath', folders)


def _architectures(file: BinaryIO, offset: int, size: int) -> Iterable[Tuple[str, int]]:
    """The (kind, architecture) of every entry of every container in the section."""
    position, end = offset, offset + size
    while position + 16 <= end:
        magic, _, header, length = struct.unpack('<IHHQ', _at(file, position, 16))
        if magic != FATBIN:
            position += 8  # containers are aligned
            continue
        entry, stop = position + header, min(position + header + length, end)
        while entry + 32 <= stop:
            kind, _, head, body = struct.unpack('<HHIQ', _at(file, entry, 16))
            architecture = struct.unpack('<I', _at(file, entry + 28, 4))[0]
            if kind in (PTX, CUBIN) and 10 <= architecture < 1000:
                yield ('ptx' if kind == PTX else 'sm'), architecture
            if head + body <= 0:
                return
            entry += head + body
        position = stop + (-(stop - offset)) % 8


def runs_on(gpu: Set[Tuple[str, int]], capability: int) -> bool:
    """Whether code with these architectures runs on a GPU of ``capability`` (80 for 8.0): machine code of the same major
    version and not above it, or PTX not above it, which the driver compiles."""
    return any(arch <= capability and (kind == 'ptx' or arch // 10 == capability // 10) for kind, arch in gpu)


def describe(gpu: Set[Tuple[str, int]]) -> str:
    return ' '.join(f'{"sm" if kind == "sm" else "compute"}_{arch}' for kind, arch in sorted(gpu, key=lambda x: (x[1], x[0])))


# ------------------------------------------------------------------------------------------------------------- search

@lru_cache(maxsize=1)
def system_libraries() -> Dict[str, str]:
    """name -> path from the loader's cache."""
    tool = shutil.which('ldconfig') or shutil.which('ldconfig', path='/sbin:/usr/sbin')
    if not tool:
        return {}
    try:
        text = subprocess.run([tool, '-p'], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: path for name, path in re.findall(r'^\s*(\S+) \(.*x86-64.*\) => (\S+)', text, re.M)} or {
        name: path for name, path in re.findall(r'^\s*(\S+) \(.*\) => (\S+)', text, re.M)}


def find(name: str, library: Library, loaded: Iterable[Path], env: Mapping[str, str]) -> Optional[Path]:
    """Where the loader would find ``name`` for ``library``; None if nowhere.

    Args:
        loaded: folders whose libraries are in memory already when it is loaded (``import torch`` loads its own).
        env: the environment, for LD_LIBRARY_PATH.
    """
    origin = str(library.path.resolve().parent)

    def expand(folders: Iterable[str]) -> List[Path]:
        return [Path(part.replace('$ORIGIN', origin).replace('${ORIGIN}', origin)) for part in folders]

    search = [*loaded, *expand([] if library.runpath else library.rpath),
              *map(Path, filter(None, env.get('LD_LIBRARY_PATH', '').split(':'))), *expand(library.runpath)]
    for folder in search:
        if (folder / name).exists():
            return folder / name
    if name in system_libraries():
        return Path(system_libraries()[name])
    for folder in ('/lib64', '/usr/lib64', '/lib', '/usr/lib', '/lib/x86_64-linux-gnu', '/usr/lib/x86_64-linux-gnu'):
        if Path(folder, name).exists():
            return Path(folder, name)
    return None
