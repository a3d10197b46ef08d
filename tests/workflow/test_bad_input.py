"""All bad input that has a message of its own, counted."""

from test_bad_checkpoint import CHECKPOINTS
from test_bad_config import CONFIGS, TEXTS, UNREADABLE
from test_bad_study import STUDIES, TEXTS_OF_A_STUDY
from test_bad_tables import TABLES


def test_bad_input_is_counted():
    """Every one of them has a message of its own to look for."""
    tables = [CONFIGS, TEXTS, UNREADABLE, TABLES, STUDIES, TEXTS_OF_A_STUDY, CHECKPOINTS]
    names = [name for table in tables for name in table]
    assert len(set(names)) == len(names) >= 120
    assert all(expected for table in tables for _, expected, *_ in table.values())
