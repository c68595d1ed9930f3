"""A run's publisher: its rows and dense weights, for replicas, while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor

from shoal.checkpoint.dense import named_state
from shoal.checkpoint.saving import Saving
from shoal.comm.transport import Secret
from shoal.config.tree import RunConfig
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
        raise ConfigError(
            "publish",
            got="distributed.dense=fsdp2",
            allowed="whole dense weights on rank 0",
            remedy="Leave publish out, or choose another dense.",
        )
    if not main.served:
        check_published(main.tables.hosted)


class Publishing:
    """Publishes a model's rows, each rank its own, and rank 0 the dense weights.

    Nothing, where the config has no `publish`, or rows are on parameter servers.

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

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        main: Learner,
        report: Callable[[str], None],
        chain: SavedChain,
    ) -> None:
        self._settings, self._ranks, self._main, self._report = config.publish, ranks, main, report
        self._chain = chain
        self._publisher: Publisher | None = None
        self._held = ExitStack()
        self._due_s, self._published = 0.0, -1  # the step of dense weights
        if main.served:
            self._settings = None  # its servers publish their rows

    def __enter__(self) -> Publishing:
        if self._settings is None:
            return self
        settings, chain, name = self._settings, self._chain, self._main.name
        check_dense(self._dense())  # here, so that it never ends training later
        resumed = None
        if chain.manifest is not None and chain.cursors is not None and name in chain.cursors:
            resumed = chain.manifest.id, chain.cursors[name]
        publisher = Publisher(
            self._main.tables.hosted,
            rank=self._ranks.rank,
            every_s=settings.every_s,
            keep_bytes=settings.keep_bytes,
            resumed=resumed,
        )
        with ExitStack() as held:
            held.enter_context(publisher)
            server = publisher.serve(
                address_of_rank(settings.address, self._ranks.rank),
                secret=Secret.of_file(settings.token_file),
            )
            held.callback(server.stop)
            every = self._ranks.gathered(server.address, what="addresses of publishers")
            self._held = held.pop_all()
        self._publisher = publisher
        self._report(f"publishing at {', '.join(every)}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()

    def saved(self, saving: Saving) -> None:
        """A save begins: replicas that load it follow on from there."""
        if self._publisher is not None:
            self._publisher.saved(saving.id, saving.point[self._main.name])

    def stepped(self) -> None:
        """A step is done: dense weights are copied when they are due."""
        if self._publisher is not None and time.monotonic() >= self._due_s:
            self._publish_dense(self._publisher)

    def waits(self) -> None:
        """No batch comes: dense weights of steps since they were copied are, when they are due."""
        if self._main.steps > self._published:
            self.stepped()

    def finish(self) -> None:
        """Publish the last state, and wait for replicas that are there; a failure is reported."""
        if self._publisher is None or self._settings is None:
            return
        try:
            self._publish_dense(self._publisher)
            done = self._publisher.drain(self._settings.linger_s)
        except (ShoalError, OSError) as error:
            self._report(f"the last state was not published: {error}")
            return
        if not done:
            self._report("replicas are behind; the run ends without them")

    def _dense(self) -> dict[str, Tensor]:
        """All of the module's state but extra state, which is no tensor."""
        state = named_state(self._main.module)
        return {k: v for k, v in state.items() if isinstance(v, Tensor)}

    def _publish_dense(self, publisher: Publisher) -> None:
        if self._ranks.leads:
            with self._main.averaged():
                publisher.publish_dense(self._dense())
        self._published = self._main.steps
        if self._settings is not None:
            self._due_s = time.monotonic() + self._settings.dense_every_s
