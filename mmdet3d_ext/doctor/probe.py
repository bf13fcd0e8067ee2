"""Other processes that try things out: an import that crashes, hangs or calls ``exit`` must not take the doctor with it."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

REPO = Path(__file__).resolve().parents[2]
# As `python tools/train.py` finds modules: its own folder first, the checkout before all else unless it is on the path already.
PATHS = f'''
import sys
sys.path[0] = {str(REPO / 'tools')!r}
if {str(REPO)!r} not in sys.path:
    sys.path.insert(0, {str(REPO)!r})
'''
SAY = '''
import json, os
def say(**values):
    with open(os.environ["MMDET3D_EXT_PROBE"], "a") as stream:
        stream.write(json.dumps(values) + "\\n")
'''


@dataclass
class Answer:
    """What a probe said before it ended: one dict per call of ``say``, its exit code (None: stopped after the time limit,
    negative: killed by a signal), and the end of its output."""

    said: List[Dict[str, Any]] = field(default_factory=list)
    code: Optional[int] = None
    output: str = ''

    def merged(self) -> Dict[str, Any]:
        return {key: value for part in self.said for key, value in part.items()}

    def how_it_ended(self) -> str:
        if self.code is None:
            return 'did not end in time'
        if self.code < 0:
            try:
                return f'crashed ({signal.Signals(-self.code).name})'
            except ValueError:
                return f'ended by signal {-self.code}'
        return f'ended with exit code {self.code}'

    def last_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip() if lines else self.how_it_ended()


def ask(code: str, timeout: float = 120.0, env: Optional[Mapping[str, str]] = None, arguments: Sequence[str] = ()) -> Answer:
    """Run Python ``code`` in a process as a rank would start it; it answers by ``say(name=value, ...)``.

    Args:
        code: the program; its ``sys.path`` is that of ``tools/train.py``.
        timeout: seconds; then the process and its children are stopped.
        env: its environment (default: this one's).
    """
    with tempfile.TemporaryDirectory(prefix='mmdet3d_ext-doctor-') as folder:
        answers = Path(folder) / 'answers'
        answers.touch()
        script = Path(folder) / 'probe.py'
        script.write_text(PATHS + SAY + code)
        command = [sys.executable, str(script), *arguments]
        code_, output = call(command, timeout, dict(env if env is not None else os.environ, MMDET3D_EXT_PROBE=str(answers)))
        said = []
        for line in answers.read_text().splitlines():
            try:
                said.append(json.loads(line))
            except ValueError:
                pass
        return Answer(said, code_, output)


def call(command: Sequence[str], timeout: float, env: Optional[Mapping[str, str]] = None):
    """(exit code or None, output) of a command in a process group of its own, which is stopped as a whole in the end.

    A command that cannot be started gives (127, reason).
    """
    with tempfile.TemporaryFile() as stream:
        try:
            process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                                       env=None if env is None else dict(env), start_new_session=True)
        except OSError as error:
            return 127, str(error)
        try:
            code: Optional[int] = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:  # the group exists as long as one of its processes does
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            process.wait()
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 20000))
        return code, stream.read().decode(errors='replace')
