import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(capsys):
    pytest.importorskip("torchvision")
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(compile(example, README, "exec"), {})
    assert capsys.readouterr().out.endswith("torch.Size([1, 1000])\n")
