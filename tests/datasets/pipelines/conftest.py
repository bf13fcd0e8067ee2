"""Makes ``pipeline_helpers`` importable from the test files of this folder."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
