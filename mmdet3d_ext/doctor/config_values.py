"""What the doctor needs of a configuration, read in a process of its own: it works although torch or mmcv cannot be imported."""
from __future__ import annotations

from typing import Any, Dict, List, Tuple

from .probe import ask
from .report import OK, PROBLEM, Finding

_READ = '''
import warnings
warnings.filterwarnings("ignore")
# The registries complete the list of known keys where they can be imported; the YAML dialect itself needs PyYAML only.
try:
    import mmdet3d_ext
except BaseException:
    for name in [name for name in sys.modules if name.split(".")[0] == "mmdet3d_ext"]:
        del sys.modules[name]
    from _light import use_package
    use_package("mmdet3d_ext")
    sys.modules["mmdet3d_ext.registry"] = None
from mmdet3d_ext.config import ConfigError, load_config
try:
    cfg = load_config(sys.argv[1], sys.argv[2:])
except ConfigError as error:
    say(error=str(error))
    sys.exit(0)

def find(node, key, found):
    if isinstance(node, dict):
        if isinstance(node.get(key), str) and node[key] not in found:
            found.append(node[key])
        for value in node.values():
            find(value, key, found)
    elif isinstance(node, list):
        for value in node:
            find(value, key, found)
    return found

plain = cfg.to_dict()
data = plain.get("data") or {}
modality = plain.get("input_modality") or {}
bound = plain.get("map_bound")
settings = {
    "data_roots": find(data, "dataset_root", []), "info_files": find(data, "ann_file", []),
    "workers": data.get("workers_per_gpu"), "samples": data.get("samples_per_gpu"), "image_size": plain.get("image_size"),
    "cameras": (6 if modality.get("use_camera", True) else 0), "run_dir": plain.get("run_dir") or plain.get("work_dir"),
    "map_labels": plain.get("map_labels"), "map_classes": len(plain.get("map_classes") or []),
    "prefetch": data.get("prefetch_factor"),
}
try:
    settings["map_cells"] = round((bound[0][1] - bound[0][0]) / bound[0][2]) * round((bound[1][1] - bound[1][0]) / bound[1][2])
except Exception:
    pass
say(settings={key: value for key, value in settings.items() if value is not None})
'''


def read(path: str, overrides: List[str]) -> Tuple[Dict[str, Any], Finding]:
    """The settings that checks use (see the source), and whether the configuration can be read."""
    answer = ask(_READ, arguments=[path, *overrides])
    said = answer.merged()
    if 'settings' in said:
        return said['settings'], Finding('configuration', OK, f'{path} is complete', data=said['settings'])
    reason = said.get('error') or answer.last_line()
    return {}, Finding('configuration', PROBLEM, reason, 'correct the file or the override that it names')
