"""The modules of the examples, which import each other as files of one folder do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "alignment"))
