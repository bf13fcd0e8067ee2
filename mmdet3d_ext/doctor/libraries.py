"""Every compiled library: does it load beside this torch, what was it built for, does its code fit the GPUs."""
from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from . import elf
from .options import Options
from .probe import Answer, ask, call
from .report import OK, PROBLEM, WARNING, Finding
from .stack import ask_torch

# torch's CUDA 11 wheels of 1.8 to 2.0 split libtorch_cuda.so in two (pytorch/pytorch#49050); no other build has these names.
SPLIT = {'libtorch_cuda_cu.so': 'libtorch_cuda.so', 'libtorch_cuda_cpp.so': 'libtorch_cuda.so',
         'libtorch_cpu_cpp.so': 'libtorch_cpu.so'}
SPLIT_TORCH = 'a CUDA 11 build of torch 1.8 to 2.0, the only ones that have it'
REBUILD = {
    'mmcv': 'make install REDO=mmcv-full   (by hand: MMCV_WITH_OPS=1 FORCE_CUDA=1 pip install --no-build-isolation --no-deps '
            '--no-cache-dir --force-reinstall --no-binary mmcv-full mmcv-full==1.7.2)',
    'mmdet3d_ext': 'make install REDO=project   (by hand: pip install --no-build-isolation --no-deps -e .)',
    'spconv': 'make install REDO=sparse-convolution   (by hand: pip install spconv-cu126, or spconv for the CPU)',
    'torchvision': 'make install REDO=torch   (by hand: install the torchvision that belongs to this torch)',
}

# Loads each library in turn; a crash leaves the name of the one that was being loaded.
_LOAD = '''
import importlib, importlib.machinery, importlib.util
libraries = json.loads(sys.argv[1])
try:
    import torch
    say(torch=None)
except BaseException as error:
    say(torch=f"{type(error).__name__}: {error}")
for name, kind, path in libraries:
    say(loading=name)
    result, extra = None, {}
    try:
        if kind == "operators":
            torch.ops.load_library(path)
        elif kind == "package":
            importlib.import_module(path)
        else:
            loader = importlib.machinery.ExtensionFileLoader(kind, path)
            module = importlib.util.module_from_spec(importlib.util.spec_from_loader(kind, loader))
            loader.exec_module(module)
            for question in ("get_compiling_cuda_version", "get_compiler_version"):
                if hasattr(module, question):
                    extra[question] = str(getattr(module, question)())
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    say(**{name: {"error": result, **extra}}, loading=None)
'''
_FIND = '''
from importlib import util
for name in ("mmcv", "spconv", "cumm", "torchvision", "torch", "mmdet3d_ext"):
    try:
        spec = util.find_spec(name)
        say(**{name: spec and spec.submodule_search_locations and list(spec.submodule_search_locations)[0]})
    except Exception as error:
        say(**{name: None})
'''


@dataclass
class Compiled:
    """A library to examine: of which package, how it is loaded (module name, 'operators' or 'package'), where it lies."""

    package: str
    kind: str
    path: Path

    @property
    def name(self) -> str:
        return f'{self.package} library'

    @property
    def target(self) -> str:
        return {'package': f'{self.path.parent.name}.{self.path.name.split(".")[0]}'}.get(self.kind, str(self.path))


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    folders = ask(_FIND).merged()
    libraries, findings = find_libraries(folders)
    yield from findings
    loaded = torch_folders(folders.get('torch'))
    answer = try_to_load(libraries, dict(os.environ), options.timeout)
    capabilities = [major * 10 + minor for _, major, minor in ask_torch().get('gpus') or []]
    for library in libraries:
        finding = examine(library, loaded, answer, capabilities, options.fix)
        if options.fix and finding.data.get('fixed'):
            again = try_to_load([library], with_folder(dict(os.environ), loaded[0]), options.timeout)
            finding = after_fix(library, finding, again, loaded[0])
        yield finding


def find_libraries(folders: Mapping[str, Optional[str]]) -> Tuple[List[Compiled], List[Finding]]:
    """The libraries that exist for this Python, and a finding for each that does not."""
    suffix = sysconfig.get_config_var('EXT_SUFFIX')
    wanted = [('mmdet3d_ext', 'operators', '_C'), ('mmcv', 'mmcv._ext', '_ext'), ('spconv', 'package', 'core_cc'),
              ('torchvision', 'operators', '_C')]
    found, missing = [], []
    for package, kind, stem in wanted:
        folder = folders.get(package)
        if folder is None:
            missing.append(Finding(f'{package} library', PROBLEM, f'{package} is not installed for {sys.executable}',
                                   REBUILD[package]))
            continue
        path = next((Path(folder, stem + ending) for ending in (suffix, '.abi3.so', '.so') if Path(folder, stem + ending).exists()),
                    None)
        if path is not None:
            found.append(Compiled(package, kind, path))
            continue
        others = sorted(p.name for p in Path(folder).glob(f'{stem}.*so'))
        text = (f'{folder} holds {", ".join(others)}, built for another Python than this one ({suffix})' if others else
                f'{folder} holds no {stem}{suffix}: installed without its compiled operators')
        missing.append(Finding(f'{package} library', PROBLEM, text, REBUILD[package]))
    return found, missing


def torch_folders(torch: Optional[str]) -> List[Path]:
    """Folders whose libraries are in memory once torch is imported: its own, and those of the nvidia packages beside it."""
    if torch is None:
        return []
    beside = Path(torch).parent
    return [Path(torch, 'lib'), *sorted(beside.glob('nvidia/*/lib')), *beside.glob('cusparselt/lib')]


def try_to_load(libraries: List[Compiled], env: Mapping[str, str], timeout: float) -> Answer:
    wanted = json.dumps([[library.name, library.kind, library.target] for library in libraries])
    return ask(_LOAD, timeout, env, [wanted])


def error_of(library: Compiled, answer: Answer) -> Optional[str]:
    """Why the library did not load in the probe; None if it did."""
    said = answer.merged()
    if library.name in said:
        return said[library.name]['error']
    if said.get('loading') == library.name:
        return f'the process {answer.how_it_ended()} while it was loaded: {answer.last_line()}'
    return f'not tried: {said.get("torch") or answer.last_line()}'


def examine(library: Compiled, loaded: List[Path], answer: Answer, capabilities: List[int], fix: bool = False) -> Finding:
    """What is wrong with a library, from its file and from the attempt to load it."""
    torch = ask_torch()
    have = f'torch {torch["version"]}' if 'version' in torch else 'a torch that cannot be imported'
    rebuild = f'build it for this torch: {REBUILD[library.package]}'
    try:
        file = elf.read(library.path)
    except (elf.NotElf, OSError) as error:
        return Finding(library.name, PROBLEM, f'{error}', rebuild)
    error = error_of(library, answer)
    record = recorded(library)
    missing = [name for name in file.needed if elf.find(name, file, loaded, os.environ) is None]
    data: Dict[str, Any] = {'path': str(library.path), 'needed': file.needed, 'missing': missing, 'recorded': record,
                            'architectures': elf.describe(file.gpu), 'error': error, 'torch': torch.get('version')}
    if missing:
        return _missing(library, missing, have, record, loaded, fix, data)
    if 'torch' in record and 'version' in torch and _minor(record['torch']) != _minor(torch['version']):
        return Finding(library.name, PROBLEM, f'{library.path} was built for torch {record["torch"]}, this is {have}', rebuild, data)
    if error is not None:
        return _load_error(library, error, have, record, rebuild, data)
    said = answer.merged().get(library.name, {})
    built = (record.get('cuda') or said.get('get_compiling_cuda_version', '')).replace('not available', '')
    data['cuda'] = built
    if built and torch.get('cuda') and built.split('.')[0] != torch['cuda'].split('.')[0]:
        return Finding(library.name, PROBLEM, f'{library.path} was built with CUDA {built}, {have} uses CUDA {torch["cuda"]}', rebuild,
                       data)
    text = f'loads beside {have}; {elf.describe(file.gpu) or "CPU code only"}; {library.path}'
    if capabilities and library.package in ('mmdet3d_ext', 'mmcv', 'spconv'):
        lacking = sorted({f'sm_{capability}' for capability in capabilities if not elf.runs_on(file.gpu, capability)})
        # spconv compiles kernels at run time for architectures that it does not ship.
        if lacking and not (library.package == 'spconv' and file.gpu):
            arch = ' '.join(f'{int(name[3:]) // 10}.{int(name[3:]) % 10}' for name in lacking)
            return Finding(library.name, PROBLEM, f'{text}. It has no code for the GPU(s) here: {", ".join(lacking)}. Kernels then '
                           'fail, or return zeros without an error',
                           f'TORCH_CUDA_ARCH_LIST="{arch}" FORCE_CUDA=1 {REBUILD[library.package]}', data)
    return Finding(library.name, OK, text, data=data)


def recorded(library: Compiled) -> Dict[str, str]:
    """What the library, or the address that its wheel came from, says about the torch and CUDA that it was built for."""
    if library.package == 'mmdet3d_ext':
        found = re.search(rb'mmdet3d_ext-build\{([^}\0]*)\}', library.path.read_bytes())
        return dict(item.split('=', 1) for item in found.group(1).decode().split(';') if '=' in item) if found else {}
    for place in library.path.parent.parent.glob(f'{library.package}*.dist-info/direct_url.json'):
        found = re.search(r'/cu(\d+)/torch(\d+\.\d+(?:\.\d+)?)/', place.read_text(errors='replace'))
        if found:
            return {'torch': found[2], 'cuda': f'{found[1][:-1]}.{found[1][-1]}'}
    return {}


def _minor(version: str) -> str:
    return '.'.join(version.split('+')[0].split('.')[:2])


def _missing(library: Compiled, missing: List[str], have: str, record: Mapping[str, str], loaded: List[Path], fix: bool,
             data: Dict[str, Any]) -> Finding:
    rebuild = f'build it for this torch: {REBUILD[library.package]}'
    split = [name for name in missing if name in SPLIT]
    names = ', '.join(missing)
    if split and len(split) == len(missing):
        expected = f'torch {record["torch"]}' if 'torch' in record else SPLIT_TORCH
        targets = {name: loaded[0] / SPLIT[name] for name in split} if loaded else {}
        text = (f'{library.path} needs {names}, which is not there. It was built for {expected}; here is {have}, which has '
                f'{"/".join(sorted({SPLIT[name] for name in split}))} instead')
        possible = bool(targets) and all(target.exists() for target in targets.values())
        if possible and fix:
            try:
                for name, target in targets.items():
                    (loaded[0] / name).symlink_to(target.name)
                    data.setdefault('fixed', []).append(str(loaded[0] / name))
                return Finding(library.name, WARNING, text, rebuild, data)
            except OSError as error:
                for path in data.pop('fixed', []):
                    Path(path).unlink()
                return Finding(library.name, PROBLEM, f'{text}. Links cannot be made: {error}', rebuild, data)
        if possible:
            rebuild += ('. Only as a stopgap, because the two torch versions may differ in more than a name: tools/doctor.py --only '
                        'libraries --fix makes symbolic links and tries whether it then loads')
        return Finding(library.name, PROBLEM, text, rebuild, data)
    hidden = {name: _elsewhere(name) for name in missing}
    there = {name: place for name, place in hidden.items() if place}
    if there and len(there) == len(missing):
        folders = ':'.join(sorted({str(place.parent) for place in there.values()}))
        return Finding(library.name, PROBLEM, f'{library.path} needs {names}; found in {folders}, where the loader does not look '
                       f'(LD_LIBRARY_PATH={os.environ.get("LD_LIBRARY_PATH") or "not set"})',
                       f'export LD_LIBRARY_PATH={folders}:$LD_LIBRARY_PATH, for the ranks too (mpirun -x LD_LIBRARY_PATH)', data)
    if any(name.startswith('libcudart') for name in missing):
        rebuild = f'its CUDA runtime is of another version than the installed ones: {rebuild}'
    return Finding(library.name, PROBLEM, f'{library.path} needs {names}, which is not on this machine; here is {have}', rebuild, data)


def _elsewhere(name: str) -> Optional[Path]:
    """A library outside the loader's search path, in the usual places."""
    folders = [Path(sys.prefix, 'lib'), *(Path(root, 'lib64') for root in (os.environ.get('CUDA_HOME', ''), '/usr/local/cuda') if root)]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _load_error(library: Compiled, error: str, have: str, record: Mapping[str, str], rebuild: str, data: Dict[str, Any]) -> Finding:
    symbol = re.search(r'undefined symbol: (\S+)', error)
    if symbol:
        symbols = undefined_symbols(library.path) or [symbol[1]]
        data['undefined'] = symbols[:50]
        shown = demangled(symbol[1])
        others = f' and {len(symbols) - 1} more' if len(symbols) > 1 else ''
        built = f'It was built for torch {record["torch"]}' if 'torch' in record else 'It was built for another torch'
        return Finding(library.name, PROBLEM, f'{library.path}: {shown}{others} is not in {have}. {built} (or another C++ ABI)', rebuild,
                       data)
    glibc = re.search(r"version [`'](GLIBC\w*_[\d.]+)' not found", error)
    if glibc:
        return Finding(library.name, PROBLEM, f'{library.path} was built on a newer system: {glibc[1]} is not here',
                       f'{rebuild}, on this machine', data)
    if 'libGL.so' in error:
        return Finding(library.name, PROBLEM, error, 'pip uninstall -y opencv-python; pip install --force-reinstall '
                       'opencv-python-headless==4.11.0.86', data)
    if error.startswith('not tried'):
        return Finding(library.name, PROBLEM, f'{library.path}: {error}', 'put torch right first (see its line)', data)
    return Finding(library.name, PROBLEM, f'{library.path} does not load beside {have}: {error}', rebuild, data)


def undefined_symbols(path: Path) -> List[str]:
    """Symbols that no library gives, by ``ldd -r`` beside torch's libraries; Python's own are not counted."""
    if shutil.which('ldd') is None:
        return []
    folders = torch_folders(ask(_FIND).merged().get('torch'))
    env = dict(os.environ, LD_LIBRARY_PATH=':'.join([*map(str, folders), os.environ.get('LD_LIBRARY_PATH', '')]))
    _, output = call(['ldd', '-r', str(path)], 60, env)
    found = re.findall(r'undefined symbol: (\S+)', output)
    return [name for name in dict.fromkeys(found) if not re.match(r'_?Py', name)]


def demangled(symbol: str) -> str:
    code, output = call(['c++filt', symbol], 10)
    return output.strip() if code == 0 and output.strip() else symbol


# ---------------------------------------------------------------------------------------------------------------- fix

def with_folder(env: Dict[str, str], folder: Path) -> Dict[str, str]:
    return dict(env, LD_LIBRARY_PATH=':'.join(filter(None, [str(folder), env.get('LD_LIBRARY_PATH')])))


def after_fix(library: Compiled, finding: Finding, answer: Answer, folder: Path) -> Finding:
    """Keep the links if the library now loads, remove them if not."""
    error = error_of(library, answer)
    if error is None:
        finding.text += f'. Linked {", ".join(Path(p).name for p in finding.data["fixed"])} in {folder}; it loads now'
        finding.remedy = (f'a stopgap only: build it for this torch ({REBUILD[library.package]}). Until then every rank needs '
                          f'LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH')
        return finding
    for path in finding.data['fixed']:
        Path(path).unlink()
    text = f'{finding.text}. Links do not help ({error}), they were removed again'
    return Finding(library.name, PROBLEM, text, finding.remedy, finding.data)


def load_as(env: Mapping[str, str], timeout: float) -> Dict[str, Optional[str]]:
    """Which libraries load under another environment: name -> error or None."""
    libraries, _ = find_libraries(ask(_FIND, env=env).merged())
    answer = try_to_load(libraries, env, timeout)
    return {library.name: error_of(library, answer) for library in libraries}

