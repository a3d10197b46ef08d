import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
# The default study is imported by name where a test needs its functions.
sys.path.insert(0, str(REPOSITORY / "config"))


@pytest.fixture(autouse=True)
def fixed_randomness():
    torch.manual_seed(0)
    torch.set_num_threads(1)
