"""The request router of Ray Serve that sends a request to the replica that has cached most of its prompt."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ingot.serve.engine.routing import MOST_RECENT, Candidate, RecentBlocks, choose
from ingot.serve.ray.forwarded_request import ForwardedRequest


class PrefixRouter(RequestRouter):
    """Routes calls whose first argument is a `ForwardedRequest`, by the rule of `ingot.serve.engine.routing.choose`.

    A replica's load is the number of requests that this router has sent to it and that have not ended.
    """

    def initialize_state(self, bound: int = 16) -> None:
        """Set the state, from `RequestRouterConfig.request_router_kwargs`. `bound` is as in `choose`."""
        self._bound = bound
        self._loads: Counter[ReplicaID] = Counter()
        self._recent: dict[ReplicaID, RecentBlocks] = {}
        self._turns: Counter[ReplicaID] = Counter()
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then all others by load."""
        if not candidate_replicas:
            return []
        hashes = () if pending_request is None else _hashes(pending_request)
        candidates = [
            Candidate(index, self._loads[one], self._known(one).count(hashes), self._turns[one])
            for index, one in enumerate(replica.replica_id for replica in candidate_replicas)
        ]
        best = choose(candidates, len(hashes), self._bound)
        others = sorted((one.load, one.turn, one.index) for one in candidates if one.index != best)
        return [[candidate_replicas[best]], *([candidate_replicas[index]] for _, _, index in others)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that goes to a replica."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1
        self._turn += 1
        self._turns[replica_id] = self._turn

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember the prompt of a request that a replica has accepted."""
        self._known(replica_id).add(_hashes(pending_request), MOST_RECENT)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request. Ray calls this for requests that it could not send, too."""
        self._loads[replica_id] = max(0, self._loads[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        super().update_replicas(replicas)
        for state in (self._loads, self._recent, self._turns):
            for replica_id in [one for one in state if one not in self.curr_replicas]:
                del state[replica_id]

    def _known(self, replica_id: ReplicaID) -> RecentBlocks:
        return self._recent.setdefault(replica_id, RecentBlocks())


def _hashes(request: PendingRequest) -> tuple[bytes, ...]:
    forwarded: ForwardedRequest = request.args[0]
    return forwarded.hashes
