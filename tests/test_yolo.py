"""Detectors: a small one of our own, and those of ultralytics through examples/yolo, where it is installed.

ultralytics changes torch and the process that imports it, so that everything with it runs in processes of its own.
"""

import copy
import importlib.util
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from detector import BINS, Detector, Split
from PIL import Image, ImageDraw

import secateur

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "yolo"
SIZE = 64


def test_a_detector_is_cut_exactly_and_its_head_stays() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    images = torch.randn(2, 3, 32, 32)
    graph = secateur.analyze(model, images)
    assert model.head.places is None, "the analysis ran on a copy"
    groups = {group.name: group for group in graph.groups}
    assert set(groups["fine.first.0"].layers) == {"fine.first.0", "fine.inner.1.0"}
    assert groups["fine.first.0"].size == 16, "the halves are coupled: a split is in the middle"
    stays = {frozen.name: str(frozen.reason) for frozen in graph.frozen}
    assert set(stays) == {"head.expectation", *(f"head.{part}.{n}.1" for part in ("boxes", "scores") for n in (0, 1))}
    assert "reaches the model's output" in stays["head.boxes.0.1"]

    plan = secateur.Plan.random(graph, 0.5, seed=1)
    assert secateur.verify(model, plan, images).agrees
    cut = secateur.shrink(model, plan)
    assert isinstance(cut, Detector)
    assert cut.head.boxes[0][1].out_channels == 4 * BINS  # pyright: ignore
    with torch.no_grad():
        again = pickle.loads(pickle.dumps(cut))
        assert torch.equal(again(images), cut(images))
        assert again(torch.randn(1, 3, 64, 64)).shape == (1, 6, 32 * 32 + 16 * 16), "the places are computed anew"


def test_a_detector_is_pruned_while_it_trains() -> None:
    torch.manual_seed(0)
    model = Detector().train()
    images = torch.randn(4, 3, 32, 32)
    pruner = secateur.Pruner(model, images[:1], limits=secateur.Limits(multiple_of=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = sum(part.square().mean() for part in model(images).values())
        loss.backward()
        pruner.observe()
        optimizer.step()
        optimizer.zero_grad()
        pruner.prune(budget=secateur.Budget(macs=0.6), step=0.25, optimizer=optimizer)
    model.eval()
    copied = secateur.merge_gates_(copy.deepcopy(model))
    with torch.no_grad():
        before = model(images)
        after = pruner.finish()(images)
        torch.testing.assert_close(after, before)
        torch.testing.assert_close(copied(images), before)
    assert 0.5 < pruner.cost.macs / pruner.graph.macs <= 0.6
    for module in model.modules():
        if isinstance(module, Split):
            assert module.first[0].out_channels % 2 == 0


def test_secateur_itself_does_without_ultralytics() -> None:
    assert not [path for path in (ROOT / "src").rglob("*.py") if "ultralytics" in path.read_text()]


XML = """<annotation><size><width>600</width><height>400</height></size>
<object><name>dog</name><bndbox><xmin>300</xmin><ymin>100</ymin><xmax>420</xmax><ymax>300</ymax></bndbox></object>
</annotation>"""


def test_heads_of_pets_become_a_dataset(tmp_path: Path) -> None:
    for folder in ("images", "xmls"):
        (tmp_path / folder).mkdir()
    for number in range(6):
        Image.new("RGB", (512, 512)).save(
            tmp_path / "images" / f"great_pug_{number}.jpg"
        )  # the annotation has the size
        (tmp_path / "xmls" / f"great_pug_{number}.xml").write_text(XML)
    out = tmp_path / "heads"
    runpy.run_path(str(EXAMPLE / "pets.py"))["write"](tmp_path / "images", tmp_path / "xmls", out)
    assert sorted(path.name for path in (out / "images/val").iterdir()) == ["great_pug_0.jpg", "great_pug_5.jpg"]
    assert len(list((out / "labels/train").iterdir())) == 4
    assert (out / "labels/val/great_pug_0.txt").read_text() == "1 0.600000 0.500000 0.200000 0.500000\n"
    with Image.open(out / "images/train/great_pug_1.jpg") as image:
        assert image.size == (320, 213), "the shape that the annotation says"
    assert f"path: {out}" in (out / "data.yaml").read_text()


needs_ultralytics = pytest.mark.skipif(
    importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed"
)


class Folder:
    """Images with one light or dark rectangle each, and processes that work on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        generator = torch.Generator().manual_seed(0)
        for part, count in (("train", 64), ("val", 8)):
            for kind in ("images", "labels"):
                (path / kind / part).mkdir(parents=True)
            for number in range(count):
                x, y, width, height = (torch.rand(4, generator=generator) * 24 + 12).int().tolist()
                image = Image.effect_noise((SIZE, SIZE), 30).convert("RGB")
                box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                ImageDraw.Draw(image).rectangle(box, fill="white" if number % 2 else "black")
                image.save(path / "images" / part / f"{number}.jpg")
                label = " ".join(str(value / SIZE) for value in (x, y, width, height))
                (path / "labels" / part / f"{number}.txt").write_text(f"{number % 2} {label}\n")
        self.data = path / "data.yaml"
        self.data.write_text(f"path: {path}\ntrain: images/train\nval: images/val\nnames: [dark, light]\n")

    def python(self, *arguments: str | Path, fails: bool = False, path: tuple[Path, ...] = ()) -> str:
        """What a new process prints."""
        source = Path(secateur.__file__).parents[1]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},  # they look
            "YOLO_CONFIG_DIR": str(self.path / "config"), "YOLO_OFFLINE": "true", "OMP_NUM_THREADS": "1",
            "YOLO_AUTOINSTALL": "false", "PYTHONPATH": os.pathsep.join(map(str, (source, ROOT / "tests/shim", *path))),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=self.path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def whole(self, name: str) -> Path:
        """A network that was trained for an epoch."""
        self.python("-c", TRAIN, name, self.data, SIZE)
        return self.path / f"runs/detect/{name}/weights/best.pt"


TRAIN = """
import sys
from ultralytics import YOLO
name, data, size = sys.argv[1:]
YOLO(f"{name}.yaml").train(data=data, epochs=1, imgsz=int(size), batch=16, plots=False, name=name)
"""

RELOAD = """
import sys
sys.modules["secateur"] = None  # it is not needed
import numpy, onnxruntime, torch
from ultralytics import YOLO
whole, pruned, data, size = sys.argv[1:]
count = lambda path: sum(p.numel() for p in YOLO(path).model.parameters())
assert count(pruned) < 0.8 * count(whole)
model = YOLO(pruned)
assert type(model.model).__module__ == "ultralytics.nn.tasks" and model.names == {0: "dark", 1: "light"}
kinds = {type(m).__name__ for m in model.model.modules()}
assert not [kind for kind in kinds if kind.startswith("Gated")]
print("val", model.val(data=data, imgsz=int(size), plots=False).box.map)
print("predict", len(model.predict("images/val", imgsz=int(size), verbose=False)))
image = torch.rand(1, 3, int(size), int(size))
wanted = model.model.float().eval()(image)[0]
file = pruned.replace(".pt", ".onnx")
given = onnxruntime.InferenceSession(file).run(None, {"images": image.numpy()})[0]
print("differs", float(numpy.abs(given - wanted.detach().numpy()).max()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("yolo"))


@pytest.fixture(scope="module")
def whole(folder: Folder) -> Path:
    return folder.whole("yolov8n")


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolo12n", "yolo26n"])
def test_the_whole_job(folder: Folder, name: str) -> None:
    before = folder.whole(name)
    options = ("--epochs", "3", "--prune-epochs", "2", "--imgsz", SIZE, "--batch", "16", "--name", f"pruned-{name}")
    said = folder.python(EXAMPLE / "prune.py", before, folder.data, *map(str, options))
    *_, share = re.findall(r"([\d.]+)% of the MACs", said)
    assert 50 < float(share) <= 60
    after = folder.path / f"runs/detect/pruned-{name}/weights/best.pt"
    found = folder.python("-c", RELOAD, before, after, folder.data, str(SIZE))
    assert "predict 8" in found
    (differs,) = re.findall(r"differs ([\d.e-]+)", found)
    assert float(differs) < 1e-2, "in pixels"


STOP = """
import sys
from functools import partial
from pruning import PruningTrainer
from ultralytics import YOLO

def stop(trainer):
    if trainer.epoch == 2:
        raise KeyboardInterrupt

model = YOLO(sys.argv[1])
model.add_callback("on_model_save", stop)
trainer = partial(PruningTrainer, keep_macs=0.6, prune_epochs=2)
model.train(trainer=trainer, data=sys.argv[2], epochs=5, imgsz=64, batch=16, plots=False, name="stopped")
"""

WIDTHS = """
import sys, torch
from ultralytics import YOLO
print("widths", [tuple(p.shape) for p in YOLO(sys.argv[1]).model.parameters()])
"""


@needs_ultralytics
@pytest.mark.slow
def test_a_stopped_run_continues(folder: Folder, whole: Path) -> None:
    folder.python("-c", STOP, whole, folder.data, fails=True, path=(EXAMPLE,))
    run = folder.path / "runs/detect/stopped"
    last = run / "weights/last.pt"
    before = folder.python("-c", WIDTHS, last)
    said = folder.python(EXAMPLE / "prune.py", last, folder.data, "--resume", "--imgsz", str(SIZE))
    assert "from epoch 4 to 5 total epochs" in said
    assert folder.python("-c", WIDTHS, last) == before
    assert before != folder.python("-c", WIDTHS, whole)
    epochs = [line.split(",")[0] for line in (run / "results.csv").read_text().splitlines()[1:]]
    assert epochs == ["1", "2", "3", "4", "5"]


EXACT = """
import copy, sys
import torch
from pruning import PruningTrainer
import secateur
from ultralytics import YOLO
from ultralytics.nn.tasks import load_checkpoint

seen = []

class Watched(PruningTrainer):
    def finish(self):
        pruner, model = self.pruner, self.model
        image = torch.rand(2, 3, 64, 64)
        gated = copy.deepcopy(model).eval()(image)[0]
        super().finish()
        plain = copy.deepcopy(model).eval()(image)[0]
        torch.testing.assert_close(plain, gated, rtol=1e-3, atol=1e-3)
        original = load_checkpoint(sys.argv[1])[0]
        print("exact", secateur.verify(original, pruner.plan, image).agrees)
        here = {id(p) for p in model.parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        assert here == {id(p) for p in held} and len(held) == len(here)
        for p in held:
            for value in self.optimizer.state.get(p, {}).values():
                assert value.numel() == 1 or value.shape == p.shape
        seen.append(self.epoch)

    def save_model(self):
        assert bool(seen) or not self.last.exists()
        if seen:
            shapes = [tuple(p.shape) for p in self.model.parameters()]
            assert shapes == [tuple(p.shape) for p in self.ema.ema.parameters()]
        return super().save_model()

    def optimizer_step(self):
        before = self.ema.updates
        super().optimizer_step()
        assert (self.ema.updates > before) == bool(seen)

YOLO(sys.argv[1]).train(
    trainer=Watched, data=sys.argv[2], epochs=7, imgsz=64, batch=16, plots=False, name="exact", nbs=8,
    optimizer=sys.argv[3],
)
print("finished in epoch", seen)
"""


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "MuSGD"])
def test_the_gates_leave_nothing_behind(folder: Folder, whole: Path, optimizer: str) -> None:
    said = folder.python("-c", EXACT, whole, folder.data, optimizer, path=(EXAMPLE,))
    assert "exact True" in said
    assert "finished in epoch [4]" in said


FURTHER = """
import sys
import pruning
from ultralytics import YOLO
model = YOLO(sys.argv[1])
shapes = [tuple(p.shape) for p in model.model.parameters()]
model.train(trainer=pruning.FineTuner, data=sys.argv[2], epochs=1, imgsz=64, batch=16, plots=False, name="further")
assert [tuple(p.shape) for p in model.model.parameters()] == shapes
model = YOLO(sys.argv[1])
model.train(data=sys.argv[2], epochs=1, imgsz=64, batch=16, plots=False, name="theirs")
print("theirs", [tuple(p.shape) for p in model.model.parameters()] == shapes)
"""


@needs_ultralytics
@pytest.mark.slow
def test_what_is_left_can_be_trained_further(folder: Folder, whole: Path) -> None:
    options = ("--epochs", "2", "--prune-epochs", "1", "--imgsz", str(SIZE), "--batch", "16", "--name", "small")
    folder.python(EXAMPLE / "prune.py", whole, folder.data, *options)
    said = folder.python("-c", FURTHER, folder.path / "runs/detect/small/weights/best.pt", folder.data, path=(EXAMPLE,))
    assert "theirs False" in said, "their trainer keeps the widths: the page says that it does not"


@needs_ultralytics
@pytest.mark.slow
def test_mistakes_are_named(folder: Folder, whole: Path) -> None:
    options = ("--epochs", "2", "--imgsz", str(SIZE))
    said = folder.python(EXAMPLE / "prune.py", whole, folder.data, *options, fails=True)
    assert "prune_epochs is 5: wanted at least 1 and less than epochs, 2" in said
    few = folder.path / "few.yaml"
    few.write_text(folder.data.read_text().replace("images/train", "images/val"))
    said = folder.python(EXAMPLE / "prune.py", whole, few, "--batch", "4", "--imgsz", str(SIZE), fails=True)
    assert "the optimizer steps after 16 batches, and an epoch has 2: pass a smaller nbs, such as nbs=4" in said
    three = folder.path / "three.yaml"
    three.write_text(folder.data.read_text().replace("light]", "light, grey]"))
    said = folder.python(EXAMPLE / "prune.py", whole, three, "--imgsz", str(SIZE), fails=True)
    assert "the network has 2 classes, and the data have 3" in said
    said = folder.python(EXAMPLE / "prune.py", "yolov8n.yaml", folder.data, "--imgsz", str(SIZE), fails=True)
    assert "begin with a trained network" in said
