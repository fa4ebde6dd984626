"""Damage the files that Secateur reads, at random, and read them: it must do so, or say which file is wrong.

python tests/fuzz/readers.py --count 20000 --seed 0

Bytes are flipped, cut, repeated and overwritten; JSON gets other values; files become folders, pipes, links and
files of a terabyte. Anything but a result or a SecateurError that names a file is a finding, and so are
a read that takes more than a gigabyte or ten seconds, and a new file.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS / "shim"), str(TESTS / "support")]

import miniature  # noqa: E402
import miniature_images  # noqa: E402
import one_result  # noqa: E402
import torch  # noqa: E402
from scipy.io import savemat  # noqa: E402

import secateur  # noqa: E402
from secateur.data.camvid import camvid  # noqa: E402
from secateur.data.cifar import cifar10, cifar100  # noqa: E402
from secateur.data.cub import cub200  # noqa: E402
from secateur.data.folders import class_folders, imagenet, tiny_imagenet  # noqa: E402
from secateur.data.idx import fashion_mnist  # noqa: E402
from secateur.data.matlab import read_mat  # noqa: E402
from secateur.data.pets import pets, pets_segmentation  # noqa: E402
from secateur.data.photos import Photos  # noqa: E402
from secateur.data.voc import VOC2011_SBD, voc2011_sbd  # noqa: E402
from secateur.errors import DamagedCheckpoint, SecateurError  # noqa: E402
from secateur.files import read_json  # noqa: E402
from secateur.models.weights import load_weights_  # noqa: E402
from secateur.recipes.jobs import Order  # noqa: E402
from secateur.recipes.split import check_split, keep_split  # noqa: E402
from secateur.recipes.timing import read_table  # noqa: E402
from secateur.recipes.work import read_run  # noqa: E402
from secateur.results.load import about, load  # noqa: E402
from secateur.results.report import write_report  # noqa: E402
from secateur.results.structure import read_structure  # noqa: E402
from secateur.training.checkpoint import RunFolder  # noqa: E402

MEMORY, SECONDS = 2**30, 10
"""What reading may take, beyond what the process has."""
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**70,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "x",
    "../../x",
]
ODD += ["/etc/passwd", "\0", "\ud800", "a" * 5000, [], {}, [[]], {"": None}, [None] * 3, {"format": 1}]


def make_result(folder: Path) -> None:
    """A finished run of a small network, with its result."""
    model = one_result.build()
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3)]
    settings = secateur.TickTock.of(keep_macs=0.5, tick_removes=0.3, tock_every=1, tock_epochs=1, finetune_epochs=1)
    task = secateur.classification(data, data)
    result = secateur.prune(model, data[0][0][:1], task, settings=settings, folder=folder)
    secateur.save(result, folder / "result", classes=["a", "b", "c"])


def make_config(folder: Path) -> None:
    """The config.json of a run that a command has begun."""
    make_result(folder)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "order": Order(recipe="resnet20@cifar10").to_dict()}))
    for path in [path for path in folder.iterdir() if path.name != "config.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_named(folder: Path) -> None:
    """A result of a network that is built by its name."""
    model = secateur.models.resnet_cifar.resnet20(num_classes=4, width=0.25)  # pyright: ignore
    data = [(torch.randn(2, 3, 32, 32), torch.arange(2))]
    settings = secateur.TickTock.one_shot(keep_macs=0.7, finetune_epochs=0)
    result = secateur.prune(model, data[0][0][:1], secateur.classification(data, data), settings=settings)
    secateur.save(result, folder, network={"name": "resnet20", "options": {"num_classes": 4, "width": 0.25}})


def make_weights(folder: Path) -> None:
    secateur.export(one_result.build(), folder / "weights.safetensors")
    secateur.export(one_result.build(), folder / "weights.pth")


def make_tables(folder: Path) -> None:
    """The files that recipes write into the folder of a run."""
    make_split(folder, keep_split)
    table = secateur.measure_latency(one_result.build(), torch.randn(1, 1, 8, 8), repetitions=1)
    (folder / "latency.json").write_text(json.dumps(table.to_dict()))


def make_split(folder: Path, do: Callable[..., object]) -> None:
    files = {"train": [folder / "a" / "1.jpg", folder / "b" / "2.jpg"], "test": [folder / "a" / "3.jpg"]}
    do(SimpleNamespace(files=files), SimpleNamespace(data=str(folder)), folder)


def make_matlab(folder: Path) -> None:
    for name, compressed in (("plain", False), ("packed", True)):
        values = {"GTcls": {"Segmentation": torch.arange(60).reshape(6, 10).numpy(), "Boundaries": "text"}}
        savemat(folder / f"{name}.mat", values, do_compression=compressed)


def read_matlab(folder: Path) -> None:
    for name in ("plain", "packed"):
        with VOC2011_SBD.reading(folder / f"{name}.mat"):
            read_mat(folder / f"{name}.mat", "GTcls")


def read_result(folder: Path) -> None:
    about(folder)
    load(folder, one_result.build)


def read_weights(folder: Path) -> None:
    for ending in ("safetensors", "pth"):
        load_weights_(one_result.build(), folder / f"weights.{ending}")


def resume(folder: Path) -> None:
    """What resuming a run reads before it builds anything."""
    with RunFolder(folder) as run:
        run.read_config()
        run.load()
        run.read_events()


def read_report(folder: Path) -> None:
    read_structure(folder)
    write_report([folder], folder / "report.html")
    (folder / "report.html").unlink()


def read_tables(folder: Path) -> None:
    make_split(folder, check_split)
    read_table(folder / "latency.json")


def all_of(read: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Reads a dataset and every image of it."""

    def do(folder: Path) -> None:
        for data in read(folder):
            for _ in replace(data, workers=0) if isinstance(data, Photos) else data:
                pass

    return do


Reader = tuple[Callable[[Path], object], Callable[[Path], object]]
READERS: dict[str, Reader] = {
    "result": (make_result, read_result),
    "named network": (make_named, load),
    "weights": (make_weights, read_weights),
    "run": (make_result, resume),
    "config": (make_config, read_run),
    "report": (make_result, read_report),
    "tables": (make_tables, read_tables),
    "cifar10": (lambda folder: miniature.write_cifar10(folder, num_per_file=4), cifar10),
    "cifar100": (lambda folder: miniature.write_cifar100(folder), cifar100),
    "fashion mnist": (lambda folder: miniature.write_fashion_mnist(folder), fashion_mnist),
    "matlab": (make_matlab, read_matlab),
    "photographs": (lambda folder: miniature_images.write_class_folders(folder, per_class=1), all_of(class_folders)),
    "imagenet": (lambda folder: miniature_images.write_imagenet(folder, devkit=True), all_of(imagenet)),
    "tiny imagenet": (miniature_images.write_tiny_imagenet, all_of(tiny_imagenet)),
    "cub200": (miniature_images.write_cub200, all_of(cub200)),
    "pets": (lambda folder: miniature_images.write_pets(folder, 1, 2), all_of(pets)),
    "trimaps": (
        lambda folder: miniature_images.write_pets(folder, 1, 2),
        all_of(lambda f: pets_segmentation(f, size=8)),
    ),
    "camvid": (lambda folder: miniature_images.write_camvid(folder, 2), all_of(camvid)),
    "voc": (lambda folder: miniature_images.write_voc2011_sbd(folder, 2), all_of(voc2011_sbd)),
}
"""What writes a small folder, and what reads it."""


def damage_bytes(data: bytes, dice: random.Random) -> bytes:
    """A few changes, as a bad disk, a bad transfer or a bad person makes them."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        # What is at the beginning decides how the rest is read.
        place = min(int(len(changed) * dice.random() ** dice.choice([1, 4])), max(0, len(changed) - 1))
        match dice.randrange(7):
            case 0 if changed:
                changed[place] ^= 1 << dice.randrange(8)
            case 1:
                del changed[place:]
            case 2:
                changed[place : place + dice.choice([1, 2, 4, 8])] = dice.randbytes(dice.choice([1, 2, 4, 8]))
            case 3:
                changed[place : place + 8] = dice.choice(
                    [b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 3 + b"\x7f"]
                )
            case 4:
                changed[place:place] = changed[: dice.randrange(1, 64)]
            case 5:
                del changed[place : place + dice.randrange(1, 64)]
            case _:
                changed += dice.randbytes(dice.randrange(1, 64))
    return bytes(changed)


def damage_json(data: Any, dice: random.Random) -> Any:
    """Another value at a random place."""
    nodes, key = [({"": data}, "")], None
    for holder, key in nodes:
        inside: Any = holder[key]  # pyright: ignore
        nodes += [
            (inside, k)
            for k in (inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ())
        ]
    root = nodes[0][0]
    holder, key = nodes[int(len(nodes) * dice.random() ** dice.choice([1, 3]))]
    match dice.randrange(4):
        case 0 if isinstance(holder, dict) and key:
            holder[dice.choice(["x", "../x", "", key * 2])] = holder.pop(key)
        case 1 if isinstance(holder, list) and holder:
            holder.append(holder[0])  # pyright: ignore
        case 2:
            del holder[key]  # pyright: ignore
        case _:
            holder[key] = dice.choice(ODD)  # pyright: ignore
    return root.get("")


def damage(path: Path, dice: random.Random) -> str:
    """Damage a file; what was done."""
    what = dice.choice(["bytes"] * 6 + (["json"] * 10 if path.suffix in (".json", ".jsonl") else []) + ["kind"])
    if what == "bytes":
        path.write_bytes(damage_bytes(path.read_bytes(), dice))
    elif what == "json":
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = dice.randrange(len(lines))
        lines[number] = json.dumps(damage_json(json.loads(lines[number]), dice))
        path.write_text("".join(f"{line}\n" for line in lines))
    else:
        path.unlink()
        what = dice.choice(["missing", "folder", "pipe", "device", "loop", "passwd", "terabyte", "empty"])
        match what:
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "device" | "loop" | "passwd":
                path.symlink_to({"device": "/dev/zero", "loop": path, "passwd": "/etc/passwd"}[what])
            case "terabyte" | "empty":
                path.touch()
                os.truncate(path, 2**40 if what == "terabyte" else 0)
    return f"{path.name}: {what}"


class TooSlow(BaseException):
    """No reader takes it for a file that cannot be read."""


def stop(number: int, frame: Any) -> None:
    raise TooSlow(f"more than {SECONDS} seconds")


def complaint(folder: Path, names: set[str], error: BaseException | None) -> str | None:
    """What is wrong with how a read has ended."""
    if error is None:
        return None
    if not isinstance(error, SecateurError):
        return f"{type(error).__name__}: {error}"
    if str(folder) not in str(error) and not any(name in str(error) for name in names):
        return f"no file is named: {error}"
    return f"more than a line: {error}" if "\n" in f"{error.what}{error.got}" else None


def execute(reader: str, count: int, seed: int, place: Path) -> tuple[Counter[str], list[str]]:
    """Damage and read so often, in this process; how often it was read or refused, and the findings."""
    make, read = READERS[reader]
    torch.manual_seed(0)
    whole, folder = place / "whole", place / "data"
    whole.mkdir()
    make(whole)
    shutil.copytree(whole, folder)
    read(folder)
    shutil.rmtree(folder)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.stat().st_size)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.signal(signal.SIGALRM, stop)
    found, findings = Counter[str](), list[str]()
    for number in range(count):
        dice = random.Random(f"{reader} {seed} {number}")
        shutil.copytree(whole, folder)
        done, there, error = damage(folder / dice.choice(files), dice), set(folder.rglob("*")), None
        print(f"number {number}, {done}", file=sys.stderr)  # the last line, if the process dies
        try:
            signal.alarm(SECONDS)
            read(folder)
        except (Exception, TooSlow) as caught:
            error = caught
        finally:
            signal.alarm(0)
        found["refused" if error is not None else "read"] += 1
        if said := complaint(folder, {path.name for path in files}, error):
            findings.append(f"number {number}, {done}: {said}")
        made = {path for path in set(folder.rglob("*")) - there if ".damaged" not in str(path) and path.name != ".lock"}
        if made and error is not None:
            findings.append(f"number {number}, {done}: {sorted(made)} was not there before")
        shutil.rmtree(folder)
    resource.setrlimit(resource.RLIMIT_AS, before)
    return found, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="executions, of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="this one alone, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.reader:
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", category=DamagedCheckpoint)
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(execute(options.reader, options.count, options.seed, Path(place))))
        return
    total, findings = Counter[str](), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS / "shim")}
    for reader in READERS:
        command = [sys.executable, __file__, "--reader", reader, "--seed", str(options.seed)]
        command += ["--count", str(-(-options.count // len(READERS)))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            findings += 1
            print(f"{reader}: ended with {done.returncode}: {done.stderr[-500:]}", flush=True)
            continue
        found, said = json.loads(done.stdout)
        total += Counter(found)
        findings += len(said)
        print("\n  ".join([f"{reader}: {found}", *said]), flush=True)
    print(f"{total.total():,} executions of {len(READERS)} readers: {dict(total)}, findings: {findings}")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
