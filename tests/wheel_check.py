"""`make wheel-check`: build the wheel, install it into a clean environment, generate from the file system's root.

Run as a script. The clean environment sees this environment's site-packages for the dependencies (so that nothing is
downloaded twice) but not this checkout: pagedcli itself can only come from the wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(ROOT), cwd=folder)
        wheel = next((folder / "dist").glob("*.whl"))
        print(f"built {wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB")
        run(sys.executable, "-m", "venv", str(folder / "env"), cwd=folder)
        python = folder / "env" / "bin" / "python"
        run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), cwd=folder)
        where = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
        site = Path(where.strip())
        # A plain path line, unlike site.addsitedir, does not follow the .pth file of an editable install.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        env = {**os.environ, "PYTHONNOUSERSITE": "1"}
        where = run(str(python), "-c", "import pagedcli, pagedcli.cuda, pagedcli.workloads as w;"
                    "print(pagedcli.__file__, w.__file__)", cwd=Path("/"), env=env)
        assert str(ROOT) not in where, f"the checkout was used instead of the wheel: {where}"
        prompts, out = folder / "prompts.jsonl", folder / "answers.jsonl"
        prompts.write_text('{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}\n')
        print(run(str(folder / "env" / "bin" / "pagedcli"), "generate", str(prompts), "-o", str(out),
                  cwd=Path("/"), env=env))
        row = json.loads(out.read_text())
        assert row["error"] is None, row
        assert row["usage"]["completion_tokens"] > 0, row
        print("from the wheel, run in /:", repr(row["outputs"][0]["text"]))


if __name__ == "__main__":
    main()
