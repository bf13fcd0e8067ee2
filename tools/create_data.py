"""Prepare a data set: info files and the ground-truth database.

Examples:
  python tools/create_data.py nuscenes --root-path data/nuscenes --out-dir data/nuscenes --extra-tag nuscenes
  python tools/create_data.py nuscenes --root-path data/nuscenes --out-dir data/nuscenes --extra-tag nuscenes \\
      --version v1.0-mini --workers 8
  python tools/create_data.py nuscenes --root-path data/nuscenes --out-dir data/nuscenes --extra-tag nuscenes \\
      --version v1.0-test
  python tools/create_data.py fill-location --root-path data/nuscenes --info-file data/nuscenes/nuscenes_infos_val.pkl
  python tools/create_data.py check --root-path data/nuscenes --info-file data/nuscenes/nuscenes_infos_val.pkl

`nuscenes` writes, in the folder of --out-dir:
  <extra-tag>_infos_train.pkl, <extra-tag>_infos_val.pkl      (<extra-tag>_infos_test.pkl for v1.0-test)
  <extra-tag>_gt_database/*.bin, <extra-tag>_dbinfos_train.pkl
A killed run goes on where it stopped when the same command is given again.

Exit codes: 0 done; 1 an error, or "check" found something missing; 2 something to correct in the command or the data.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='{nuscenes,fill-location,check}')

    nuscenes = commands.add_parser('nuscenes', help='info files and ground-truth database of nuScenes')
    nuscenes.add_argument('--root-path', default='./data/nuscenes', help='folder with samples/, sweeps/, maps/ and v1.0-*/')
    nuscenes.add_argument('--out-dir', default=None, help='where the files go (default: the root path)')
    nuscenes.add_argument('--extra-tag', default='nuscenes', help='first part of the file names')
    nuscenes.add_argument('--version', default='v1.0-trainval', help='v1.0-trainval, v1.0-mini or v1.0-test')
    nuscenes.add_argument('--max-sweeps', type=int, default=10, help='lidar sweeps listed per key frame (default: 10)')
    nuscenes.add_argument('--workers', type=int, default=len(os.sched_getaffinity(0)), help='processes (default: all cores)')
    nuscenes.add_argument('--no-database', action='store_true', help='info files only')
    nuscenes.add_argument('--force', action='store_true', help='start anew, ignoring what an earlier run finished')

    fill = commands.add_parser('fill-location', help='add the map location to an info file, from the tables')
    fill.add_argument('--root-path', required=True)
    fill.add_argument('--info-file', required=True, nargs='+')
    fill.add_argument('--version', default=None, help="the tables' folder (default: what the file says)")

    check = commands.add_parser('check', help='say what an info file holds and what it lacks')
    check.add_argument('--root-path', default=None, help='also look whether maps and the first samples are there')
    check.add_argument('--info-file', required=True, nargs='+')
    args = parser.parse_args(argv)
    if args.command == 'nuscenes' and args.workers < 1:
        nuscenes.error(f'--workers must be at least 1, got {args.workers}')
    if args.command == 'nuscenes' and args.max_sweeps < 0:
        nuscenes.error(f'--max-sweeps must not be negative, got {args.max_sweeps}')
    return args


def make_nuscenes(args: argparse.Namespace) -> int:
    from mmdet3d_ext.datasets.gt_database import create_gt_database
    from mmdet3d_ext.datasets.info_files import load_info_file
    from mmdet3d_ext.datasets.nuscenes_converter import check_map_expansion, create_infos
    out_dir = args.out_dir or args.root_path
    written = create_infos(args.root_path, out_dir, args.extra_tag, args.version, args.max_sweeps, args.workers, args.force)
    if 'train' in written and not args.no_database:
        create_gt_database(written['train'], args.root_path, out_dir, args.extra_tag, args.max_sweeps, args.workers, args.force)
    locations = {info['location'] for path in written.values() for info in load_info_file(path).infos}
    for problem in check_map_expansion(args.root_path, sorted(locations)):
        print(f'WARNING: {problem}. Detection works without it, map labels do not.', file=sys.stderr)
    return 0


def fill(args: argparse.Namespace) -> int:
    from mmdet3d_ext.datasets.nuscenes_converter import fill_location
    for path in args.info_file:
        print(f'{path}: location of {fill_location(path, args.root_path, args.version)} samples filled in')
    return 0


def check(args: argparse.Namespace) -> int:
    from mmdet3d_ext.datasets.info_files import (
        ANNOTATION_FIELDS,
        BASE_FIELDS,
        InfoFileError,
        check_cameras,
        check_fields,
        load_info_file,
    )
    from mmdet3d_ext.datasets.nuscenes_converter import check_map_expansion
    status, root = 0, args.root_path
    for path in args.info_file:
        loaded = load_info_file(path, root=root)
        print(f'{path}: {len(loaded.infos)} samples; {loaded.metadata}')
        for note in loaded.notes:
            print(f'  {note}')
        problems = [] if loaded.infos else ['samples: it holds none']
        for test in (lambda: check_fields(loaded.infos, BASE_FIELDS, path, root),  # noqa: B023
                     lambda: check_cameras(loaded.infos, path, root=root),  # noqa: B023
                     lambda: check_fields(loaded.infos, ('location', 'radars'), path, root),  # noqa: B023
                     lambda: check_fields(loaded.infos, ANNOTATION_FIELDS, path, root)):  # noqa: B023
            try:
                test()
            except InfoFileError as error:
                problems.append(str(error))
        if args.root_path is not None and not problems:
            locations = sorted({info['location'] for info in loaded.infos})
            problems += check_map_expansion(args.root_path, locations)
            first = Path(args.root_path, loaded.infos[0]['lidar_path']) if loaded.infos else None
            if first is not None and not first.is_file():
                problems.append(f'{first} missing: the paths of the file are not below --root-path')
        for problem in problems:
            print(f'  LACKS: {problem}')
        status |= bool(problems)
    return status


def main(argv=None) -> int:
    args = parse_args(argv)
    try:
        return {'nuscenes': make_nuscenes, 'fill-location': fill, 'check': check}[args.command](args)
    except BrokenPipeError:  # see _light.end
        raise
    except (OSError, ValueError, RuntimeError) as error:
        from mmdet3d_ext.errors import mistake
        text = mistake(error)
        if text is None:
            raise
        print(f'error: {text}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    from _light import end
    end(main)
