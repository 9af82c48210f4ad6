"""Environments of their own for the servers of peers, each made once, in .peers/ at the top of the repository.

Packages that this environment has, such as torch, are used from it, so that all servers run the same model with the
same libraries.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.support.harness import ROOT

FOLDER = ROOT / ".peers"
PACKAGES = {
    "bentoml": ("bentoml",),
    "infinity": ("infinity-emb[torch,server]", "transformers<5", "optimum<2", "click<8.2"),
    "litserve": ("litserve",),
    "mosec": ("mosec",),
    "ray": ("ray[serve]",),
    "triton": ("nvidia-pytriton",),
}
DEBIAN = "/usr/bin/python3"  # with which Triton's Python backend works
_VERSION = "import sys; print(sys.version_info[:2])"


def peer_python(name: str) -> str:
    """The interpreter of a peer's environment, which is made first if it is not there.

    Raises:
        RuntimeError: it cannot be made.
    """
    folder = FOLDER / name
    python, made = str(folder / "bin" / "python"), folder / ".made"
    if not made.exists():
        print(f"installing {' '.join(PACKAGES[name])}", file=sys.stderr, flush=True)
        base = DEBIAN if name == "triton" else sys.executable
        if _run(base, "-c", _VERSION) != _run(sys.executable, "-c", _VERSION):
            raise RuntimeError(f"{base} is not of the version of {sys.executable}, whose packages it would use")
        _run(base, "-m", "venv", str(folder))
        own = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        (own / "behind.pth").write_text(sysconfig.get_path("purelib"))
        _run(python, "-m", "pip", "install", "--quiet", *PACKAGES[name])
        made.touch()
    return python


def peer_version(name: str) -> str:
    """The version of a peer's package in its environment, which is made first if it is not there.

    Raises:
        RuntimeError: it cannot be made.
    """
    package = PACKAGES[name][0].partition("[")[0]
    return _run(peer_python(name), "-c", f"from importlib.metadata import version; print(version({package!r}))")


def _run(*line: str) -> str:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    return done.stdout.strip()
