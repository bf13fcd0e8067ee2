"""The operators' page against the code: what a running job says is explained there, or in the page of bad inputs."""
import ast
import re
from pathlib import Path

import pytest
from testing import REPO

PAGES = ('docs/operations.md', 'docs/errors.md')
# Where messages of a running job, its launcher and its data are written.
PLACES = ('mmdet3d_ext/launching', 'mmdet3d_ext/engine/hooks', 'mmdet3d_ext/engine/rank_watch.py', 'mmdet3d_ext/engine/norm_layers.py',
          'mmdet3d_ext/engine/runner.py', 'mmdet3d_ext/engine/train.py', 'mmdet3d_ext/datasets/reader.py', 'mmdet3d_ext/datasets/sharing.py',
          'mmdet3d_ext/datasets/stream.py', 'mmdet3d_ext/engine/checkpoint/writing.py', 'tools/launch.py')
SAYING = {'warning', 'warn', 'error', '_say', 'emit', 'LaunchToolError', 'SampleError', 'WorkerDied', 'NonFiniteError'}
RUN = 4  # words in a row that a page has in common with a message that it explains; all of a shorter message
# What names a key, a value and the rule, and is answered before anything runs: docs/errors.md, "wrong configuration key or type".
RULE = re.compile(r'must be|unknown keys|its keys are|is not known')


def text(node):
    """A message's literal parts; a gap stands for each value."""
    if isinstance(node, ast.Constant):
        return re.sub(r'%[-.\d]*[sdgf]', '\0', node.value) if isinstance(node.value, str) else '\0'
    if isinstance(node, ast.JoinedStr):
        return ''.join(text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    if isinstance(node, ast.IfExp):
        return text(node.body)
    return '\0'


def messages():
    """(file:line, message) of everything that is said in ``PLACES``."""
    for place in PLACES:
        path = Path(REPO, place)
        for file in sorted(path.glob('*.py')) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and node.args and getattr(node.func, 'attr', getattr(node.func, 'id', '')) in SAYING:
                    found = max(map(text, node.args), key=len)
                    if runs(found) and not RULE.search(found):
                        yield f'{file.relative_to(REPO)}:{node.lineno}', found


def words(part):
    return re.findall(r"[a-z0-9_'/.-]*[a-z0-9]", part.lower())


def runs(message):
    """Words in a row without a value in between: ``RUN``, or as many as the longest part has, at least two."""
    parts = [words(part) for part in message.split('\0')]
    length = min(RUN, max(map(len, parts)))
    return {tuple(part[i:i + length]) for part in parts for i in range(len(part) - length + 1)} if length > 1 else set()


def explained(message, page):
    found = words(re.sub(r'`|\*', '', page))
    known = {tuple(found[i:i + length]) for length in range(2, RUN + 1) for i in range(len(found) - length + 1)}
    return bool(known & runs(message))


def test_every_message_of_a_running_job_is_explained():
    page = ' '.join(Path(REPO, page).read_text() for page in PAGES)
    found = list(messages())
    assert len(found) > 50
    lacking = [f'{where}: {message}'.replace('\0', '...') for where, message in found if not explained(message, page)]
    assert not lacking, 'explain in docs/operations.md:\n' + '\n'.join(lacking)


@pytest.mark.parametrize('folder, maker', [('doctor', 'Finding'), ('monitor', 'Mark')])
def test_every_line_of_the_doctor_and_every_mark_of_the_monitor_is_explained(folder, maker):
    found = {text(node.args[0]) for file in Path(REPO, 'mmdet3d_ext', folder).glob('*.py') for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == maker}
    page = Path(REPO, PAGES[0]).read_text()
    names = re.findall(r'`([^`]+)`', page)
    lacking = [name for name in found if len(name.strip('\0 ')) > 2 and
               not any(re.fullmatch(re.escape(name).replace('\0', '.*'), known) for known in names)]
    assert len(found) > 5 and not lacking, f'explain in docs/operations.md: {sorted(lacking)}'


@pytest.mark.parametrize('message, is_there', [('ALARM: \0 cannot write its log: \0', True), ('\0 cannot write', True),
                                               ('the moon \0 is made of cheese', False), ('cannot write its will \0', False)])
def test_the_comparison_itself(message, is_there):
    assert explained(message, '| `ALARM: x cannot write its log: No space` | free some |') == is_there
