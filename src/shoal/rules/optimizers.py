"""All optimizer rules by name. The families live in modules of their own."""

from __future__ import annotations

from shoal.rules.adagrad import Adadelta, Adagrad, DynamicWdAdagrad, RMSprop, RowWiseAdagrad
from shoal.rules.adam import LAMB, Adam, AdamW, Amsgrad
from shoal.rules.gradient_descent import SGD, DelayCompensated, Momentum, SignSGD
from shoal.rules.rule import Coupling, Optimizer, RuleContext
from shoal.rules.running import BatchSoftmax, MovingAverage
from shoal.rules.sparse_group import FTRL, GroupAdagrad, GroupFTRL

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Amsgrad",
    "BatchSoftmax",
    "Coupling",
    "DelayCompensated",
    "DynamicWdAdagrad",
    "GroupAdagrad",
    "GroupFTRL",
    "Momentum",
    "MovingAverage",
    "Optimizer",
    "RMSprop",
    "RowWiseAdagrad",
    "RuleContext",
    "SignSGD",
]
