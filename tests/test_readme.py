import re
from pathlib import Path

import pytest

from secateur.recipes import demo

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
ENDS = [r"masked and shrunk differ by .*\n", r"Conv2d\(3, 12, .*\)\n", r"torch.Size\(\[1, 1000\]\)\n"]


@pytest.mark.parametrize(("example", "end"), list(zip(EXAMPLES, ENDS, strict=True)))
def test_the_python_example_runs(example: str, end: str, capsys, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "BASELINE_EPOCHS", 2)
    exec(compile(example.replace("finetune_epochs=15", "finetune_epochs=1"), README, "exec"), {})
    assert re.search(rf"{end}\Z", capsys.readouterr().out)
