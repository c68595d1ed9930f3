"""`shoal ckpt verify`: every file of a checkpoint against its manifest."""

from __future__ import annotations

from rich.console import Console

from shoal.checkpoint.verifying import verify as look
from shoal.cli.ckpt_inspect import describe_bytes
from shoal.cli.ckpt_places import find

__all__ = ["verify"]

_UNLISTED = 5  # names to print at most


def verify(path: str, *, chain: bool, out: Console) -> bool:
    """Print what was looked at and what is wrong; whether all is well.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    report = look(find(path).url, chain=chain)

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"checkpoint: {report.url}")
    for name in report.checkpoints:
        say(f"looked at: {name}")
    for problem in report.problems:
        say(f"wrong: {problem.checkpoint}/{problem.file}: {problem.why}")
    for name in report.unlisted[:_UNLISTED]:
        say(f"no part of it: {name}")
    if len(report.unlisted) > _UNLISTED:
        say(f"no part of it: {len(report.unlisted) - _UNLISTED:,} more files")
    counted = f"{report.files:,} files, {describe_bytes(report.bytes)}, {report.rows:,} rows"
    say(f"{'all well' if report.ok else f'{len(report.problems):,} problems'}: {counted}")
    return report.ok
