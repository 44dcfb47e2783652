"""A PostgreSQL server for the tests of a module, where PostgreSQL is installed; it refuses to run as root."""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from trinity_lightning.buffer.sql import sa


def find(program):
    """A program of PostgreSQL, which distributions leave off the PATH; None where there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (str(installed[-1]) if installed else None)


def unprivileged_user():
    """Whom to run the server as: None for oneself."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in known), None)


@pytest.fixture(scope="module")
def postgres_url():
    """Makes URLs of fresh databases, on a server that listens only on a socket in a folder of its own."""
    programs = {name: find(name) for name in ("initdb", "pg_ctl")}
    user = unprivileged_user()
    if None in programs.values():
        pytest.skip("PostgreSQL is not installed (no initdb, pg_ctl)")
    if os.geteuid() == 0 and user is None:
        pytest.skip("PostgreSQL does not run as root, and there is no other user")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    # Not tmp_path: folders above it are closed to other users, and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

        def run(program, *arguments):
            command = [programs[program], "-D", f"{folder}/data", *arguments]
            done = subprocess.run(
                command, user=user, cwd=folder, capture_output=True, text=True, check=False, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr

        run("initdb", "-A", "trust", "-U", "tester", "--no-sync", "-E", "UTF8")
        run(
            "pg_ctl", "-w", "-s", "-l", f"{folder}/log", "-o", f"-c listen_addresses= -c fsync=off -k {folder}", "start"
        )
        numbers = itertools.count()

        def make():
            name = f"buffer{next(numbers)}"
            server = sa.create_engine(
                f"postgresql+psycopg://tester@/postgres?host={folder}", isolation_level="AUTOCOMMIT"
            )
            with server.connect() as connection:
                connection.exec_driver_sql(f"CREATE DATABASE {name}")
            server.dispose()
            return f"postgresql://tester@/{name}?host={folder}"

        yield make
        run("pg_ctl", "-w", "-s", "-m", "immediate", "stop")
