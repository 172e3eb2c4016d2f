"""What goes wrong in a harsh fleet, and when; and the network whose services can be down."""

from anabranch.testing.world.fleet import FaultSchedule
from anabranch.testing.world.processes import Network

_OUTAGE_SECONDS_MAX = 20.0


class HarshNetwork(Network):
    def __init__(self, fleet):
        super().__init__(fleet)
        self.down_until = {}
        """By service: until when it is down."""

    def is_down(self, service):
        return self._loop.time() < self.down_until.get(service, 0.0)

    def _arrive(self, process, service, request, answer=None, on_trouble=lambda: None):
        if self.is_down(service):
            on_trouble()
        else:
            super()._arrive(process, service, request, answer, on_trouble)


class HarshFaults(FaultSchedule):
    def __init__(self, fleet):
        super().__init__(fleet)
        options = fleet.options
        if options.store_outage_seconds:
            self._once(self._take_store_down)
        if options.store_is_emptied:
            self._once(self._empty_store)
        if options.deleted:
            self._loop.call_later(fleet.random.uniform(3, options.faulty_seconds / 2), self._delete_stream)
        if options.roll_back_seconds and options.roll_back_every_seconds:
            self._each(options.roll_back_every_seconds, lambda _: self._roll_store_back(), 0)
        elif options.roll_back_seconds:
            self._once(self._roll_store_back)

    def _worker_faults(self):
        pause, *others = super()._worker_faults()
        return [pause, (self._fleet.options.stall_every_seconds, self._stall), *others]

    def _schedule_stream_faults(self):
        super()._schedule_stream_faults()
        fleet, options = self._fleet, self._fleet.options
        self._each(options.rescale_every_seconds, lambda _: fleet.stream.rescale(), 0)
        self._each(options.taken_over_every_seconds, lambda _: fleet.stream.take_over(), 0)
        self._each(options.consumer_deleted_every_seconds, lambda _: fleet.stream.delete_consumer(), 0)
        self._each(options.handler_outage_every_seconds, lambda _: self._take_down("handler"), 0)
        self._each(options.letters_down_every_seconds, lambda _: self._take_down("letters"), 0)
        self._each(options.row_deleted_every_seconds, lambda _: fleet.rows.delete_lease(fleet.random), 0)
        if options.trims:
            self._loop.call_later(fleet.random.uniform(20, 40), self._trim)

    def end(self):
        super().end()
        self._fleet.network.down_until.clear()

    def _once(self, action):
        self._loop.call_later(self._fleet.random.uniform(3, self._fleet.options.faulty_seconds), action)

    def _stall(self, index):
        self._fleet.workers[index].process.stall(self._duration())

    def _take_store_down(self):
        seconds = self._fleet.options.store_outage_seconds
        self._fleet.network.down_until["store"] = self._loop.time() + seconds
        for worker in self._fleet.workers:
            worker.process.report_commits_blocked(seconds)

    def _take_down(self, service):
        seconds = self._fleet.random.uniform(1, _OUTAGE_SECONDS_MAX)
        self._fleet.network.down_until[service] = self._loop.time() + seconds

    def _roll_store_back(self):
        if not self._ended:
            self._fleet.rows.roll_back(int(self._fleet.options.roll_back_seconds * 1000))

    def _trim(self):
        """Trims seldom: each trim makes all records a day older, so after a second one soon nothing would be left."""
        if self._fleet.options.trims_unread and not self._fleet.rows.all_shards_have_progress:
            self._loop.call_later(1.0, self._trim)
        elif not self._ended:
            shortest = 0 if self._fleet.options.trims_unread else 25
            self._fleet.stream.skip_ahead(self._fleet.random.uniform(shortest, shortest + 5))
            self._loop.call_later(self._fleet.random.uniform(35, 45), self._trim)

    def _empty_store(self):
        at_work = [worker.process.name for worker in self._fleet.workers if worker.is_at_work]
        self._fleet.rows.empty(at_work, moves=self._fleet.random.random() < 0.5)

    def _delete_stream(self):
        self._fleet.stream.delete(is_known=self._fleet.rows.has_streams)
        self._loop.call_later(self._fleet.random.uniform(15, 30), self._create_stream_again)

    def _create_stream_again(self):
        """Waits, as with the service, until every running worker has asked for the missing stream."""
        if all(_was_healthy_since(worker.process, self._loop.time() - 8) for worker in self._fleet.workers):
            self._fleet.stream.create(self._fleet.options.shard_count)
        else:
            self._loop.call_later(1.0, self._create_stream_again)


def _was_healthy_since(process, at):
    """Whether nothing has paused, stalled or disconnected it since then. Always true for a dead process."""
    troubled_until = max([process.paused_until, process.stalled_until, *process.cut_until.values()])
    return not process.is_alive or troubled_until < at
