"""How the tools end when what they print cannot be delivered: ``tool | head``, a full disk."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'monitor'))
from fake_runs import make_run, schedule  # noqa: E402

TOOLS = sorted(path for path in (REPO / 'tools').glob('*.py') if not path.name.startswith('_'))


def buffered(yes=True):
    """Whether what is printed leaves at once: errors then come from print itself, otherwise from the flush at the end."""
    return {**{name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'},
            **({} if yes else {'PYTHONUNBUFFERED': '1'})}


def without_reader(*words, also_errors=False, buffer=True):
    """Run a program whose output nobody reads: (exit code, stderr)."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, *map(str, words)], stdout=writing, stderr=writing if also_errors else subprocess.PIPE,
                          timeout=100, env=buffered(buffer))
    os.close(writing)
    return done.returncode, (done.stderr or b'').decode()


@pytest.mark.parametrize('tool', TOOLS, ids=lambda path: path.name)
def test_every_tool_ends_in_the_one_place_for_it(tool):
    assert re.search(r"^if __name__ == '__main__':\n(    from _light import end\n)?    (_light\.)?end\(main\)\n\Z", tool.read_text(), re.M)


def one_run(folder):
    make_run(folder / 'run', schedule(upto=(2, 500)))
    return folder / 'run'


WORDS = {
    'monitor.py': lambda folder: [one_run(folder)], 'monitor.py --check': lambda folder: ['--check', one_run(folder)],
    'monitor.py --help': lambda folder: ['--help'], 'launch.py --help': lambda folder: ['--help'],
    'doctor.py': lambda folder: ['--only', 'system'], 'create_data.py --help': lambda folder: ['--help'],
}


@pytest.mark.parametrize('also_errors', [False, True])
@pytest.mark.parametrize('buffer', [False, True])
@pytest.mark.parametrize('what', WORDS)
def test_nobody_reads_on(tmp_path, what, buffer, also_errors):
    words = WORDS[what](tmp_path)
    if what == 'monitor.py --check':  # says nothing of a run that is well
        for path in (tmp_path / 'run').iterdir():
            os.utime(path, (0, 0))
    code, said = without_reader(REPO / 'tools' / what.split()[0], *words, also_errors=also_errors, buffer=buffer)
    # argparse passes over the error of an unbuffered help
    assert code == (0 if '--help' in what and not buffer else 141) and said == ''


def test_a_mistake_without_a_reader_of_errors_keeps_its_code(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, REPO / 'tools' / 'monitor.py', 'nowhere'], stderr=writing, cwd=tmp_path, timeout=60)
    os.close(writing)
    assert done.returncode in (2, 141)


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs /dev/full')
@pytest.mark.parametrize('buffer', [False, True])
def test_output_to_a_full_disk_is_one_line(tmp_path, buffer):
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, REPO / 'tools' / 'monitor.py', one_run(tmp_path)], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=60, env=buffered(buffer))
    assert done.returncode == 1 and done.stderr == 'error: the output cannot be written: No space left on device\n'


PROGRAM = '''
import sys
sys.path[:0] = [{repo!r}, {tools!r}]
def main():
    from mmdet3d_ext.engine import launch
    def program():
        {line}
        return 0
    return launch.run(program)
from _light import end
end(main)
'''


@pytest.mark.parametrize('line, code', [("print('x' * 100000)", 141), ("raise BrokenPipeError(32, 'another pipe')", 1)])
def test_a_program_of_the_engine_without_a_reader(tmp_path, line, code):
    """Another broken pipe than that of the output is an error as before."""
    path = tmp_path / 'program.py'
    path.write_text(PROGRAM.format(repo=str(REPO), tools=str(REPO / 'tools'), line=line))
    if code == 141:
        found, said = without_reader(path)
        assert found == 141 and 'Traceback' not in said and 'BrokenPipe' not in said
        return
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and 'another pipe' in done.stderr
