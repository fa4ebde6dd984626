"""The commands in a process where every warning is an error, also one about a file that nobody has closed."""

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent.parent / "support"
COMMANDS = """\
recipes
analyze tiny_job:build
train tiny_job:build --epochs 1 --device cpu --quiet --out trained
prune tiny_job:build --weights trained --keep-macs 0.7 --tick-removes 0.3 --finetune-epochs 1 --device cpu --out pruned
continue pruned --keep-macs 0.3 --device cpu --quiet --out smaller
resume smaller --device cpu --quiet
repair pruned --device cpu --quiet --out repaired
evaluate tiny_job:build --weights trained --device cpu
structure pruned smaller
report pruned smaller --out report.html
export pruned --build tiny_job:build --state-dict weights.safetensors --torchscript network.ts
bench pruned --build tiny_job:build --repetitions 2 --device cpu
"""
ALL = "import sys; from secateur import cli; [cli.main(line.split()) for line in sys.stdin]"


def test_no_command_warns(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", ALL],
        input=COMMANDS,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # An error in a destructor, or at the end, does not change the status.
    assert "Warning" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert (tmp_path / "network.ts").is_file()
