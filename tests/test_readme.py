import re
from dataclasses import replace
from pathlib import Path

import pytest

from secateur.data.arrays import Arrays
from secateur.data.digits import digits

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
ENDS = [r"masked and shrunk differ by .*\n", r"Conv2d\(3, 12, .*\)\n", r"torch.Size\(\[1, 1000\]\)\n"]


def few_digits() -> tuple[Arrays, Arrays]:
    """One batch of them to an epoch, so that the README's own schedule takes seconds."""
    train, test = (replace(data, images=data.images[:64], labels=data.labels[:64]) for data in digits())
    return train, test


@pytest.mark.parametrize(("example", "end"), list(zip(EXAMPLES, ENDS, strict=True)))
def test_the_python_example_runs(example: str, end: str, capsys, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secateur.data.digits.digits", few_digits)
    exec(compile(example, README, "exec"), {})
    assert re.search(rf"{end}\Z", capsys.readouterr().out)
