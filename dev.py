#!/usr/bin/env python3
"""Make the environment, then run `dev.py test | lint | schema | dashboard | pictures | bench NAME | anvil`.

Other words are a command of vaultevents: `dev.py demo` runs `vaultevents demo`, and so on.

Standard library only, Python >= 3.11 with venv. Everything is installed into `.venv` beside this file from the
hash-locked requirement files, and installed again only when a lock or the interpreter changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOCKS = {"core": "requirements.lock", "test": "requirements-test.lock"}
CONTRACTS = ROOT / "contracts"
BROWSER = ROOT / "tests" / "browser"
RESULTS = ROOT / "test-results.xml"


def say(text: str) -> None:
    print(f"dev.py: {text}", file=sys.stderr, flush=True)


def stop(text: str, code: int = 1) -> NoReturn:
    say(text)
    sys.exit(code)


def digest(*files: Path) -> str:
    state = hashlib.sha256(f"{sys.version} {sys.prefix}".encode())
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def create_venv() -> None:
    say("creating .venv")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        stop(
            "this Python cannot make a virtual environment with pip; on Debian or Ubuntu run "
            f"'apt install python3-venv' and try again\n{made.stdout}{made.stderr}"
        )
    site = subprocess.run(
        [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(site, "vaultevents-src.pth").write_text(f"{ROOT / 'src'}\n")


def environment(kind: str) -> None:
    """Brings `.venv` to the state of the lock of `kind`; 'test' contains all of 'core'."""
    base, lock = VENV / "stamp-base", ROOT / LOCKS[kind]
    stamp, want = VENV / f"stamp-{kind}", digest(lock)
    python = digest(ROOT / LOCKS["core"])
    if not base.is_file() or base.read_text() != python or not PYTHON.exists():
        create_venv()
        base.write_text(python)
    if stamp.is_file() and stamp.read_text() == want:
        return
    say(f"installing {lock.name}")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*pip, "--only-binary=:all:", "--require-hashes", "-r", str(lock)], check=False)
    if done.returncode:
        stop(f"pip could not install {lock.name}: see its message above, then run the same command again")
    stamp.write_text(want)


def npm(folder: Path, needed_by: str, *afterwards: str) -> None:
    """Install the packages of `folder` that tests need from npm, where that is at hand, and run a script of it."""
    program, lock = shutil.which("npm"), folder / "package-lock.json"
    if program is None:
        say(f"npm not found: {needed_by} will be skipped")
        return
    stamp, want = folder / "node_modules" / ".stamp", digest(lock, folder / "package.json")
    if stamp.is_file() and stamp.read_text() == want:
        return
    say(f"installing {lock.relative_to(ROOT)}")
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    for command in (["ci", *quiet], *(["run", "--silent", name] for name in afterwards)):
        if subprocess.run([program, *command], cwd=folder, check=False).returncode:
            say(f"npm {command[0]} failed: see its message above; {needed_by} need it")
            return
    stamp.write_text(want)


def contracts() -> None:
    npm(CONTRACTS, "the tests on a real EVM (anvil) and with JavaScript's webhook library")


def chromium() -> None:
    npm(BROWSER, "the tests in a browser", "unpack")


def run(*command: str, **variables: str) -> int:
    return subprocess.run([str(PYTHON), *command], cwd=ROOT, env=os.environ | variables, check=False).returncode


def style() -> int:
    for tool in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        say(" ".join(tool))
        if code := run("-m", *tool):
            return code
    return 0


def lint() -> int:
    if code := style():
        return code
    say("mypy")
    return run("-m", "mypy")


def test(arguments: list[str]) -> int:
    """Linters, then every test beside the types; with arguments only pytest, with these arguments."""
    environment("test")
    contracts()
    chromium()
    if arguments:
        return run("-m", "pytest", *arguments)
    if code := style():
        return code
    # Three workers for two cores: many tests wait for a clock, a lease or a killed server. By file, in the order of the
    # folders: the long tests of e2e/ and fault/ first, and the servers of a file started once.
    parallel = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
    # compiled test files are kept, also where the user turned that off: compiling them takes 10 s in every worker
    variables = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    say("mypy, and pytest beside it")
    with tempfile.TemporaryFile() as found:
        types = subprocess.Popen([str(PYTHON), "-m", "mypy"], cwd=ROOT, stdout=found, stderr=subprocess.STDOUT)
        pytest = [str(PYTHON), "-m", "pytest", *parallel, f"--junit-xml={RESULTS}"]
        with types, subprocess.Popen(pytest, cwd=ROOT, env=variables) as tests:
            if code := types.wait():
                tests.send_signal(signal.SIGINT)
                tests.wait()
                found.seek(0)
                stop(f"mypy found errors, so the tests were stopped:\n{found.read().decode()}", code)
            say("mypy found no errors")
            code = tests.wait()
    say(f"results of each test: {RESULTS}")
    return code


def schema() -> int:
    """Write the present schema to src/vaultevents/store/schema.sql, after a migration was added."""
    environment("test")
    return run(str(ROOT / "tests" / "schema_picture.py"))


def pictures() -> int:
    """Take the pictures of docs/pictures from the demo, after a page of the console was changed."""
    environment("test")
    chromium()
    return run(str(ROOT / "tests" / "pictures.py"))


def dashboard() -> int:
    """Write deploy/grafana/vaultevents.json, after a metric or an alert was changed."""
    environment("test")
    return run(str(ROOT / "tests" / "dashboard.py"))


def anvil() -> NoReturn:
    """Run a chain with the protocol's contracts on the port that `init --network devnet` expects."""
    environment("test")
    contracts()
    os.execv(PYTHON, [str(PYTHON), str(ROOT / "tests" / "example_chain.py")])


def bench(arguments: list[str]) -> int:
    environment("test")
    files = {p.stem.replace("_", "-"): p for p in sorted((ROOT / "bench").glob("*.py")) if not p.stem.startswith("_")}
    files["requests"] = files.pop("node-requests")  # a file requests.py would hide the package of that name
    path = files.get("".join(arguments[:1]).replace("_", "-"))
    if path is None:
        stop(f"usage: python3 dev.py bench NAME [--json], NAME one of: {', '.join(sorted(files))}")
    return run(str(path), *arguments[1:])


def main(arguments: list[str]) -> int:  # noqa: RET503 - execv does not return
    if sys.version_info < (3, 11):  # noqa: UP036 - the interpreter that starts this may be an older one
        stop(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "test":
        return test(rest)
    if command == "lint":
        environment("test")
        return lint()
    if command == "schema":
        return schema()
    if command == "pictures":
        return pictures()
    if command == "dashboard":
        return dashboard()
    if command == "bench":
        return bench(rest)
    if command == "anvil":
        anvil()
    environment("core")
    os.execv(PYTHON, [str(PYTHON), "-m", "vaultevents", *arguments])  # its signals and exit code are ours


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
