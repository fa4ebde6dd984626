"""Write the heads of Oxford-IIIT Pets as a detection dataset of ultralytics: 3,686 images, the classes cat and dog.

    python pets.py oxford-iiit-pet/images oxford-iiit-pet/annotations/xmls heads

Every fifth image of a breed, by its name, is for validation.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

from PIL import Image

SIZE = 320
"""The longest side of an image."""
NAMES = ("cat", "dog")
YAML = """path: {folder}
train: images/train
val: images/val
names: [cat, dog]
"""


def write(images: Path, annotations: Path, out: Path) -> None:
    breeds = defaultdict(list)
    for path in sorted(annotations.glob("*.xml")):
        breeds[path.stem.rsplit("_", 1)[0]].append(path)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (out / kind / part).mkdir(parents=True, exist_ok=True)
    for paths in breeds.values():
        for number, path in enumerate(paths):
            part = "val" if number % 5 == 0 else "train"
            root = ET.parse(path).getroot()
            width, height = (int(root.findtext(f"size/{side}")) for side in ("width", "height"))
            lines = []
            for each in root.iter("object"):
                left, top, right, bottom = (
                    float(each.findtext(f"bndbox/{side}")) / (width if side[0] == "x" else height)
                    for side in ("xmin", "ymin", "xmax", "ymax")
                )
                box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
                lines.append(
                    f"{NAMES.index(each.findtext('name'))} " + " ".join(f"{value:.6f}" for value in box) + "\n"
                )
            (out / "labels" / part / f"{path.stem}.txt").write_text("".join(lines))
            shrink = SIZE / max(width, height)
            size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
            with Image.open(images / f"{path.stem}.jpg") as image:
                small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            small.save(out / "images" / part / f"{path.stem}.jpg", quality=88)
    (out / "data.yaml").write_text(YAML.format(folder=out.resolve()))


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:4]))
