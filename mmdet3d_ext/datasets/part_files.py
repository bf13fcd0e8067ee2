"""Long work in named parts, in several processes, that goes on where a killed run stopped."""
from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, List, Mapping, Sequence

from tqdm import tqdm

from . import restricted_pickle


class Parts:
    """Finished parts in a folder, one pickle each, valid only for the settings that they were made with.

    Args:
        folder: where the parts lie (removed by :meth:`remove`).
        settings: JSON-able; a folder made with other settings is emptied.
        force: empty the folder first.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], force: bool = False):
        self.folder = folder
        stamp = folder / 'settings.json'
        text = json.dumps(dict(settings), sort_keys=True)
        if folder.exists() and (force or not stamp.is_file() or stamp.read_text() != text):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(text)

    def path(self, name: str) -> Path:
        return self.folder / f'{hashlib.sha1(name.encode()).hexdigest()[:16]}.pkl'

    def done(self, name: str) -> bool:
        return self.path(name).is_file()

    def save(self, name: str, data: Any) -> None:
        restricted_pickle.save(data, self.path(name))

    def load(self, name: str) -> Any:
        return restricted_pickle.load(self.path(name))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def run_parts(parts: Parts, names: Sequence[str], work: Callable[[str], Any], workers: int, title: str, unit: str) -> None:
    """Do ``work(name)`` for every part that is not done yet and keep its result.

    ``work`` must be a module's function; it finds large inputs in its module (workers are forked).

    Args:
        workers: processes; 0 or 1 works in this one.

    Raises:
        RuntimeError: if a worker was killed (out of memory); what was finished is kept.
        Exception: the first one that ``work`` raised.
    """
    todo: List[str] = [name for name in names if not parts.done(name)]
    with tqdm(total=len(names), initial=len(names) - len(todo), desc=title, unit=unit) as bar:
        if workers <= 1:
            for name in todo:
                parts.save(name, work(name))
                bar.update()
            return
        context = multiprocessing.get_context('fork')
        with ProcessPoolExecutor(min(workers, max(1, len(todo))), mp_context=context) as pool:
            futures = {pool.submit(_do, parts, work, name): name for name in todo}
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            except BrokenProcessPool:
                raise RuntimeError(f'{title}: a worker process was killed, most likely for lack of memory. Run the same '
                                   f'command again with fewer --workers: finished parts are kept') from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _do(parts: Parts, work: Callable[[str], Any], name: str) -> None:
    parts.save(name, work(name))
