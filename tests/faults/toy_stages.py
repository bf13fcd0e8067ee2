"""A trainer of a few lines for tests of stages: no torch. What a checkpoint holds is one number that tells its whole history.

``toy_stages.py CONFIG --run-dir D [--load_from C] [--resume_from auto] --evaluation.save_best M ...``; the configuration is JSON:
``epochs``, ``seconds`` per epoch, ``metrics`` (name -> one value per epoch), ``deaf`` and ``die_at`` (an epoch before which it is
killed, once).
"""
import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument('config')
parser.add_argument('--run-dir')
parser.add_argument('--load_from')
parser.add_argument('--load-weights')
parser.add_argument('--load-optimizer', action='store_true')
parser.add_argument('--resume_from')
parser.add_argument('--evaluation.save_best', dest='metric')
arguments, rest = parser.parse_known_args()
config = json.loads(Path(arguments.config).read_text())
run_dir = Path(arguments.run_dir)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f'.tmp{os.getpid()}')  # every rank writes
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


found = sorted(run_dir.glob('epoch_*.pth'), key=lambda path: int(path.stem.split('_')[1]))
state = json.loads(found[-1].read_text()) if found and arguments.resume_from == 'auto' else \
    {'epoch': 0, 'history': [json.loads(Path(arguments.load_from).read_text())['history'] if arguments.load_from else 'nothing']}
with open(run_dir / 'starts.txt', 'a') as stream:
    stream.write(json.dumps([state['epoch'], arguments.load_from, arguments.load_weights, arguments.load_optimizer, rest]) + '\n')
while state['epoch'] < config.get('epochs', 3):
    if asked:
        sys.exit(75)
    epoch = state['epoch'] + 1
    if config.get('die_at') == epoch and not (run_dir / 'died').exists():
        (run_dir / 'died').touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(config.get('seconds', 0.0))
    state = {'epoch': epoch, 'history': [*state['history'], epoch]}
    write(run_dir / f'epoch_{epoch}.pth', state)
    metrics = {name: values[epoch - 1] for name, values in config['metrics'].items()}
    write(run_dir / 'metrics' / f'epoch_{epoch}.json', metrics)
    write(run_dir / 'metrics.json', metrics)
    if arguments.metric not in metrics:
        print(f'error: key evaluation.save_best: there is no metric {arguments.metric}', file=sys.stderr)
        sys.exit(2)
    best = json.loads((run_dir / 'best.json').read_text()) if (run_dir / 'best.json').exists() else None
    if metrics[arguments.metric] == metrics[arguments.metric] and (best is None or metrics[arguments.metric] > best['score']):
        name = f'best_{epoch}.pth'
        write(run_dir / name, state)
        write(run_dir / 'best.json', {'metric': arguments.metric, 'score': metrics[arguments.metric], 'epoch': epoch, 'file': name})
