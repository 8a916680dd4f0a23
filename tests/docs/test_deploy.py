"""The models exported in docs/deploy.md run in onnxruntime and in a program without Python."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import truth
from torchlml._cpu import loader

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


# torch's exporter emits this warning about its own internals.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skipif(not loader.loaded(), reason="the compiled kernel is not in use")
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("py"):
        exec(compile(block, "deploy.md", "exec"), names)
    (program,) = blocks("cpp")
    Path("run.cpp").write_text(program, encoding="utf-8")
    (commands,) = (block for block in blocks("sh") if "g++" in block)
    _, build, call = commands.splitlines()
    subprocess.run(shlex.split(build.replace("$TORCH", torch.__path__[0])), check=True)
    kernel = next(Path(loader.__file__).parent.glob("_C*.so"))
    # With an empty environment, Python packages cannot be found.
    command = shlex.split(call.replace("_C.abi3.so", str(kernel)))
    result = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    y = np.array(result.stdout.split(), dtype=float).reshape(3, 100)
    with torch.no_grad():
        logits = names["model"][0](torch.linspace(-1, 1, 24).view(3, 8)).double()
    np.testing.assert_allclose(y, [truth.solve(row.tolist(), 5).y for row in logits], atol=1e-6)
