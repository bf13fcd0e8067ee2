"""Python, torch, CUDA and driver; the file that each package is imported from; bytecode that hides an edit."""
from __future__ import annotations

import marshal
import os
import re
import struct
import sys
from importlib import util
from pathlib import Path
from types import CodeType
from typing import Any, Dict, Iterator, List, Optional

from .options import Options
from .probe import REPO, ask, call
from .report import OK, PROBLEM, SKIPPED, WARNING, Finding

# Import name -> names of the distributions that hold it; the first is the one to install.
PACKAGES = {
    'torch': ('torch',), 'torchvision': ('torchvision',), 'numpy': ('numpy',), 'mmcv': ('mmcv-full', 'mmcv'),
    'mmdet': ('mmdet',), 'mmseg': ('mmsegmentation',), 'mmdet3d': ('mmdet3d',), 'mmdet3d_ext': ('mmdet3d-ext',),
    'spconv': ('spconv', 'spconv-cu117', 'spconv-cu118', 'spconv-cu120', 'spconv-cu121', 'spconv-cu124', 'spconv-cu126'),
    'torchpack': ('torchpack',), 'nuscenes': ('nuscenes-devkit',), 'cv2': ('opencv-python-headless', 'opencv-python'),
}
INSTALL = 'make install (REDO=all builds everything anew)'

_TORCH = '''
import torch
say(version=torch.__version__, cuda=torch.version.cuda, file=torch.__file__)
say(cudnn=torch.backends.cudnn.version() if torch.version.cuda else None)
say(archs=torch.cuda.get_arch_list() if torch.version.cuda else [])
try:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(gpus=[[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in range(count)])
except Exception as error:
    say(gpus=[], gpu_error=f"{type(error).__name__}: {error}")
'''

_WHERE = f'''
from importlib import metadata, util
names = {PACKAGES!r}
installed = {{}}
for distribution in metadata.distributions():
    label = (distribution.metadata["Name"] or "").lower().replace("_", "-")
    place = [distribution.version, os.path.realpath(str(getattr(distribution, "_path", "")))]
    if place not in installed.setdefault(label, []):
        installed[label].append(place)
for name, distributions in names.items():
    spec = error = None
    try:
        spec = util.find_spec(name)
    except Exception as failure:
        error = f"{{type(failure).__name__}}: {{failure}}"
    origin = spec and (spec.origin or next(iter(spec.submodule_search_locations or []), None))
    copies = []
    for entry in sys.path:
        folder = os.path.join(entry or ".", name)
        if os.path.isfile(os.path.join(folder, "__init__.py")) or os.path.isfile(folder + ".py"):
            real = os.path.realpath(folder)
            if real not in copies:
                copies.append(real)
    found = {{label: installed[label] for label in distributions if label in installed}}
    say(**{{name: {{"file": origin, "distributions": found, "copies": copies, "error": error}}}})
say(_python={{"executable": sys.executable, "prefix": sys.prefix, "path": sys.path}})
'''

# In an order that works: mmdet3d and mmsegmentation refuse mmcv 1.7.2 unless this package's shims come first.
IMPORTED = ('numpy', 'cv2', 'mmcv', 'mmcv.ops', 'mmdet', 'mmdet3d_ext', 'mmseg', 'mmdet3d.apis', 'spconv.pytorch', 'torchpack',
            'nuscenes.nuscenes')
_IMPORTS = f'''
import importlib, warnings
warnings.filterwarnings("ignore")
for name in {IMPORTED!r}:
    say(importing=name)
    try:
        importlib.import_module(name)
        say(**{{name: None}})
    except BaseException as error:
        say(**{{name: f"{{type(error).__name__}}: {{error}}"}})
say(importing=None)
'''


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    yield check_python()
    torch = ask_torch()
    yield check_torch(torch)
    yield from check_driver(torch)
    yield from check_packages()
    yield check_imports(options.timeout)
    yield check_bytecode(REPO / 'mmdet3d_ext')


def check_python() -> Finding:
    version = sys.version.split()[0]
    data = {'version': version, 'executable': sys.executable}
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding('python', WARNING, f'{version} at {sys.executable}; 3.10 to 3.12 are tested', INSTALL, data)
    return Finding('python', OK, f'{version} at {sys.executable}', data=data)


_torch_answer: Optional[Dict[str, Any]] = None


def ask_torch() -> Dict[str, Any]:
    """What torch says about itself (``version``, ``cuda``, ``archs``, ``gpus``, ``file``), or ``error``; asked once."""
    global _torch_answer
    if _torch_answer is None:
        answer = ask(_TORCH)
        _torch_answer = answer.merged()
        if 'version' not in _torch_answer:
            _torch_answer['error'] = answer.last_line()
    return _torch_answer


def check_torch(torch: Dict[str, Any]) -> Finding:
    if 'version' not in torch:
        error = torch['error']
        if 'cannot open shared object file' in error:
            advice = ('one of its own libraries is missing: torch was installed in parts, or LD_LIBRARY_PATH leads to another '
                      f'torch. Install it anew: {INSTALL}')
        else:
            advice = f'install it: {INSTALL}'
        return Finding('torch', PROBLEM, f'cannot be imported: {error}', advice, torch)
    text = f'{torch["version"]}, CUDA {torch["cuda"] or "none (CPU build)"}, cuDNN {torch.get("cudnn") or "none"}, {torch["file"]}'
    return Finding('torch', OK, text, data=torch)


def check_driver(torch: Dict[str, Any]) -> Iterator[Finding]:
    """The driver against torch's CUDA, and torch's architectures against the GPUs."""
    cards = gpus_by_driver()
    if cards is None:
        if torch.get('gpus'):
            yield Finding('driver', OK, f'torch sees {len(torch["gpus"])} GPU(s); nvidia-smi is not here, so its version is unknown')
        else:
            yield Finding('driver', SKIPPED, 'no NVIDIA driver on this machine (nvidia-smi is not here): training runs on the CPU')
        return
    names = ', '.join(f'{number}: {card["name"]} ({card["capability"]})' for number, card in enumerate(cards))
    data = {'gpus': cards}
    if 'version' not in torch:
        yield Finding('driver', SKIPPED, f'driver {cards[0]["driver"]}; {names}; torch cannot be asked', data=data)
    elif not torch['cuda']:
        yield Finding('driver', PROBLEM, f'{len(cards)} GPU(s) ({names}), but this torch {torch["version"]} is a CPU build',
                      f'install a CUDA build of torch, then build the libraries again: {INSTALL}', data)
    elif not torch.get('gpus'):
        visible = os.environ.get('CUDA_VISIBLE_DEVICES')
        why = torch.get('gpu_error') or (f'CUDA_VISIBLE_DEVICES={visible}' if visible is not None else
                                         f'its CUDA {torch["cuda"]} may be newer than driver {cards[0]["driver"]} knows')
        yield Finding('driver', PROBLEM, f'nvidia-smi lists {names}, torch sees no GPU: {why}',
                      'unset CUDA_VISIBLE_DEVICES, update the driver, or install a torch for an older CUDA', data)
    else:
        yield Finding('driver', OK, f'driver {cards[0]["driver"]}; {names}', data=data)
        lacking = [f'{name} (sm_{major}{minor})' for name, major, minor in torch['gpus']
                   if not _covered(torch['archs'], major * 10 + minor)]
        if lacking:
            yield Finding('torch kernels', PROBLEM, f'torch {torch["version"]} has no code for {", ".join(lacking)}; it has '
                          f'{" ".join(torch["archs"])}', 'install a torch build for this GPU (torch 2.8 and later dropped sm_70)', data)
        else:
            yield Finding('torch kernels', OK, f'{" ".join(torch["archs"])} cover the GPUs')


def _covered(archs: List[str], capability: int) -> bool:
    from .elf import runs_on
    found = {('ptx' if kind == 'compute' else 'sm', int(number)) for kind, number in
             (re.match(r'(sm|compute)_(\d+)', arch).groups() for arch in archs if re.match(r'(sm|compute)_\d+', arch))}
    return runs_on(found, capability)


def gpus_by_driver() -> Optional[List[Dict[str, str]]]:
    """GPUs as nvidia-smi lists them (name, capability, driver version); None without a driver."""
    code, output = call(['nvidia-smi', '--query-gpu=name,compute_cap,driver_version', '--format=csv,noheader'], 30)
    rows = [[part.strip() for part in line.split(',')] for line in output.splitlines()]
    cards = [dict(zip(('name', 'capability', 'driver'), row)) for row in rows if len(row) == 3]
    return cards if code == 0 and cards else None


# ----------------------------------------------------------------------------------------------------------- packages

def ask_where() -> Dict[str, Any]:
    """Per import name: ``file``, ``distributions`` {name: [[version, metadata folder], ...]}, ``copies`` on the path."""
    return ask(_WHERE).merged()


def check_packages() -> Iterator[Finding]:
    where = ask_where()
    for name in PACKAGES:
        yield _package(name, where.get(name) or {'error': 'the probe gave no answer'})


def _package(name: str, found: Dict[str, Any]) -> Finding:
    if found.get('error') or not found.get('file'):
        reason = found.get('error') or 'is not installed for this Python'
        return Finding(name, PROBLEM, f'{reason} ({sys.executable})', INSTALL, found)
    versions = sorted({f'{label} {version}' for label, entries in found['distributions'].items() for version, _ in entries})
    text = f'{", ".join(versions) or "no version recorded"}, {found["file"]}'
    folder = os.path.dirname(os.path.realpath(found['file']))
    hidden = [copy for copy in found['copies'] if copy != folder and copy != os.path.realpath(found['file'])[:-3]]
    if name == 'mmdet3d_ext' and Path(folder) != (REPO / name).resolve():
        return Finding(name, PROBLEM, f'{found["file"]} is what runs, not this checkout ({REPO / name}): an edit here changes '
                       'nothing. Two installs; clearing __pycache__ does not help',
                       f'take {os.path.dirname(folder)} off PYTHONPATH or uninstall it there, then install this checkout: pip '
                       'install --no-build-isolation --no-deps -e .', found)
    if hidden:
        status = PROBLEM if name == 'mmdet3d_ext' else WARNING
        return Finding(name, status, f'{text}. A second copy lies in {", ".join(hidden)}: an edit or an update there changes nothing',
                       'remove one of them; PYTHONPATH and the order of sys.path decide which is used', found)
    several = [label for label, entries in found['distributions'].items() if len(entries) > 1]
    if several:
        places = ', '.join(path for label in several for _, path in found['distributions'][label])
        return Finding(name, WARNING, f'{text}. Installed twice: {places}', f'pip uninstall {several[0]} until none is left, then '
                       f'{INSTALL}', found)
    if name == 'mmcv' and len(found['distributions']) > 1:
        return Finding(name, PROBLEM, f'{text}: mmcv and mmcv-full write the same folder; the one without ops may have won',
                       f'pip uninstall -y mmcv mmcv-full, then {INSTALL}', found)
    if name == 'spconv' and len(found['distributions']) > 1:
        return Finding(name, PROBLEM, f'{text}: several builds of spconv write the same folder',
                       f'pip uninstall -y {" ".join(found["distributions"])}, then install one', found)
    if name == 'cv2' and len({entry[0] for entries in found['distributions'].values() for entry in entries}) > 1:
        return Finding(name, WARNING, f'{text}: both write the same folder, with different versions',
                       'pip uninstall -y opencv-python opencv-python-headless, then install one', found)
    if not found['distributions'] and name != 'mmdet3d_ext':
        return Finding(name, WARNING, f'{text}: a folder on the path, not an installed package',
                       'check PYTHONPATH; install the package by pip', found)
    return Finding(name, OK, text, data=found)


def check_imports(timeout: float) -> Finding:
    """Whether everything that training imports can be imported, one after the other in one process."""
    answer = ask(_IMPORTS, timeout)
    said = answer.merged()
    failed = {name: said[name] for name in IMPORTED if said.get(name)}
    if said.get('importing'):
        failed[said['importing']] = f'the process {answer.how_it_ended()}: {answer.last_line()}'
    if not failed:
        return Finding('imports', OK, ', '.join(IMPORTED))
    name, error = next(iter(failed.items()))
    also = f' ({len(failed) - 1} more fail, perhaps because of it: {", ".join(list(failed)[1:])})' if len(failed) > 1 else ''
    return Finding('imports', PROBLEM, f'import {name}: {error.splitlines()[0]}{also}', remedy_of_import(error), {'failed': failed})


def remedy_of_import(error: str) -> str:
    """What to do about the message of a failed import."""
    if 'libGL.so' in error or 'libgthread' in error:
        return 'this machine has no OpenGL: pip uninstall -y opencv-python; pip install --force-reinstall opencv-python-headless'
    if 'MMCV==' in error or 'mmcv-full' in error and 'incompatible' in error:
        return 'import mmdet3d_ext before mmdet3d: it makes the bound of mmdet3d 1.0.0rc6 accept mmcv-full 1.7.2'
    if 'numpy' in error.lower() and ('_ARRAY_API' in error or 'numpy.core.multiarray failed' in error or 'dtype size changed' in error):
        return 'built for another NumPy: pip install "numpy<2", then ' + INSTALL
    if 'shared object file' in error or 'undefined symbol' in error:
        return 'see the lines of the group libraries: tools/doctor.py --only libraries'
    return INSTALL


# ----------------------------------------------------------------------------------------------------------- bytecode

def check_bytecode(package: Path) -> Finding:
    """Whether Python would run cached bytecode of ``package`` that is not what its source says.

    Python compares a cached file's recorded time stamp (seconds) and size with the source's. An edit is hidden only if both
    are kept (a copy that preserves times over a file of the same size), or if the cache was made with unchecked hashes.
    """
    stale, orphans = [], []
    for source in sorted(package.rglob('*.py')):
        reason = stale_reason(source)
        if reason:
            stale.append(f'{source}: {reason}')
    for file in package.rglob('*.pyc'):
        if file.parent.name != '__pycache__' and not file.with_suffix('.py').exists():
            orphans.append(str(file))
    data = {'stale': stale, 'orphans': orphans}
    if stale:
        return Finding('bytecode', PROBLEM, f'Python runs old code of {len(stale)} file(s). {stale[0]}',
                       f'find {package} -name __pycache__ -exec rm -r {{}} +   (or touch the sources)', data)
    if orphans:
        return Finding('bytecode', WARNING, f'{len(orphans)} compiled file(s) without a source would still be imported: {orphans[0]}',
                       f'rm {" ".join(orphans[:5])}', data)
    return Finding('bytecode', OK, 'cached bytecode is what the sources say (removing __pycache__ would change nothing)', data=data)


def stale_reason(source: Path) -> Optional[str]:
    """Why Python would use cached bytecode that differs from ``source``; None if it would not."""
    try:
        cached = Path(util.cache_from_source(str(source)))
        data, text, status = cached.read_bytes(), source.read_bytes(), source.stat()
    except (OSError, NotImplementedError):
        return None
    if len(data) < 16 or data[:4] != util.MAGIC_NUMBER:
        return None  # Python compiles it again
    flags, = struct.unpack_from('<I', data, 4)
    if flags & 1:
        if flags & 2 or data[8:16] == util.source_hash(text):
            return None
        return f'{cached} was made with unchecked hashes (py_compile, a package build), so edits are not noticed'
    stamp, size = struct.unpack_from('<II', data, 8)
    if stamp != int(status.st_mtime) & 0xFFFFFFFF or size != status.st_size & 0xFFFFFFFF:
        return None
    try:
        current = compile(text, str(source), 'exec', dont_inherit=True)
        old = marshal.loads(data[16:])
    except (SyntaxError, ValueError, EOFError, TypeError):
        return None
    if same_code(current, old):
        return None
    return f'{cached} has the time stamp and size of the source, but other code'


def same_code(one: Any, other: Any) -> bool:
    """Whether two constants or code objects do the same; file names and line numbers do not count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        names = ('co_code', 'co_names', 'co_varnames', 'co_freevars', 'co_cellvars', 'co_argcount', 'co_kwonlyargcount', 'co_flags')
        return all(getattr(one, name) == getattr(other, name) for name in names) and same_code(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_code, one, other))
    if isinstance(one, frozenset):
        return one == other
    return one == other or one != one
