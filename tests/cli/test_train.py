"""`secateur train`, `scratch`, `shrunk` and `finetune`: flags, the recipe's own values, and runs that follow runs."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import doing  # pyright: ignore
import pytest

import secateur.cli.prune
import secateur.cli.train
from secateur import Engine, TickTock
from secateur.cli.runs import Output, start
from secateur.recipes.jobs import Order
from secateur.recipes.paper import find_recipe
from secateur.training.distributed import World

Call = Callable[..., tuple[int, str, str]]
PLAIN = "own_networks:plain@cifar10"


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Order, TickTock, Engine, Output]]:
    """What commands would have started."""
    orders: list[tuple[Order, TickTock, Engine, Output]] = []

    def start(order: Order, settings: TickTock, engine: Engine, device: str, output: Output) -> str:
        orders.append((order, settings, engine, output))
        return "started"

    for module in (secateur.cli.prune, secateur.cli.train):
        monkeypatch.setattr(module, "start", start)
    return orders


@pytest.mark.parametrize(
    ("command", "recipe", "shown"),
    [
        ("train", "vgg16m-cub200", {"--epochs": "90", "--lr": "0.003", "--divide": "3.0"}),
        ("train", "fcn32s-voc", {"--epochs": "11", "--lr": "1e-10", "--momentum": "0.99", "--weight-decay": "0.0005"}),
        ("train", "resnet56-cifar10", {"--epochs": "160", "--lr": "0.1", "--milestones": "0.5 0.75"}),
        ("scratch", "vgg16m-cifar100", {"--epochs": "320", "--lr": "0.1"}),
        ("shrunk", "vgg16m-cub200", {"--epochs": "180", "--lr": "0.003", "--keep-macs": "0.25"}),
        ("finetune", "resnet50-imagenet", {"--epochs": "60", "--lr": "0.0 0.01", "--shape": "steps"}),
        ("finetune", "resnet56-cifar10-ours", {"--epochs": "200", "--distill": "0.9", "--shape": "warmup"}),
        ("prune", "resnet56-cifar10", {"--tick-removes": "0.002", "--finetune-epochs": "40"}),
        ("prune", "fcn32s-voc", {"--tick-lr": "1e-10", "--tock-lr": "1e-11 1e-10", "--filter-scale": "mean"}),
        ("prune", "fcn32s-voc", {"--keep-macs": "0.73"}),
        ("train", "resnet20@digits", {"--epochs": "160"}),
    ],
)
def test_help_shows_the_recipes_own_values(secateur: Call, command: str, recipe: str, shown: dict[str, str]) -> None:
    status, text, _ = secateur(command, recipe, "--help")
    assert status == 0
    _, _, options = text.partition("show this help message")
    words = " ".join(options.replace("│", " ").split())
    for flag, value in shown.items():
        # From the flag to its default, without another flag between.
        _, _, rest = words.partition(f" {flag} ")
        before, _, after = rest.partition("(default: ")
        assert after.startswith(f"{value})"), f"{flag} is {after[:20]}"
        assert " --" not in before.replace("--no-", "")


def test_help_without_a_recipe_is_the_papers(secateur: Call) -> None:
    status, text, _ = secateur("train", "--help")
    assert status == 0
    assert "RECIPE" in text
    assert "secateur train vgg16m-cub200 --data CUB --weights vgg16_bn.pth" in " ".join(text.split())


@pytest.mark.parametrize("arguments", [["recipes"], ["prune", "digits", "--help"], ["train", "fcn32s-voc", "--help"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from secateur import cli
try:
    cli.main({arguments})
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_whoever_reads_help_may_have_had_enough() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "secateur", "train", "fcn32s-voc", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("command", ["prune", "train"])
def test_the_recipe_may_stand_behind_its_options(secateur: Call, ordered: list, command: str, place: str) -> None:
    options = ["--out", "elsewhere", "--seed", "3"]
    arguments = ["digits", *options] if place == "before" else [*options, "digits"]
    assert secateur(command, *arguments)[:2] == (0, "started\n")
    ((order, settings, _, output),) = ordered
    recipe = find_recipe("digits")
    assert order == Order(recipe="digits")
    assert output.out == Path("elsewhere")
    wanted = recipe.pruning.but(seed=3) if command == "prune" else recipe.training.settings(seed=3)
    assert settings == wanted
    assert settings.tock_epochs == 3 or settings.finetune_epochs == 15


def test_flags_of_train(secateur: Call, ordered: list) -> None:
    flags = "--epochs 30 --lr 0.2 --milestones 0.2 0.4 --divide 5 --momentum 0.8 --weight-decay 0 --seed 4"
    hardware = "--precision bf16 --channels-last --accumulate 2 --clip-norm 3 --no-graphs"
    source = "--data somewhere --batch-size 7 --erase 4 --width 0.5 --hold-out 9 --weights file.pth"
    assert secateur("train", "resnet20@cifar10", *f"{flags} {hardware} {source}".split())[0] == 0
    ((order, settings, engine, _),) = ordered
    assert settings == TickTock(
        keep_macs=1.0,
        finetune_epochs=30,
        finetune_shape="steps",
        finetune_lr=(0.0, 0.2),
        milestones=(0.2, 0.4),
        milestone_divides=5,
        momentum=0.8,
        weight_decay=0,
        seed=4,
    )
    assert engine == Engine(precision="bf16", channels_last=True, accumulate=2, clip_norm=3.0, graphs=False)
    assert order == Order(
        recipe="resnet20@cifar10",
        data=str(Path("somewhere").absolute()),
        batch_size=7,
        erase=4,
        width=0.5,
        hold_out=9,
        weights="file.pth",
    )


def test_flags_of_scratch(secateur: Call, ordered: list) -> None:
    assert secateur("scratch", "vgg16m-cifar100", "runs/pruned", "--seed", 2)[0] == 0
    ((order, settings, _, _),) = ordered
    assert order == Order(recipe="vgg16m-cifar100", weights="runs/pruned", fresh=True)
    assert (settings.finetune_epochs, settings.seed, settings.milestones) == (320, 2, (0.5, 0.75))


def test_flags_of_shrunk(secateur: Call, ordered: list, cifar: Path) -> None:
    assert secateur("shrunk", PLAIN, "--data", cifar, "--width", 4, "--keep-macs", 0.25)[0] == 0
    ((order, settings, _, _),) = ordered
    assert order.width == pytest.approx(2.0, abs=0.3)
    assert order == Order(recipe=PLAIN, data=str(cifar), width=order.width)
    assert settings.finetune_epochs == 320


def test_flags_of_finetune(secateur: Call, ordered: list) -> None:
    flags = "--epochs 7 --lr 0.01 0.02 --shape cosine --optimizer adamw --distill 0.5 --ema 0.9 --weight-decay 0.1"
    assert secateur("finetune", "resnet56-cifar10", "runs/pruned", *flags.split())[0] == 0
    ((order, settings, _, _),) = ordered
    assert order == Order(recipe="resnet56-cifar10", weights="runs/pruned")
    assert settings == TickTock(
        keep_macs=1.0,
        finetune_epochs=7,
        finetune_lr=(0.01, 0.02),
        finetune_shape="cosine",
        optimizer="adamw",
        distill=0.5,
        ema=0.9,
        weight_decay=0.1,
    )


def test_all_that_shapes_training_can_be_said_of_finetune(secateur: Call, ordered: list) -> None:
    flags = "--nesterov --no-decay-norms --distill 0.5 --distill-temperature 2 --evaluate end"
    assert secateur("finetune", "resnet56-cifar10", "runs/pruned", *flags.split())[0] == 0
    ((_, settings, _, _),) = ordered
    assert (settings.nesterov, settings.decay_norms, settings.evaluate) == (True, False, "end")
    assert (settings.distill, settings.distill_temperature) == (0.5, 2.0)


@pytest.mark.parametrize("name", ["resnet50-imagenet", "fcn32s-voc", "vgg16m-cifar100-ours"])
def test_finetune_is_the_recipes_own_fine_tuning(secateur: Call, ordered: list, name: str) -> None:
    assert secateur("finetune", name, "runs/pruned")[0] == 0
    ((_, settings, _, _),) = ordered
    pruning = find_recipe(name).pruning
    for key in (
        "finetune_epochs",
        "finetune_lr",
        "finetune_shape",
        "momentum",
        "weight_decay",
        "distill",
        "milestones",
    ):
        assert getattr(settings, key) == getattr(pruning, key), key


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [
        (["train", "resnet56-cifar10"], 16),
        (["scratch", "resnet56-cifar10", "runs/pruned"], 32),
        (["finetune", "resnet56-cifar10", "runs/pruned"], 4),
        (["prune", "resnet56-cifar10"], 4),
    ],
)
def test_a_rehearsal(secateur: Call, ordered: list, arguments: list[str], epochs: int) -> None:
    assert secateur(*arguments, "--epochs-scale", 0.1)[0] == 0
    ((_, settings, _, _),) = ordered
    assert settings.finetune_epochs == epochs


@pytest.mark.parametrize(("flags", "left"), [([], 0.4), (["--keep-macs", "0.3"], 0.3)])
def test_as_much_is_left_as_the_recipe_says_unless_the_user_does(
    secateur: Call, ordered: list, flags: list[str], left: float
) -> None:
    assert secateur("prune", "resnet56-cifar10", *flags)[0] == 0
    assert ordered[0][1].keep_macs == left


def test_another_budget_than_the_recipes(secateur: Call, ordered: list) -> None:
    assert secateur("prune", "resnet56-cifar10", "--keep-params", 0.3)[0] == 0
    assert (ordered[0][1].keep_macs, ordered[0][1].keep_params) == (None, 0.3)
    status, _, err = secateur("prune", "resnet56-cifar10", "--keep-params", 0.3, "--keep-macs", 0.4)
    assert (status, "got keep_macs and keep_params" in err) == (2, True), "though 0.4 is the recipe's too"


OWN = "tiny_job:with_settings"


@pytest.mark.parametrize("command", [["prune", OWN], ["finetune", OWN, "runs/pruned"]])
def test_a_job_brings_its_own_settings(secateur: Call, ordered: list, command: list[str]) -> None:
    rates = "--finetune-lr" if command[0] == "prune" else "--lr"
    assert secateur(*command)[0] == 0
    assert secateur(*command, rates, 0.1, 0.2, "--optimizer", "sgd")[0] == 0
    (_, brought, *_), (_, given, *_) = ordered
    assert (brought.optimizer, brought.finetune_lr, brought.finetune_epochs) == ("adamw", (1e-4, 3e-3), 2)
    assert (given.optimizer, given.finetune_lr, given.finetune_epochs) == ("sgd", (0.1, 0.2), 2)
    assert "(default: adamw)" in secateur(*command, "--help")[1]


def test_another_budget_than_the_jobs(secateur: Call, ordered: list) -> None:
    assert secateur("prune", OWN)[0] == 0
    assert secateur("prune", "--keep-macs", 0.3, OWN)[0] == 0
    assert [(settings.keep_macs, settings.keep_params) for _, settings, *_ in ordered] == [(None, 0.6), (0.3, None)]


@pytest.mark.parametrize("name", ["with_a_dict", "with_a_score"])
def test_settings_that_a_job_cannot_bring(secateur: Call, name: str) -> None:
    status, _, err = secateur("prune", f"tiny_job:{name}")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(
        f"secateur: tiny_job:{name}.settings must be a secateur.TickTock, with its score by name; got "
    )


SHORT = "--tick-removes 0.2 --ticks-per-tock 1 --tock-epochs 1 --finetune-epochs 1 --keep-macs 0.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture
def chain(folder: Path, secateur: Call, cifar: Path) -> Path:
    """Runs that follow each other, made once; said.json holds what the commands said."""
    if (folder / "said.json").exists():
        return folder
    commands = {
        "trained": ["train", PLAIN, "--epochs", 2],
        "pruned": ["prune", PLAIN, "--weights", folder / "trained", *SHORT.split()],
        "tuned": ["finetune", PLAIN, folder / "pruned", "--epochs", 2, "--distill", 0.5],
        "scratch": ["scratch", PLAIN, folder / "pruned", "--epochs", 2],
    }
    common = ["--data", cifar, "--device", "cpu", "--quiet", "--json", "--batch-size", 10]
    said = {}
    for name, command in commands.items():
        status, out, err = secateur(*command, *common, "--out", folder / name)
        assert (status, err) == (0, ""), err
        said[name] = json.loads(out)
    (folder / "said.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("name", ["trained", "pruned", "tuned", "scratch"])
def test_what_a_run_says_in_the_end_is_in_its_summary(chain: Path, name: str) -> None:
    said = json.loads((chain / "said.json").read_text())[name]
    assert said == {key: doing.summary(chain / name)["after"][key] for key in ("macs", "params", "metrics")}


@pytest.mark.parametrize("name", ["trained", "pruned", "tuned", "scratch"])
def test_evaluate_finds_what_the_run_has_found(chain: Path, secateur: Call, cifar: Path, name: str) -> None:
    given = ["evaluate", PLAIN, "--data", cifar, "--weights", chain / name, "--device", "cpu"]
    status, out, _ = secateur(*given, "--json")
    assert status == 0
    metrics = doing.summary(chain / name)["after"]["metrics"]
    assert json.loads(out) == pytest.approx(metrics, rel=1e-6)
    status, out, _ = secateur(*given)
    lines = dict(line.split() for line in out.splitlines())
    assert lines == {key: f"{value:.4f}" for key, value in metrics.items()}


def test_runs_that_follow_a_pruned_one_have_its_shape(chain: Path) -> None:
    shapes = [doing.shapes(doing.weights(chain / name / "result/model.safetensors")) for name in ("pruned", "tuned")]
    assert shapes[0] == shapes[1]
    assert doing.shapes(doing.weights(chain / "scratch/result/model.safetensors")) == shapes[0]
    assert doing.same(
        doing.weights(chain / "tuned/teacher.safetensors"), doing.weights(chain / "trained/result/model.safetensors")
    )


def test_pruning_a_pruned_network_is_refused_in_one_line(chain: Path, secateur: Call, cifar: Path, tmp_path) -> None:
    given = ["--weights", chain / "pruned", "--data", cifar, "--out", tmp_path / "run", "--quiet", "--device", "cpu"]
    status, out, err = secateur("prune", PLAIN, *given)
    assert (status, out) == (2, "")
    assert (
        err == f"secateur: {chain / 'pruned'} is pruned already: take its run further (secateur further), or finetune\n"
    )


def test_a_rehearsal_trains_for_less_first(secateur: Call, cifar: Path, tmp_path: Path) -> None:
    given = ["--data", cifar, "--out", tmp_path / "run", "--quiet", "--device", "cpu"]
    status, _, err = secateur("prune", PLAIN, *given, "--epochs-scale", 0.01)
    assert (status, err) == (0, "")
    assert doing.summary(tmp_path / "run" / "baseline")["settings"]["finetune_epochs"] == 2


@pytest.mark.parametrize("command", ["train", "prune", "scratch", "finetune", "shrunk"])
def test_a_folder_that_holds_a_run_is_left_alone(chain: Path, secateur: Call, cifar: Path, command: str) -> None:
    before = (chain / "trained" / "config.json").read_bytes()
    more = [chain / "pruned"] if command in ("scratch", "finetune") else []
    status, out, err = secateur(command, PLAIN, *more, "--data", cifar, "--out", chain / "trained")
    assert (status, out) == (2, "")
    there = chain / "trained"
    assert err == f"secateur: {there} holds a run already: secateur resume {there}, or name another --out\n"
    assert (there / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "resnet20@cifar11"], "there is no dataset 'cifar11'; did you mean 'cifar10' or 'cifar100'?"),
        (["train", "table1"], "table1 is an experiment of several runs: secateur reproduce table1"),
        (["train", PLAIN, "--epochs", "0"], "epochs must be 1 or more, got 0"),
        (["train", PLAIN, "--epochs-scale", "-1"], "epochs_scale must be above 0, got -1.0"),
        (["train", PLAIN, "--milestones", "2"], "milestones are shares of the epochs, between 0 and 1"),
        (["train", PLAIN, "--accumulate", "0"], "accumulate and checkpoint_steps must be 1 or more"),
        (["train", PLAIN, "--device", "gpu"], "there is no device 'gpu' here ("),
        (["train", PLAIN, "--weights", "nowhere"], "there is neither a run nor a file with weights at nowhere"),
        (["scratch", PLAIN, "nowhere"], "there is neither a run nor a file with weights at nowhere"),
        (["finetune", PLAIN, "nowhere"], "there is neither a run nor a file with weights at nowhere"),
        (["finetune", PLAIN, "nowhere", "--distill", "1"], "distill is a share, at least 0 and below 1, got 1.0"),
        (["shrunk", PLAIN, "--keep-macs", "0"], "keep_macs is the share that is left, above 0 and at most 1, got 0.0"),
        (["shrunk", PLAIN, "--epochs", "0"], "epochs must be 1 or more, got 0"),
    ],
)
def test_a_mistake_is_one_line(secateur: Call, cifar: Path, arguments: list[str], message: str, tmp_path: Path) -> None:
    status, out, err = secateur(*arguments, "--data", cifar, "--out", tmp_path / "run", "--quiet")
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith(f"secateur: {message}")
    assert not (tmp_path / "run" / "config.json").exists()


def test_what_is_trained_first_has_scalars_of_its_own(
    secateur: Call, cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, str, int]] = []

    class Writer:
        """Instead of TensorBoard's."""

        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((self.folder, name, step))

        def flush(self) -> None:
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    given = ["--data", cifar, "--out", tmp_path / "run", "--quiet", "--device", "cpu", "--tensorboard"]
    assert secateur("prune", PLAIN, *given, "--epochs-scale", 0.01)[0] == 0
    assert written
    # Two numbers of a kind at one step would be drawn as one curve.
    assert len(written) == len(set(written))


@pytest.mark.parametrize(("rank", "said"), [(0, True), (1, False)])
def test_of_several_processes_one_tells_the_result(rank: int, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = types.SimpleNamespace(macs=1, params=1)
    result = types.SimpleNamespace(after=cost, metrics={})
    monkeypatch.setattr("secateur.training.distributed.join", lambda: World(rank, 2))
    monkeypatch.setattr("secateur.cli.runs.watched", lambda *_: result)
    told = start(Order(recipe="digits"), TickTock(keep_macs=0.5), Engine(), "cpu", Output(json=True))
    assert bool(told) == said
