"""Builds ``csrc/`` into ``mmdet3d_ext/_C*.so``; everything else about the package is in pyproject.toml.

    pip install --no-build-isolation --no-deps -e .

Environment:
    FORCE_CUDA=1               build the CUDA kernels, and fail if that is impossible (also without a GPU on this machine)
    MMDET3D_EXT_FORCE_CPU=1    build the CPU kernels only
    TORCH_CUDA_ARCH_LIST       GPU architectures, e.g. "8.0;9.0"; default: those from 7.0 to 9.0 that this nvcc knows
    MAX_JOBS                   parallel compilations
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        f'mmdet3d_ext is compiled against the installed torch, which could not be imported ({error}). Install '
        'torch first, then run: pip install --no-build-isolation --no-deps -e .'
    ) from error

ROOT = Path(__file__).resolve().parent
# Volta to Hopper; 9.0 also carries PTX, so newer GPUs can compile it at start.
ARCHS = ('7.0', '7.5', '8.0', '8.6', '8.9', '9.0+PTX')


def say(text: str) -> None:
    print(f'[mmdet3d_ext] {text}', file=sys.stderr, flush=True)


def flag(name: str) -> bool:
    return os.environ.get(name, '0').lower() not in ('', '0', 'off', 'no', 'false')


def nvcc() -> str:
    return str(Path(cpp_extension.CUDA_HOME or '', 'bin', 'nvcc'))


def no_cuda_reason() -> str:
    """Why the CUDA kernels cannot be built here; empty if they can."""
    if torch.version.cuda is None:
        return 'this torch has no CUDA'
    if cpp_extension.CUDA_HOME is None:
        return 'no CUDA toolkit was found (nvcc on PATH, or CUDA_HOME)'
    try:
        version = re.search(r'release (\d+)\.', subprocess.check_output([nvcc(), '--version'], text=True))
    except (OSError, subprocess.CalledProcessError) as error:
        return f'{nvcc()} does not run ({error})'
    if version and version.group(1) != torch.version.cuda.split('.')[0]:
        return (
            f'{nvcc()} is CUDA {version.group(1)}, this torch was built with CUDA {torch.version.cuda} (the major versions '
            'must agree; point CUDA_HOME at a matching toolkit)'
        )
    return ''


def arch_list() -> str:
    """``TORCH_CUDA_ARCH_LIST``, or those of ARCHS that this nvcc can compile for."""
    if os.environ.get('TORCH_CUDA_ARCH_LIST'):
        return os.environ['TORCH_CUDA_ARCH_LIST']
    known = set(re.findall(r'compute_(\d+)', subprocess.check_output([nvcc(), '--list-gpu-arch'], text=True)))
    return ';'.join(arch for arch in ARCHS if arch.split('+')[0].replace('.', '') in known)


def build_with_cuda() -> bool:
    if flag('MMDET3D_EXT_FORCE_CPU'):
        say('MMDET3D_EXT_FORCE_CPU is set: building the CPU kernels only')
        return False
    reason = no_cuda_reason()
    if not reason:
        return True
    if flag('FORCE_CUDA'):
        raise SystemExit(f'[mmdet3d_ext] FORCE_CUDA is set, but {reason}')
    say(f'building the CPU kernels only: {reason}. Set FORCE_CUDA=1 to make this an error.')
    return False


def shared_cxx_runtime() -> list:
    """The shared libstdc++ by its path, for the link line: the compiler's own, else the one that torch has loaded; empty without any.

    Where a toolchain links libstdc++ statically (``-static-libstdc++`` in LDFLAGS, or no ``libstdc++.so`` beside ``libstdc++.a``), the
    library would hold a second C++ runtime inside the one of torch. Their locales do not know each other's facets, and the first error
    message with a number in it ends in a segmentation fault. Named before ``-lstdc++``, the shared one resolves all of it.
    """
    paths = []
    command = [*shlex.split(os.environ.get('CXX', 'c++')), '-print-file-name=libstdc++.so.6']
    try:
        paths.append(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip())
    except (OSError, subprocess.CalledProcessError):
        pass
    maps = Path('/proc/self/maps')
    if maps.exists():
        paths += re.findall(r'(/\S*/libstdc\+\+\.so\.6\S*)$', maps.read_text(), re.MULTILINE)
    return [path for path in paths if os.path.isfile(path)][:1]


def extension():
    cuda = build_with_cuda()
    archs = arch_list() if cuda else ''
    if cuda:
        os.environ['TORCH_CUDA_ARCH_LIST'] = archs
        say(f'building the CPU and CUDA kernels for {archs}')
    # What the library was built for: read by mmdet3d_ext/ops/_library.py before it is loaded.
    generated = ROOT / 'build' / 'generated'
    generated.mkdir(parents=True, exist_ok=True)
    info = f'torch={torch.__version__};cuda={torch.version.cuda if cuda else ""};archs={archs.replace(";", " ")}'
    header = generated / 'mmdet3d_ext_build.h'
    text = f'#pragma once\n#define MMDET3D_EXT_BUILD "{info}"\n'
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    patterns = ['csrc/*.cpp', 'csrc/*/*.cpp'] + (['csrc/*/*.cu'] if cuda else [])
    sources = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))
    # at::parallel_for is a plain loop in a translation unit compiled without OpenMP.
    flags = {'cxx': ['-O3', '-std=c++17', '-fopenmp', '-fvisibility=hidden'] + (['-DMMDET3D_EXT_CUDA'] if cuda else [])}
    if cuda:
        flags['nvcc'] = ['-O3', '-std=c++17', '-DMMDET3D_EXT_CUDA', '-lineinfo', '--expt-relaxed-constexpr',
                         '-DCUB_WRAPPED_NAMESPACE=mmdet3d_ext_cub']
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    headers = sorted(str(path.relative_to(ROOT)) for end in ('h', 'cuh') for path in ROOT.glob(f'csrc/**/*.{end}')) + [str(header)]
    return make(
        'mmdet3d_ext._C',
        sources,
        include_dirs=[str(ROOT / 'csrc'), str(generated)],
        extra_compile_args=flags,
        extra_link_args=['-fopenmp', *shared_cxx_runtime()],
        depends=headers,
    )


setup(ext_modules=[extension()], cmdclass={'build_ext': cpp_extension.BuildExtension})
