"""Former import paths still work, and name the new ones."""

import subprocess
import sys
from importlib import import_module

import pytest

# (old module, name, present module)
MOVED = (
    ("adiv_monitor.audit.finding", "Finding", "adiv_monitor.diagnosis.finding"),
    ("adiv_monitor.audit.record", "Record", "adiv_monitor.diagnosis.record"),
    ("adiv_monitor.audit.diagnosis", "diagnose", "adiv_monitor.diagnosis"),
    ("adiv_monitor.audit.diagnosis.diagnose", "diagnose", "adiv_monitor.diagnosis.diagnose"),
    ("adiv_monitor.audit.page", "digest", "adiv_monitor.pages"),
)


@pytest.mark.parametrize(("old", "name", "new"), MOVED)
def test_what_has_moved_is_found_with_a_warning(old: str, name: str, new: str) -> None:
    module = import_module(old)
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} has moved: .* {new}$") as warned:
        found = getattr(module, name)
    assert warned[0].filename == __file__
    assert found is getattr(import_module(new), name)
    with pytest.raises(AttributeError, match=f"{old}.*no_such_name"):
        _ = module.no_such_name


def test_in_a_new_process_both_old_paths_of_diagnose_give_the_function() -> None:
    """The package itself imports from the new places: nothing warns before the old ones are."""
    program = (
        "import warnings\n"
        "warnings.filterwarnings('error', category=DeprecationWarning, module='adiv_monitor')\n"
        "import adiv_monitor, adiv_monitor.audit.command.cli, adiv_monitor.sinks\n"
        "import adiv_monitor.pages\n"
        "warnings.simplefilter('ignore')\n"
        "from adiv_monitor.audit.diagnosis.diagnose import diagnose as one\n"
        "from adiv_monitor.audit.diagnosis import diagnose as other\n"
        "assert one is other and callable(one)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
