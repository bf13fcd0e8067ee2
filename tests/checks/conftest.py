"""The reference's tree lies with the tests of the configuration package."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'config'))
