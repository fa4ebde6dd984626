"""Imports go down only, and cost nothing until they are needed."""

import ast
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import secateur

SOURCE = Path(secateur.__file__).parent

# From the top floor down; a package may import from the floors below its own.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"integrations"},
    {"recipes"},
    {"results"},
    {"runs"},
    {"data", "models"},
    {"pruning", "training"},
    {"channels"},
    {"extras", "files", "settings"},
    {"errors", "modes", "nested", "randomness", "timing", "words"},
]
FORBIDDEN = {
    "training": {"channels"},
    "data": {"pruning", "channels"},
    "models": {"pruning", "training"},
}


def imported_packages(path: Path) -> set[str]:
    """The parts of secateur that a file imports, anywhere in it; `secateur` for the top itself."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the full name"
            assert node.module
            if node.module == "secateur":
                modules.update(f"secateur.{alias.name}" for alias in node.names)
            else:
                modules.add(node.module)
    return {re.split(r"\W", f"{m}.".removeprefix("secateur."))[0] or "secateur" for m in modules if is_ours(m)}


def is_ours(module: str) -> bool:
    return module == "secateur" or module.startswith("secateur.")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path):
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    floor = next((i for i, packages in enumerate(FLOORS) if package in packages), None)
    assert floor is not None, f"{package} has no floor; give it one in FLOORS"
    below = set().union(*FLOORS[floor + 1 :]) - FORBIDDEN.get(package, set())
    assert imported_packages(path) - {package} <= below


def run_python(code: str) -> list[str]:
    """What the code prints, as JSON, in a fresh interpreter."""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return json.loads(output)


def test_neither_import_nor_help_loads_torch():
    code = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
import secateur
assert "torch" not in sys.modules
from secateur.cli import main
with redirect_stdout(StringIO()) as out:
    try:
        main(["--help"])
    except SystemExit as stop:
        assert stop.code == 0
assert "analyze" in out.getvalue()
print(json.dumps(list(sys.modules)))
"""
    assert "torch" not in run_python(code)


def test_public_names_load_torch_and_the_standard_library_only():
    # Beside its requirements, which it may load later, torch takes some packages where it finds them.
    code = """
import json, sys
def top():
    return sorted({module.partition(".")[0] for module in sys.modules})
before = top()
import torch
with_torch = top()
import secateur
for name in secateur.__all__:
    getattr(secateur, name)
print(json.dumps([before, with_torch, top()]))
"""
    before, with_torch, loaded = run_python(code)
    allowed = {"secateur", *sys.stdlib_module_names, *modules_of({"torch", "safetensors"}), *before, *with_torch}
    assert set(loaded) <= allowed


def modules_of(distributions: set[str]) -> set[str]:
    """The top-level modules of these distributions and of all they require."""
    required, waiting = set(), set(distributions)
    while waiting:
        name = waiting.pop()
        required.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        names = {normalized(re.split(r"[^\w.-]", r)[0]) for r in requirements if "extra ==" not in r}
        waiting |= names - required
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(normalized(owner) in required for owner in owners)
    }


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_a_system_without_file_locks_prunes_without_a_folder(tmp_path):
    code = f"""
import json, os, sys, torch
sys.modules["fcntl"] = None
for name in ("register_at_fork", "fork", "pread", "pwrite"):
    delattr(os, name)
import secateur
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
task = secateur.classification([(torch.randn(8, 3, 8, 8), torch.arange(8) % 4)])
settings = secateur.TickTock.one_shot(keep_macs=0.5, finetune_epochs=1)
given = model, torch.randn(2, 3, 8, 8), task
refused = []
try:
    secateur.prune(*given, settings=settings, folder={str(tmp_path / "run")!r})
except secateur.InvalidSetting as error:
    refused.append(error.remedy)
secateur.save(secateur.prune(*given, settings=settings), {str(tmp_path / "result")!r})
print(json.dumps(refused))
"""
    assert len(run_python(code)) == 1
    assert (tmp_path / "result" / "model.safetensors").is_file()


def test_every_public_name_resolves():
    assert sorted(secateur.__all__) == sorted(secateur._HOME)
    for name in secateur.__all__:
        assert getattr(secateur, name).__module__ == f"secateur.{secateur._HOME[name]}"
    with pytest.raises(AttributeError, match="has no attribute 'analyse'"):
        _ = secateur.analyse
