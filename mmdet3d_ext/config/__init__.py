"""YAML configuration in torchpack's dialect, evaluated safely. See :func:`load_config`."""
from .config import Config, ConfigNode, expect, inheritance, load_config, require
from .errors import ConfigError
from .schema import declare

__all__ = ['Config', 'ConfigError', 'ConfigNode', 'declare', 'expect', 'inheritance', 'load_config', 'require']
