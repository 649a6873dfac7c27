"""The commit of the code that runs: of the repository around it, or the one that a job was submitted from."""

import os
import subprocess

COMMIT, DIRTY = "VITRAY_GIT_COMMIT", "VITRAY_GIT_DIRTY"


def commit_facts() -> dict[str, str]:
    """Return `git.commit` and `git.dirty`, without what is unknown; `dirty` ignores untracked files."""
    if commit := os.environ.get(COMMIT):  # a job's files have no repository around them
        facts = {"git.commit": commit, "git.dirty": os.environ.get(DIRTY, "")}
        return {name: value for name, value in facts.items() if value}
    commit = command_output("git", "rev-parse", "HEAD")
    if not commit:
        return {}
    changes = command_output("git", "status", "--porcelain", "--untracked-files=no")
    # It is unknown after a timeout in a large tree.
    return {"git.commit": commit} | ({} if changes is None else {"git.dirty": str(bool(changes)).lower()})


def commit_variables() -> dict[str, str]:
    """Return the environment in which `commit_facts` gives the same answer."""
    facts, names = commit_facts(), {COMMIT: "git.commit", DIRTY: "git.dirty"}
    return {variable: facts[name] for variable, name in names.items() if name in facts}


def command_output(*command: str) -> str | None:
    """Return a command's output; None if it is missing, fails or takes longer than three seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
