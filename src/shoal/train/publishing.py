"""A run's publisher: its rows and dense weights, for replicas, while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from shoal.checkpoint.dense import named_state
from shoal.checkpoint.saving import Saving
from shoal.comm.transport import Secret
from shoal.config.tree import PublishSettings, RunConfig
from shoal.errors import ConfigError, ShoalError
from shoal.sync.pages import check_dense
from shoal.sync.publisher import Publisher, address_of_rank, check_published
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks
from shoal.train.saving import SavedChain


def check_publishing(config: RunConfig, main: Learner) -> None:
    """Before a run begins.

    Raises:
        ConfigError: rows or dense weights that cannot be published.
    """
    if config.publish is None:
        return
    if config.distributed.dense == "fsdp2":
        allowed, remedy = "whole dense weights on rank 0", "Leave it out, or choose another dense."
        raise ConfigError("publish", "distributed.dense=fsdp2", allowed, remedy)
    if not main.served:
        check_published(main.tables.hosted)


@contextmanager
def publishing(
    config: RunConfig, ranks: Ranks, main: Learner, report: Callable[[str], None], chain: SavedChain
) -> Iterator[Publishing]:
    """Within it a model's rows are published, each rank's by itself.

    Nothing is, where the config has no `publish`, or rows are on parameter servers, which publish
    them.

    Args:
        config: of the run.
        ranks: who trains together.
        main: the model.
        report: prints a line.
        chain: what the run continues from.

    Raises:
        ConfigError: an address that is taken, or a run whose dense weights are in parts.
        DataError: dense weights that cannot be sent.
    """
    settings, name = config.publish, main.name
    if settings is None or main.served:
        yield Publishing(None, PublishSettings(), ranks, main, report)
        return
    check_dense(dense_of(main))  # here, so that it never ends training later
    resumed = None
    if chain.manifest is not None and chain.cursors is not None and name in chain.cursors:
        resumed = chain.manifest.id, chain.cursors[name]
    with ExitStack() as held:
        publisher = held.enter_context(
            Publisher(
                main.tables.hosted,
                rank=ranks.rank,
                every_s=settings.every_s,
                keep_bytes=settings.keep_bytes,
                resumed=resumed,
            )
        )
        address = address_of_rank(settings.address, ranks.rank)
        server = publisher.serve(address, secret=Secret.of_file(settings.token_file))
        held.callback(server.stop)
        every = ranks.gathered(server.address, what="addresses of publishers")
        report(f"publishing at {', '.join(every)}")
        yield Publishing(publisher, settings, ranks, main, report)


def dense_of(main: Learner) -> dict[str, Tensor]:
    """All of a module's state but extra state, which is no tensor."""
    return {k: v for k, v in named_state(main.module).items() if isinstance(v, Tensor)}


@dataclass(slots=True, eq=False)
class Publishing:
    """What a run tells its publisher, if it has one; rank 0 publishes the dense weights."""

    publisher: Publisher | None
    settings: PublishSettings
    ranks: Ranks
    main: Learner
    report: Callable[[str], None]
    _due_s: float = 0.0
    _published: int = -1  # the step of dense weights

    def saved(self, saving: Saving) -> None:
        """A save begins: replicas that load it follow on from there."""
        if self.publisher is not None:
            self.publisher.saved(saving.id, saving.point[self.main.name])

    def stepped(self) -> None:
        """A step is done: dense weights are copied when they are due."""
        if self.publisher is not None and time.monotonic() >= self._due_s:
            self._publish_dense(self.publisher)

    def waits(self) -> None:
        """No batch comes: dense weights of steps since they were copied are, when they are due."""
        if self.main.steps > self._published:
            self.stepped()

    def finish(self) -> None:
        """Publish the last state, and wait for replicas that are there; a failure is reported."""
        if self.publisher is None:
            return
        try:
            self._publish_dense(self.publisher)
            done = self.publisher.drain(self.settings.linger_s)
        except (ShoalError, OSError) as error:
            self.report(f"the last state was not published: {error}")
            return
        if not done:
            self.report("replicas are behind; the run ends without them")

    def _publish_dense(self, publisher: Publisher) -> None:
        if self.ranks.leads:
            with self.main.averaged():
                publisher.publish_dense(dense_of(self.main))
        self._published = self.main.steps
        self._due_s = time.monotonic() + self.settings.dense_every_s
