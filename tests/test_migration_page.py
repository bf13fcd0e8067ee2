"""docs/migrating.md: the table of the reference's faults is whole, and each row's proof exists."""
import ast
import re

import pytest
from testing import REPO, shared_dir

PAGE = (REPO / 'docs/migrating.md').read_text(encoding='utf-8')
FAULTS = 43


def rows():
    """number -> (in the reference, here, profile, tests) of the fault table."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip('|').split(' | ')]
        if line.startswith('|') and cells[0].strip('| ').isdigit():
            assert len(cells) == 5, line
            found[int(cells[0].strip('| '))] = (*cells[1:4], re.findall(r'`([^`]+)`', cells[4]))
    return found


def source(name):
    """The source of ``tests/<file>.py::<function>``, or None."""
    file, _, function = name.partition('::')
    if not (REPO / file).is_file():
        return None
    text = (REPO / file).read_text(encoding='utf-8')
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return '\n'.join(text.splitlines()[first - 1:node.end_lineno])
    return None


def test_every_fault_has_a_row():
    assert list(rows()) == list(range(1, FAULTS + 1))


def test_the_count_is_that_of_the_list():
    listed = re.findall(r'^(\d+)\. \[', shared_dir('parity', 'reference_faults.md').read_text(encoding='utf-8'), flags=re.M)
    assert [int(number) for number in listed] == list(range(1, FAULTS + 1))


@pytest.mark.parametrize('number', range(1, FAULTS + 1))
def test_a_row_names_tests_that_exist_and_cover_the_profile(number):
    _, _, profile, tests = rows()[number]
    assert tests and profile.split(',')[0] in ('yes', 'no', 'the same')
    sources = [source(name) for name in tests]
    assert None not in sources, f'row {number}: {tests}'
    if profile.startswith('yes'):
        assert any("'reference'" in text for text in sources), f'row {number}: no test of the old behaviour among {tests}'


def test_links_and_files_of_the_page_exist():
    for target in re.findall(r'\]\(([^)#]+)(?:#[^)]*)?\)', PAGE):
        assert (REPO / 'docs' / target).exists(), target
    for anchor in re.findall(r'\]\(#([^)]+)\)', PAGE):
        titles = [re.sub(r"[^\w\- ]", '', title.lower()).replace(' ', '-') for title in re.findall(r'^#+ (.*)$', PAGE, flags=re.M)]
        assert anchor in titles, anchor
    for path in re.findall(r'`((?:configs|tools)/[\w/+.\-]+\.(?:yaml|py))', PAGE):
        assert (REPO / path).exists() or 'bevfusion_lidar' in path, path
    assert not re.search(r'(?<![\w.])/(work|tmp)/|(?<!\.)\.\./', PAGE)


def test_keys_that_the_page_says_are_answered_are():
    """The loader's and the registries' replacements that stand in the page's tables."""
    from mmdet3d_ext import registry
    from mmdet3d_ext.config import schema
    for key in ('optim_wrapper', 'param_scheduler', 'train_dataloader', 'default_hooks', 'train_cfg'):
        assert key in schema.REPLACED and f'`{key}' in PAGE
    for name in ('pts_middle_encoder', 'img_backbone', 'view_transform', 'fusion_layer', 'pts_backbone', 'bbox_head', 'seg_head'):
        assert ('BEVFusion', name) in registry.REPLACED_ARGUMENTS and name in PAGE
    for kind in ('BEVFusionSparseEncoder', 'BEVLoadMultiViewImageFromFiles', 'Pack3DDetInputs'):
        assert kind in registry.REPLACED and kind in PAGE
