"""The examples' modules, which import each other as files of one folder do."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "paper"), str(EXAMPLES / "cases")]
