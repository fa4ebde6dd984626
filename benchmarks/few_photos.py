"""The photographs of `secateur reproduce unlabelled`, from five of ImageNet's validation images for each class.

    git clone https://github.com/ndb796/Small-ImageNet-Validation-Dataset-1000-Classes
    python benchmarks/few_photos.py --photos Small-ImageNet-Validation-Dataset-1000-Classes/ILSVRC2012_img_val_subset \\
        --out PHOTOS

In the order of their names, the first photograph of each class is there to prune with, the second to choose settings,
and the others to test: PHOTOS/test holds `train` and `val` with the first and the last three, PHOTOS/choose with the
first and the second. They are resized to 256 pixels, cut to a square and stored as JPEG. Classes are called 000 to 999.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchvision.transforms import v2

from secateur.data.decode import read_image
from secateur.data.folders import CLASS_FOLDERS

SIDE = 256
PARTS = {0: ("test/train", "choose/train"), 1: ("choose/val",), 2: ("test/val",), 3: ("test/val",), 4: ("test/val",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folders 0 to 999, of five photographs each")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--quality", type=int, default=95, help="of the JPEGs")
    options = parser.parse_args()
    square = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE)])
    for name in sorted(CLASS_FOLDERS.subfolders(options.photos), key=int):
        for place, path in enumerate(CLASS_FOLDERS.images_in(options.photos / name)):
            first, *others = [options.out / part / f"{int(name):03d}" / f"{place}.jpg" for part in PARTS[place]]
            for file in (first, *others):
                file.parent.mkdir(parents=True, exist_ok=True)
            square(read_image(path, CLASS_FOLDERS)).save(first, quality=options.quality)
            for file in others:
                file.unlink(missing_ok=True)
                os.link(first, file)
        if (int(name) + 1) % 100 == 0:
            print(f"{int(name) + 1} classes", flush=True)


if __name__ == "__main__":
    main()
