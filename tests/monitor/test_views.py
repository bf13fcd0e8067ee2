"""The terminal view, the page, and the tool; the page also in a real browser."""
import functools
import html.parser
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testing import REPO

sys.path.insert(0, str(Path(__file__).parent))
from fake_runs import CLASSES, make_run, meta, png, schedule, train_row, write_json  # noqa: E402

from mmdet3d_ext.monitor import charts, compare
from mmdet3d_ext.monitor.page import page
from mmdet3d_ext.monitor.run import Run
from mmdet3d_ext.monitor.terminal import Style, follow, render

TOOL = [sys.executable, str(REPO / 'tools' / 'monitor.py')]


@pytest.fixture
def two_runs(tmp_path):
    mine = make_run(tmp_path / 'phase3', schedule(upto=(3, 400)), age=20)
    (mine / 'pictures').mkdir()
    (mine / 'pictures' / 'one.png').write_bytes(png())
    (mine / 'pictures' / 'no.png').write_bytes(b'not a picture')
    rows = schedule()
    for row in rows:
        if row['mode'] == 'train':
            row['loss'] *= 1.2
    other = make_run(tmp_path / 'old', rows, first={**meta(optimizer={'type': 'AdamW', 'lr': 1e-3}, extra=[{'a': 1}]),
                                                   'seed': 5, 'versions': {'torch': '2.11.0', 'numpy': '1.26.4'}})
    return Run(str(mine)), Run(str(other))


# ---- terminal ----------------------------------------------------------------------------------------------------------

def test_the_view_says_what_an_operator_asks(two_runs):
    text = render(two_runs[0], Style(width=110))
    for words in ('running: last line', 'epoch 3/4, iteration 400/1000', '60.0%', 'ETA', '0.5 s/iteration', '32 samples/s', 'data 10%',
                  'GPU memory 29.3 GiB', 'lr 0.0001', 'grad norm', 'loss_heatmap', '8 rank(s) x 2 samples', 'NDS', 'mean IoU', *CLASSES):
        assert words in text, words
    assert '\033' not in text


def test_the_marks_of_the_classes_stand_beside_their_values(tmp_path):
    rows = schedule(upto=(3, 400))
    for row in rows:
        if row['mode'] == 'train':
            row['stats/map/drivable_area/dice_score'] = 0.1
    text = render(Run(str(make_run(tmp_path / 'run', rows))), Style(unicode=False))
    line = next(line for line in text.splitlines() if line.startswith('  drivable_area'))
    assert line.split()[:5] == ['drivable_area', '0.0360', 'ok', '0.5900', '!']
    assert '! map/drivable_area/dice: 0.9 is not below 0.4' in text


@pytest.mark.parametrize('encoding, mark', [('utf-8', '✓'), ('ascii', 'ok')])
def test_a_terminal_without_the_characters_gets_plain_ones(two_runs, encoding, mark):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.write(render(two_runs[0], Style.of(stream)))
    stream.flush()
    assert mark in stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize('rows', [[], [train_row(1, 50, 0.0)], [{'mode': 'train', 'epoch': 1, 'iter': 1}],
                                  [train_row(1, i, 0.5, loss=math.nan, grad_norm=math.nan) for i in (50, 100)]])
def test_little_or_nothing_to_show(tmp_path, rows):
    run = Run(str(make_run(tmp_path / 'run', rows)))
    assert render(run, Style()) and page(run)


def test_curves_as_text():
    style = Style(unicode=False)
    assert style.spark([0, 1, 2, 3], 4) == '_-*@'
    assert style.spark([1, 1, 1], 3) == '___' and style.spark([], 3) == '' and style.spark([1, math.nan, 3], 3)[1] == 'x'
    assert len(style.spark(list(range(1000)), 20)) == 20


def test_follow_shows_again_until_the_run_ends(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(4, 900)))
    run = Run(str(folder))
    stream = io.StringIO()
    follow(run, 0.01, stream, rounds=2)
    assert stream.getvalue().count('epoch 4/4, iteration 900/1000') == 2
    make_run(tmp_path / 'run', schedule())
    stream = io.StringIO()
    follow(run, 0.01, stream, rounds=50)
    assert stream.getvalue().count('finished: trained to the end') == 1


# ---- charts ------------------------------------------------------------------------------------------------------------

def test_thinning_keeps_every_spike():
    values = [1.0] * 20000
    values[777], values[15003] = 50.0, -3.0
    steps, kept = charts.thin(range(20000), values)
    assert len(kept) <= 520 and 50.0 in kept and -3.0 in kept and steps == sorted(steps)


@pytest.mark.parametrize('low, high', [(0, 1), (0.031, 0.0367), (-5, 1234), (1e-9, 3e-9), (2, 2)])
def test_ticks_are_round_and_inside(low, high):
    found = charts.ticks(low, high)
    assert all(low - 1e-12 <= value <= high + 1e-12 for value in found) and 1 <= len(found) <= 8
    assert all(len(charts.text_of(value)) <= 9 for value in found)


def test_curves_are_drawn_where_the_values_are():
    figure = charts.svg(charts.Chart('t', [charts.Curve('a', [0, 1, 2], [0.0, 10.0, 5.0])]), 0)
    points = [tuple(map(float, pair.split())) for pair in re.findall(r'[ML]([\d.]+ [\d.]+)', re.search(r' d="([^"]+)"', figure)[1])]
    assert points[0][0] == charts.LEFT and points[2][0] == charts.WIDTH - charts.RIGHT
    assert points[1][1] < points[2][1] < points[0][1]  # pixels grow downwards
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.2)


def test_a_gap_interrupts_the_line_and_logarithms_skip_zero():
    def drawn(values, **more):
        return re.search(r' d="([^"]+)"', charts.svg(charts.Chart('t', [charts.Curve('a', range(5), values)], **more), 0))[1]
    assert drawn([1, 2, math.nan, 4, 5]).count('M') == 2
    assert drawn([1, 2, 0, 4, 5], log=True).count('M') == 2
    assert 'nothing logged' in charts.svg(charts.Chart('t', [charts.Curve('a', [1], [math.nan])]), 0)


# ---- page --------------------------------------------------------------------------------------------------------------

class Checker(html.parser.HTMLParser):
    """Tags are closed in order, and nothing refers to another file or machine."""

    VOID = {'meta', 'input', 'img', 'br'}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ('src', 'href', 'action', 'data', 'srcset', 'poster'):
                self.links.append(value)
            if name == 'id':
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and len(set(checker.ids)) == len(checker.ids)
    assert all(link.startswith(('#', 'data:image/png;base64,')) for link in checker.links)
    assert 'http://' not in re.sub(r'http://www\.w3\.org/2000/svg', '', text) and 'https://' not in text and 'url(' not in text
    return checker


def test_the_page_is_one_file_with_everything(two_runs):
    text = page(*two_runs)
    checker = checked(text)
    assert len([link for link in checker.links if link.startswith('data:')]) == 1  # of the two, one is a PNG
    for words in ('Total loss', 'Map: dice loss per class', 'Gradient norm', 'Learning rate', 'GPU memory', 'NDS, mAP, mean IoU',
                  'AP per class', 'IoU per map class', 'Differences from old', 'pictures/one.png', 'Thresholds', 'samples_per_gpu: 2',
                  'AP car', 'IoU divider'):
        assert words in text, words


def test_losses_with_limits_are_drawn_before_their_weights(two_runs):
    """The divider's class weight is 4: beside a limit for the loss without it, the logged values would look bad for ever."""
    from mmdet3d_ext.monitor.page import _charts
    found = {chart.title: {curve.label: curve for curve in chart.curves} for chart in _charts(*two_runs)}
    for kind, first in (('focal', 0.06), ('dice', 0.95)):
        curves = found[f'Map: {kind} loss per class, before weights']
        for label in ('divider', 'divider (old)', 'walkway'):
            assert curves[label].values[0] == pytest.approx(first, abs=0.02) and len(curves[label].values) > 40, label


def test_differences_name_key_and_both_values(two_runs):
    found = compare.settings(*two_runs)
    assert compare.Difference('optimizer.lr', '0.0002', '0.001') in found
    assert compare.Difference('extra.0.a', '(not set)', '1') in found and len(found) == 2
    origin = compare.origins(*two_runs)
    assert compare.Difference('seed', '0', '5') in origin and compare.Difference('versions.torch', '2.7.1', '2.11.0') in origin
    assert not any(item.key == 'versions.numpy' for item in origin)
    assert compare.settings(two_runs[0], two_runs[0]) == []
    names = [name for name, _, _ in compare.results(*two_runs)]
    assert 'object/nds' in names and 'lr' not in names


def test_a_run_of_a_week_is_shown_at_once(tmp_path):
    run = Run(str(make_run(tmp_path / 'run', schedule(epochs=10, iterations=30000, upto=(10, 20000)), iterations=30000)))
    begin = time.monotonic()
    render(run, Style())
    text = page(run)
    assert len(run.train) == 5800 and time.monotonic() - begin < 8 and len(text) < 2**21


def test_text_from_the_run_cannot_become_markup(tmp_path):
    evil = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
    row = train_row(1, 50, 0.1, **{f'loss/map/{evil.replace("/", "")}/dice': 0.5, f'loss/object/{evil.replace("/", "")}': 0.5})
    first = meta(note=evil)
    first['exp_name'] = first['code_version'] = evil
    folder = make_run(tmp_path / 'run', [row, dict(row, iter=100)], first=first,
                      extra=[f'2026-11-30 09:00:00,000 - mmdet3d - ERROR - {evil}'])
    text = page(Run(str(folder)))
    checked(text)
    assert text.count('<script>') == 1 and '<img' not in text


def test_a_configuration_that_expands_without_end_is_left_out(tmp_path):
    lines = ['a0: &a0 [x, x, x, x, x, x, x, x, x]'] + [f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 9)}]' for i in range(1, 9)]
    write_json(tmp_path / 'a.log.json', [train_row(1, 50, 0.1)], {'config': '\n'.join(lines)})
    begin = time.monotonic()
    text = page(Run(str(tmp_path)))
    assert 'holds the configuration' in text and len(text) < 2**20 and time.monotonic() - begin < 5


# ---- the tool ----------------------------------------------------------------------------------------------------------

def run_tool(*words, **more):
    return subprocess.run([*TOOL, *map(str, words)], capture_output=True, text=True, timeout=60, **more)


def test_the_tool_needs_no_torch(two_runs, tmp_path):
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken' / 'torch.py').write_text('raise ImportError("libtorch_cuda_cu.so")')
    done = run_tool(two_runs[0].folder, env=dict(os.environ, PYTHONPATH=str(tmp_path / 'broken')))
    assert done.returncode == 0 and 'epoch 3/4' in done.stdout, done.stderr


def test_the_tool_writes_the_page(two_runs, tmp_path):
    out = tmp_path / 'p.html'
    done = run_tool(two_runs[0].folder, '--html', out, '--compare', two_runs[1].folder)
    assert done.returncode == 0 and 'one file' in done.stdout, done.stderr
    checked(out.read_text())


def test_check_is_for_cron(tmp_path):
    good = make_run(tmp_path / 'good', schedule(upto=(2, 500)), age=10)
    dead = make_run(tmp_path / 'dead', schedule(upto=(2, 500)), age=9999)
    assert run_tool(good, '--check').returncode == 0
    done = run_tool(dead, '--check')
    assert done.returncode == 1 and 'dead: run: silent' in done.stdout


@pytest.mark.parametrize('words, text', [
    (['nowhere'], 'no such run folder'), (['RUN', '--compare', 'RUN'], '--compare goes with --html'),
    (['RUN', '--follow', '0'], '--follow must be'), (['RUN', '--html', '/nowhere/x.html'], '/nowhere/x.html: No such file'),
    (['RUN', '--html', 'x.html', '--compare', 'nowhere'], 'nowhere: no such run folder'), (['RUN', '--follow', 'nan'], '--follow must be'),
    (['RUN', '--html', 'x.html', '--compare', 'bad'], "bad/a.log.json: holds no line that mmcv's runner writes"),
    (['bad'], "bad/a.log.json: holds no line that mmcv's runner writes"), (['bad', '--check'], 'bad/a.log.json'),
    (['bad', '--follow'], 'bad/a.log.json'), (['bad/a.log.json'], 'bad/a.log.json')])
def test_mistakes_get_one_line(tmp_path, words, text):
    (tmp_path / 'bad').mkdir()
    (tmp_path / 'bad' / 'a.log.json').write_bytes(bytes(range(256)))
    folder = str(make_run(tmp_path / 'run', schedule(upto=(1, 500))))
    done = run_tool(*[folder if word == 'RUN' else word for word in words], cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1


def hear_ctrl_c():
    """A shell starts what it runs in the background (nohup, CI) deaf to SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_follow_ends_quietly_on_ctrl_c(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(1, 500)))
    process = subprocess.Popen([*TOOL, str(folder), '--follow', '0.2'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=hear_ctrl_c)
    seen = ''
    while seen.count('epoch 1/4') < 2:
        seen += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130 and 'Traceback' not in process.stderr.read()


# ---- a browser ---------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def browser():
    found = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)
    if found is None:
        pytest.skip('needs a browser: Debian\'s package chromium')
    return found


def in_browser(path, tmp_path, *options):
    """Open a file in headless Chromium; returns the DOM after its scripts ran, and what it wrote to the console."""
    done = subprocess.run([browser(), '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--hide-scrollbars',
                           f'--user-data-dir={tmp_path / "profile"}', '--window-size=1400,1800', '--virtual-time-budget=3000',
                           '--enable-logging=stderr', *options, f'file://{path}'], capture_output=True, text=True, timeout=60)
    return done.stdout, [line for line in done.stderr.splitlines() if 'CONSOLE' in line]


PROBE = '''<script>
var out = [], charts = document.querySelectorAll(".chart svg"), first = charts[0], box = first.getBoundingClientRect();
out.push("charts " + charts.length);
out.push("outside " + Array.from(document.querySelectorAll(".curve")).filter(function (c) {
  var b = c.getBBox(); return b.x < 51 || b.x + b.width > 451 || b.y < 11 || b.y + b.height > 207; }).length);
out.push("wide " + (document.documentElement.scrollWidth > window.innerWidth));
first.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true}));
out.push("tip " + (document.querySelector(".tip") || {}).textContent);
first.dispatchEvent(new PointerEvent("pointerleave", {}));
out.push("gone " + (document.querySelector(".tip") === null));
var key = document.querySelector(".key"); key.click();
out.push("hidden " + getComputedStyle(first.querySelector(".curve")).display + " " + key.getAttribute("aria-pressed"));
var filter = document.getElementById("filter"); filter.value = "max_epochs"; filter.dispatchEvent(new Event("input"));
out.push("lines " + Array.from(document.querySelectorAll("#config span")).filter(function (s) { return !s.hidden; }).length);
out.push("picture " + Array.from(document.images).every(function (i) { return i.complete && i.naturalWidth === 32; }));
var done = document.createElement("pre"); done.id = "probe"; done.textContent = out.join("\\n"); document.body.appendChild(done);
</script></body>'''


def test_in_a_browser_the_page_draws_and_answers(two_runs, tmp_path):
    path = tmp_path / 'p.html'
    text = page(*two_runs)
    path.write_text(text.replace('</body>', f'<pre id="marker"></pre>{PROBE}'))
    dom, console = in_browser(path, tmp_path, '--dump-dom')
    said = dict(line.split(' ', 1) for line in re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)[1].split('\n'))
    assert int(said['charts']) == text.count('<svg ') >= 10
    assert said['outside'] == '0', 'a curve leaves its chart'
    assert said['wide'] == 'false', 'the page is wider than the window'
    assert 'loss: ' in said['tip'] and 'loss (old): ' in said['tip'] and said['gone'] == 'true'
    assert said['hidden'] == 'none false'
    assert said['lines'] == '1' and said['picture'] == 'true'
    assert console == []


def test_in_a_browser_text_from_the_run_stays_text(tmp_path):
    evil = '</script><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'>'
    first = meta(note=evil)
    first['exp_name'] = evil
    folder = make_run(tmp_path / 'run', [train_row(1, 50, 0.1, **{f'loss/object/{evil.replace("/", "")}': 0.5})], first=first,
                      extra=[f'2026-11-30 09:00:00,000 - mmdet3d - ERROR - {evil}'])
    path = tmp_path / 'p.html'
    path.write_text(page(Run(str(folder))))
    dom, console = in_browser(path, tmp_path, '--dump-dom')
    assert '<title>owned' not in dom and '<title>run: running</title>' in dom and console == []


def test_in_a_browser_the_page_is_not_blank(two_runs, tmp_path):
    """A screenshot has the colours of curves, text and marks."""
    from PIL import Image
    path, shot = tmp_path / 'p.html', tmp_path / 'shot.png'
    path.write_text(page(*two_runs))
    in_browser(path, tmp_path, f'--screenshot={shot}')
    picture = Image.open(shot).convert('RGB')
    colours = {colour for _, colour in picture.getcolors(maxcolors=2**24)}
    for wanted in charts.COLOURS[:3]:
        rgb = tuple(int(wanted[i:i + 2], 16) for i in (1, 3, 5))
        assert any(sum(abs(a - b) for a, b in zip(rgb, colour)) < 12 for colour in colours), wanted
