#!/usr/bin/env python
"""Write a synthetic data set in the nuScenes v1.0 schema that the nuscenes-devkit loads, renders and evaluates.

Examples:
  # what `make demo` uses: 8 + 2 scenes, small images, about two minutes on two cores
  python tools/create_synthetic_nuscenes.py --out data/synthetic --preset demo --workers 2
  # a few seconds, for trying things out
  python tools/create_synthetic_nuscenes.py --out data/tiny --preset tiny
  # full-size sensors, few scenes
  python tools/create_synthetic_nuscenes.py --out data/full --preset mini --scenes-train 2 --scenes-val 1 --workers 8
  # official names of the full data set (splits train and val)
  python tools/create_synthetic_nuscenes.py --out data/trainval --preset demo --version v1.0-trainval \
      --scenes-train 40 --scenes-val 10 --workers 8

A run that was interrupted goes on where it stopped when it is started again with the same options.

Exit codes: 0 done; 1 an error; 2 something to correct in the command or the folder.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def parse_size(text: str):
    """'480x270' -> (480, 270)."""
    try:
        width, height = (int(part) for part in text.lower().split('x'))
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected WIDTHxHEIGHT such as 480x270, got {text!r}') from None
    return width, height


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument('--out', '--root-path', dest='out', required=True, help='folder of the data set')
    made.add_argument('--preset', default='demo', choices=('tiny', 'demo', 'mini'),
                      help='a set of sizes that the other options change (default: demo)')
    made.add_argument('--seed', type=int, default=0, help='the same seed and options give the same bytes (default: 0)')
    made.add_argument('--workers', type=int, default=os.cpu_count() or 1, help='processes (default: all cores)')
    made.add_argument('--overwrite', action='store_true', help='replace a synthetic data set made with other options')
    made.add_argument('--version', choices=('v1.0-mini', 'v1.0-trainval'), help='whose scene names and splits to use')
    made.add_argument('--scenes-train', type=int, metavar='N', help='scenes of the training split')
    made.add_argument('--scenes-val', type=int, metavar='N', help='scenes of the validation split')
    made.add_argument('--samples-per-scene', type=int, metavar='N', help='key frames per scene (2 Hz)')
    made.add_argument('--sweeps', type=int, metavar='N', help='lidar sweeps before each key frame, 0 to 9')
    made.add_argument('--camera-sweeps', type=int, metavar='N', help='images before each key frame, 0 to 5')
    made.add_argument('--radar-sweeps', type=int, metavar='N', help='radar scans before each key frame, 0 to 6')
    size = made.add_mutually_exclusive_group()
    size.add_argument('--image-size', type=parse_size, metavar='WxH', help='size of the images in pixels')
    size.add_argument('--image-scale', type=float, metavar='F', help='size of the images as a fraction of 1600x900')
    made.add_argument('--lidar-azimuth-steps', type=int, metavar='N', help='lidar columns per turn (real: 1084)')
    made.add_argument('--map-blocks', type=int, metavar='N', help='city blocks along each side of a map')
    made.add_argument('--density', type=float, metavar='F', help='scales the number of road users')
    made.add_argument('--jpeg-quality', type=int, metavar='Q', help='1 to 100')
    return made


def main(arguments=None) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    options = vars(parser().parse_args(arguments))
    out, scale = options.pop('out'), options.pop('image_scale')
    if scale is not None:
        options['image_size'] = (round(1600 * scale), round(900 * scale))
    from mmdet3d_ext.datasets.synthetic import generate
    options = {name: value for name, value in options.items() if value is not None}
    try:
        summary = generate(out, progress=True, **options)
    except BrokenPipeError:  # see _light.end
        raise
    except (OSError, ValueError) as error:
        from mmdet3d_ext.errors import mistake
        text = mistake(error)
        if text is None:
            raise
        print(f'error: {text}', file=sys.stderr)
        return 2
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == '__main__':
    from _light import end
    end(main)
