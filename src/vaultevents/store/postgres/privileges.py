"""Whom postgres runs as. It refuses uid 0, so under root it must become somebody else.

Three ways, the first that works:

1. `direct`: we are not root.
2. `namespace`: a new user namespace before exec. Inside, the uid reads 65534; outside, files stay root's.
3. `drop`: where user namespaces are forbidden (a container's usual seccomp filter), become nobody. The data belongs to
   nobody then, but stays where it is: it is named as /proc/self/cwd, which needs no passage through a 0700 parent.
   Binaries that nobody cannot reach are copied to /var/lib/vaultevents-postgres.

Root's own directories are never opened to others. Standard library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from vaultevents.core.errors import DatabaseUnusable

COPIES = Path("/var/lib/vaultevents-postgres")

_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """`uid` and `gid` own the server's files, as seen from outside."""

    way: Literal["direct", "namespace", "drop"]
    uid: int
    gid: int


def choose_identity() -> Identity:
    """The first of the three ways that works here."""
    if os.geteuid() != 0:
        return Identity("direct", os.geteuid(), os.getegid())
    if _LINUX and _holds_in_child(_enter_namespace):
        return Identity("namespace", 0, 0)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise DatabaseUnusable(
            "PostgreSQL does not run as root and there is no user nobody: start this as another user"
        ) from None
    return Identity("drop", nobody.pw_uid, nobody.pw_gid)


def become(identity: Identity, parent_pid: int) -> None:
    """In a forked child, just before exec: take the identity, and be interrupted when the parent dies (Linux only).

    The death signal comes last, because the kernel clears it whenever credentials change.
    """
    if identity.way == "namespace" and not _enter_namespace():
        raise OSError(ctypes.get_errno(), "unshare")
    if identity.way == "drop":
        _drop_to(identity)
    if _LINUX:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the signal was asked for
            os._exit(1)


def path_for(identity: Identity, data: Path) -> str:
    """How a process that started in `data` names it: nobody may have no way through the parent directories."""
    return "/proc/self/cwd" if identity.way == "drop" else str(data)


def give(tree: Path, identity: Identity) -> None:
    """Make the identity the owner of a tree that another way of running left; the top comes last, as the mark."""
    if os.geteuid() != 0 or tree.lstat().st_uid == identity.uid:
        return
    for folder, _, files in os.walk(tree, topdown=False):
        for file in files:
            os.chown(Path(folder, file), identity.uid, identity.gid, follow_symlinks=False)
        os.chown(folder, identity.uid, identity.gid)


def reachable_install(install: Path, identity: Identity) -> Path:
    """`install`, or a copy of it where the identity cannot read it."""
    if identity.way != "drop":
        return install

    def reads() -> bool:
        _drop_to(identity)
        return os.access(install / "bin" / "postgres", os.X_OK) and os.access(install / "share", os.R_OK | os.X_OK)

    return install if _holds_in_child(reads) else _copied(install)


def _copied(install: Path) -> Path:
    """A copy that all may read. The wheel's library paths are relative: its sibling `.libs` keeps its place.

    /var/lib, not a temporary directory: only root writes there, so nobody else can have put programs in our way.
    """
    made_at_ns = (install / "bin" / "postgres").stat().st_mtime_ns
    name = hashlib.sha256(f"{install}\0{made_at_ns}".encode()).hexdigest()[:16]
    target = COPIES / name
    package = install.parent
    if not target.exists():
        unfinished = COPIES / f"{target.name}.{os.getpid()}"
        shutil.copytree(install, unfinished / package.name / install.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        _open_to_all(unfinished)
        COPIES.chmod(0o755)
        _move_into_place(unfinished, target)
    return target / package.name / install.name


def _open_to_all(tree: Path) -> None:
    tree.chmod(0o755)
    for folder, folders, files in os.walk(tree):
        for entry in (Path(folder, name) for name in folders + files):
            if not entry.is_symlink():
                mode = entry.stat().st_mode
                entry.chmod(mode | (0o055 if mode & 0o100 else 0o044))


def _move_into_place(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(unfinished)  # another cluster's supervisor made the same copy meanwhile


def _enter_namespace() -> bool:
    return bool(_libc.unshare(_CLONE_NEWUSER) == 0)


def _drop_to(identity: Identity) -> None:
    os.setgroups([])
    os.setgid(identity.gid)
    os.setuid(identity.uid)


def _holds_in_child(question: Callable[[], bool]) -> bool:
    """Ask in a forked child, whose credentials the question may spoil."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
