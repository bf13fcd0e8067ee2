"""``tools/train.py`` with the small model of the fault tests, for ``soak.py``; a file sets its pace."""
import importlib.util
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import faulty  # noqa: E402,F401  (registers the model and the data)
from mmcv.runner import HOOKS, Hook  # noqa: E402


@HOOKS.register_module(force=True)
class SoakPace(Hook):
    """Sleeps after each step as many seconds as ``file`` says, and not at all once it is gone; tells the step in ``<file>.step``."""

    def __init__(self, file):
        self.file = Path(file)

    def after_train_iter(self, runner):
        if runner.rank == 0:
            told = self.file.with_suffix('.tmp')
            told.write_text(str(runner.iter))
            os.replace(told, self.file.with_suffix('.step'))
        try:
            time.sleep(float(self.file.read_text()))
        except (OSError, ValueError):
            pass


if __name__ == '__main__':
    spec = importlib.util.spec_from_file_location('train_tool', Path(__file__).resolve().parents[2] / 'tools' / 'train.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    sys.exit(tool.main())
