"""What `torch.compile` leaves to Python: tables, whose rows live outside of any graph."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_REASON = "rows of tables live outside of the graph; compile the dense part around them"
_SKIP = eval_frame._FrameExecStrategy(  # this frame, and those that it calls
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)
Marked = TypeVar("Marked")


def uncompiled(target: Marked) -> Marked:
    """Mark a function, or every method of a class: in a compiled function it is one graph break.

    As `torch.compiler.disable`, which imports the compiler (as long as torch itself takes) and
    costs every call something; this costs neither.
    """
    for made in vars(target).values() if isinstance(target, type) else (target,):
        made = made.fget if isinstance(made, property) else getattr(made, "__func__", made)
        # Python 3.13 gives every dataclass a function of `dataclasses`, which is not ours alone.
        if isinstance(made, FunctionType) and made.__module__ == target.__module__:
            # The code of a decorator's wrapper is not ours alone.
            marked: tuple[Any, ...] = (made, inspect.unwrap(made))
            eval_frame.set_code_exec_strategy(marked[1].__code__, _SKIP)
            for function in marked:
                function._torchdynamo_disable = True
                function._torchdynamo_disable_msg = _REASON
    return target
