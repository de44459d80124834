"""Writes a model folder in bf16 from one in fp32: `python -m tests.peers.bf16_weights FROM TO`.

Engines that read bf16 then load half the bytes, as they would from the model's own hub page.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def convert(source: Path, target: Path) -> None:
    """All of `source`, with its weights rounded to bf16; `target` appears only when it is whole."""
    if target.is_dir():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for item in source.iterdir():
        if item.suffix == ".safetensors":
            weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(item).items()}
            save_file(weights, partial / item.name, {"format": "pt"})
        elif item.name == "config.json":
            config = json.loads(item.read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
            (partial / item.name).write_text(json.dumps(config, indent=2), encoding="utf-8")
        elif item.is_file():
            shutil.copy(item, partial / item.name)
    partial.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
