"""Take the documentation's pictures of the report and of an experiment's page, from a real run.

    trak run config/config.yaml
    python docs/generate/pictures.py results

Chromium renders the pages, and must be installed. Pillow is installed with matplotlib.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parents[1] / "pictures"
WIDTH = 1100
# For each picture, its page, and the first and the last line of pixels.
PAGES = {"report": ("report.html", 0, 1020), "explore": ("answers/hard.html", 940, 2055)}
COLOURS = 128  # so that a picture has only tens of KB


def taken(page: Path, top: int, bottom: int, folder: str) -> Image.Image:
    """Return a screenshot of a page, in its full width, from pixel line ``top`` to ``bottom``."""
    picture = Path(folder, "picture.png")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={WIDTH},{bottom}", f"--user-data-dir={folder}/profile"]
    command = ["chromium", *options, f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    with Image.open(picture) as image:
        return image.convert("RGB").crop((0, top, WIDTH, bottom))


def main() -> None:
    """Write the pictures."""
    results = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, top, bottom) in PAGES.items():
            picture = taken(results / path, top, bottom, folder).quantize(COLOURS)
            picture.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
