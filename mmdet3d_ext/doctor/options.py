"""What the doctor is asked to look at."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

DEFAULTS = {'workers': 4, 'samples': 4, 'cameras': 6, 'image_size': (256, 704), 'map_cells': 200 * 200, 'map_classes': 6}


@dataclass
class Options:
    """See ``tools/doctor.py --help``. ``settings``: what the configuration says, from :mod:`.config_values`."""

    config: Optional[str] = None
    overrides: List[str] = field(default_factory=list)
    data_root: Optional[str] = None
    version: Optional[str] = None
    info_files: List[str] = field(default_factory=list)
    run_dir: Optional[str] = None
    processes: int = 0
    shm: str = '/dev/shm'
    fix: bool = False
    timeout: float = 120.0
    settings: Dict[str, Any] = field(default_factory=dict)
