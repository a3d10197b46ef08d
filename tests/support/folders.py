"""Write the files of a folder that `trak init` looks at."""

from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHTS = {"config.json": "model.safetensors", "adapter_config.json": "adapter_model.safetensors"}


def write(files):
    """Write texts into files by name; tensors, or nothing where weights must be, as weights."""
    for name, contents in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        of_weights = path.suffix in {".pt", ".pth", ".safetensors"} or not isinstance(contents, str)
        if of_weights:
            save = save_file if path.suffix == ".safetensors" else torch.save
            save(contents or {"weight": torch.zeros(2, 2)}, path)
        else:
            path.write_text(contents)
        if path.name in WEIGHTS and not path.parent.name.startswith("checkpoint-"):
            write({str(path.with_name(WEIGHTS[path.name])): ""})
